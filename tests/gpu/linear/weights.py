"""Preshuffled weights in place on a GPU: random codes, scales that are powers of two or any, and what they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fast
from ao_lab.config.recipe import named
from fast.kernels.sm90_w4a16_gemm.host import ATOM, Weight
from fast.kernels.triton_small_m import host
from fast.kernels.triton_small_m.dense import arranged_dense
from fast.kernels.triton_small_m.layout import FACTORED, WORDS
from fast.scale_factors import EXPONENTS, ArrangedWeight, filled, rows_of_words, rows_with_parts
from reference import Quantized
from tests.gpu.linear.family import Problem, bounded_product, exact_product
from tests.support.linear_cases import distance_allowed, exact_levels, inputs, weight

#: Elements of weights that the host makes.
MOST_OF_HOST = 1 << 19
#: Where calls run.
DEVICE = "cuda"
#: Schemes by the element and the columns of a scale.
KINDS = {
    "int4_g128": ("int4", 128), "int4_g32": ("int4", 32), "int4_g128_asymmetric": ("int4", 128),
    "int4_g32_asymmetric": ("int4", 32), "int4_g64": ("int4", 64), "int8_rowwise": ("int8", 0), "int8_g128": ("int8", 128),
    "int8_rowwise_asymmetric": ("int8", 0), "fp8_rowwise": ("e4m3", 0), "fp8_tensorwise": ("e4m3", 0),
    "mxfp4": ("e2m1", 32), "nvfp4": ("e2m1", 16), "mxfp8_e4m3": ("e4m3_mx", 32), "nf4": ("nf4", 64),
}  # fmt: skip


def drawn(name: str, shape: tuple[int, int], seed: int = 0) -> tuple[Quantized, torch.Tensor]:
    """A weight whose products with small integers are exact in float32 in any order, and its values in float64."""
    scheme, (n, length) = named(name), shape
    if name == "nf4":
        return _of_levels(exact_levels(scheme, n, length, seed))
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def some(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, device=DEVICE)

    group = KINDS[name][1] or length
    kept = () if name.endswith("tensorwise") else (n, length // group)
    powers = some(-1, 2, kept)
    scale, outer = 2.0 ** powers.float(), None if scheme.outer is None else torch.tensor(2.0, device=DEVICE)
    zero = None if scheme.zero is None else some(-8, 8, (n, length // group)).to(torch.int8)
    if scheme.element == "float8_e4m3fn":
        # Integers up to 16 and halves.
        values = some(-32, 33, shape) / 2
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).double()
    else:
        bits = scheme.format.bits
        codes = some(0, 2**bits, shape).to(torch.uint8)
        values = (codes.to(torch.int64) ^ 2 ** (bits - 1)) - 2 ** (bits - 1)
        if scheme.format.kind == "float":
            values = torch.tensor(scheme.format.values.tolist(), device=DEVICE, dtype=torch.float64)[
                codes.long()
            ]
        if bits == 4:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
    blocks = values.double().view(n, -1, group)
    if zero is not None:
        blocks = blocks - zero.double()[:, :, None]
    blocks = blocks * (scale.double()[:, :, None] if kept else scale.double())
    if outer is not None:
        blocks = blocks * outer.double()
    if scheme.scale.storage == "float8_e8m0fnu":
        scale = (powers + 127).to(torch.uint8)
    elif scheme.scale.storage == "float8_e4m3fn":
        scale = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    w = Quantized(codes, scale, outer, zero, shape, 1, scheme, packed=scheme.format.bits < 8)
    return w, blocks.view(shape)


def filled_weight(name: str, shape: tuple[int, int]) -> ArrangedWeight:
    """Random words in the private layout, to be timed."""
    element, group = KINDS[name]
    rows, columns = map(filled, shape)
    words = torch.randint(
        -(2**31), 2**31, (rows // 64, columns // 64, WORDS[element]), device=DEVICE, dtype=torch.int32
    )
    if element in ("e4m3", "e4m3_mx"):
        # Bits of the exponent without the highest: no code is NaN.
        words &= -0x40404041
    blocks = columns // group if group else 1
    scale = torch.rand((blocks, rows), device=DEVICE) * 0.01
    if element in FACTORED:
        # Powers of two, as pairs or as fields of four, and 1 as float32 in front.
        size, times = (rows_of_words(columns, group), rows // 2), 0x800080 if group == 16 else 0x1010101
        scale = torch.randint(200, 230, size, device=DEVICE, dtype=torch.int64)
        scale = ((scale * times + 2**31) % 2**32 - 2**31).to(torch.int32)
        scale[0] = 127 << 23
    if element == "nf4":
        size = rows_with_parts(rows, columns, shape[0] * blocks), rows
        scale = (torch.rand(size, device=DEVICE) * 0.01).view(torch.int32)
    zero = None
    if name.endswith("asymmetric"):
        zero = torch.randint(0, 8, (blocks, rows // 2), device=DEVICE, dtype=torch.int32) * 0x10001
    return ArrangedWeight(words, scale, zero, shape, element, group)


def _of_levels(w: Quantized) -> tuple[Quantized, torch.Tensor]:
    """A weight of the host, and its values: of -1, 0 and 1, and powers of two."""
    dense = fast.dequantize(w).to(DEVICE).double()
    parts = {part: getattr(w, part).to(DEVICE) for part in ("codes", "scale", "outer", "zero")}
    return replace(w, **parts), dense


def arranged_on_device(stored: Quantized) -> ArrangedWeight:
    """The preshuffled weight of one that lies anywhere."""
    parts = {part: getattr(stored, part) for part in ("codes", "scale", "zero", "outer")}
    moved = {name: None if part is None else part.to(DEVICE) for name, part in parts.items()}
    made = host.arrange(replace(stored, **moved))
    assert made is not None, f"{stored.scheme.name} {stored.shape} is not preshuffled"
    return made


def copied(stored: Quantized) -> Quantized:
    """In memory of its own."""
    parts = {part: getattr(stored, part) for part in ("codes", "scale", "zero", "outer")}
    return replace(stored, **{name: None if part is None else part.clone() for name, part in parts.items()})


def exact(problem: Problem) -> tuple[Any, ...]:
    """Operands whose sums are exact, and the result."""
    stored, dense = drawn(problem.scheme, problem.shape)
    x, bias, wanted = exact_product(problem, dense)
    return x, arranged_on_device(stored), bias, wanted


def random(problem: Problem) -> tuple[Any, ...] | None:
    """Random inputs and weight of the host, products and the reference's bound of them; of small weights alone."""
    if problem.shape[0] * problem.shape[1] > MOST_OF_HOST:
        return None
    stored = weight(named(problem.scheme), *problem.shape)
    x = inputs(problem.rows, problem.shape[1], problem.dtype)
    truth, allowed = distance_allowed(x, stored, None)
    return x.to(DEVICE), arranged_on_device(stored), truth, allowed


def columns(problem: Problem) -> tuple[ArrangedWeight, torch.Tensor]:
    """A weight of random scales, and its elements as the inputs' dtype has them."""
    w = randomly_scaled(arranged_on_device(drawn(problem.scheme, problem.shape)[0]))
    dense = arranged_dense(w, problem.dtype)
    assert dense is not None
    return w, dense


def random_scales(problem: Problem) -> tuple[Any, ...]:
    """Random inputs by such a weight, products and their bound."""
    w, dense = columns(problem)
    x = torch.randn(problem.rows, problem.shape[1], device=DEVICE).to(problem.dtype)
    return x, w, *bounded_product(x, dense.double())


def randomly_scaled(w: ArrangedWeight) -> ArrangedWeight:
    """The codes with scales that are no powers of two; of MX, that are any within reach of float16; of NF4, before levels."""
    torch.manual_seed(0)
    if w.element == "nf4":
        blocks = w.columns // w.group
        scales = torch.rand(blocks, w.rows, device=DEVICE) * 0.1 + 0.001
        return replace(w, scale=torch.cat([scales.view(torch.int32), w.scale[blocks:]]))
    if w.element in FACTORED:
        return replace(w, scale=random_factors(w))
    return replace(w, scale=torch.rand_like(w.scale) * 0.1 + 0.001)


def random_factors(w: ArrangedWeight) -> torch.Tensor:
    """As `fast.scale_factors` packs them: exponent fields under 4, or e4m3 scales under a scale that rounds all of them."""
    size, exponent = (w.scale.shape[0] - 1, *w.scale.shape[1:]), EXPONENTS[w.element, w.group]
    if w.group == 16:
        codes = torch.randint(0, 120, (*size, 2), device=DEVICE).to(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).float() * 2.0**exponent
        own, words = 0.00123, values.to(torch.bfloat16).view(torch.int32)
    else:
        fields = exponent + torch.randint(115, 125, (*size, 4), device=DEVICE)
        own, words = 4.0, fields.to(torch.uint8).view(torch.int32)
    first = torch.full((1, *size[1:]), own, device=DEVICE).view(torch.int32)
    return torch.cat([first, words.squeeze(-1)])


def decoded(name: str) -> Weight:
    """What `sm90_w4a16_gemm` decodes of a scheme."""
    element, group = KINDS[name]
    return Weight(element, name.endswith("asymmetric"), max(1, ATOM // (group or ATOM)))


def by_dense(x: torch.Tensor, w: ArrangedWeight) -> torch.Tensor:
    """torch's product with the dense weight, which is made for the call."""
    dense = arranged_dense(w, x.dtype)
    assert dense is not None
    return torch.nn.functional.linear(x, dense)


def compile_small_m(task: tuple[Problem, Any]) -> None:
    """Kernels of `triton_small_m` for a problem and a tiling (None: the rule's), into Triton's cache; no GPU is touched."""
    from tests.fast.kernels.compiling.kernel_compiler import compiling

    (name, (n, length), count, dtype, bias), tiling = task
    element, group = KINDS[name]
    rows, padded = filled(n), filled(length)
    blocks = padded // group if group else 1
    zero = torch.empty((blocks, rows // 2), dtype=torch.int32) if "asymmetric" in name else None
    words = torch.empty((rows // 64, padded // 64, WORDS[element]), dtype=torch.int32)
    scale = torch.empty((blocks, rows))
    if element in FACTORED:
        scale = torch.empty((rows_of_words(padded, group), rows // 2), dtype=torch.int32)
    if element == "nf4":
        scale = torch.empty((rows_with_parts(rows, padded, n * blocks), rows), dtype=torch.int32)
    w = ArrangedWeight(words, scale, zero, (n, length), element, group)
    added = None if bias is None else torch.empty(n, dtype=bias)
    with compiling([]):
        host.linear_small(torch.empty((count, length), dtype=dtype), w, added, tiling=tiling)
