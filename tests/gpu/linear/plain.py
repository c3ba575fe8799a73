"""Families that multiply rows by weights in the plain order: `sm90_intn_small_m` of packed integers, and products of codes by
codes, `sm90_s8_gemm` and `triton_int_scaled_mm`, with whole layers that quantize their inputs on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch

import fast
from ao_lab import Recipe
from ao_lab.config.recipe import named
from ao_lab.tensor.quantized_tensor import from_quantized
from fast import dispatch
from fast.gemm import families
from fast.kernels.sm90_intn_small_m import host
from fast.kernels.sm90_intn_small_m.host import KERNEL, Form, Variant, choose, placed
from fast.kernels.sm90_s8_gemm import host as s8_host
from fast.kernels.triton_scaled_mm import host as scaled_host
from fast.kernels.triton_scaled_mm.host import Tile, int_tile_of
from reference import SCHEMES, Quantized, Scheme
from tests.gpu.harness.products import s8_gemm
from tests.gpu.harness.subject import Asked, Check, differs, in_threads
from tests.gpu.harness.timing import Call, several
from tests.gpu.linear.family import Family, Problem, by_torch, dense_weights, numbers, small_bias
from tests.support import family_times
from tests.support import linear_cases as cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Shape = tuple[int, int]


# Packed integers of 2, 3, 5 and 6 bits.

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
BITS = (
    "int2_g32", "int2_g64_asymmetric", "int3_g32", "int3_g128_asymmetric", "int5_g64", "int5_g32_asymmetric",
    "int6_g32_asymmetric", "int6_g128", "int3_rowwise", "int4_g32",
)  # fmt: skip
COUNTS, SMALL = (1, 2, 5, 8, 16, 17, 33, 64, 90, 128), ((37, 128), (150, 1024), (277, 384), (64, 4096))
#: Shapes of models come first; then small ones, whose shapes and dtypes take turns.
BIT_PROBLEMS = (
    *(Problem(*one) for one in product(("int2_g32", "int3_g32_asymmetric", "int6_g128"), SHAPES, (1, 8, 16, 32, 64, 128))),
    *(
        Problem(scheme, SMALL[(i + i // len(COUNTS)) % len(SMALL)], count, dtype, dtype)
        for i, (scheme, count) in enumerate(product(BITS, COUNTS))
        for dtype in ((BF16, FP16) if count in (1, 8, 64) else ((BF16, FP16)[i % 2],))
    ),
)  # fmt: skip
#: Tiles, by rows of x at most: those of the coefficients, and others. Tiles of fewer rows of x read the weight several times.
CANDIDATES = {
    2: ("8,1,1,8,1,4,4,4", "8,2,1,4,1,4,3,3", "8,2,2,4,1,2,4,2", "8,7,1,4,1,4,5,1", "8,7,1,2,1,2,8,1", "8,7,1,4,1,2,8,1"),
    8: ("8,1,1,8,1,4,4,4", "8,2,1,4,1,4,3,3", "8,2,2,4,1,2,4,2", "8,7,1,4,1,4,5,1", "8,7,1,2,1,2,8,1", "8,4,1,2,1,2,4,3"),
    16: ("16,2,1,4,1,2,4,3", "16,2,2,4,1,2,4,2", "16,4,1,2,1,2,4,2", "16,7,1,2,1,2,6,1", "16,7,1,4,1,2,6,1"),
    32: ("32,2,2,2,1,1,4,3", "32,4,1,2,1,2,3,2", "32,7,1,2,1,2,4,1", "32,7,1,2,1,1,6,1", "32,4,2,2,1,1,4,1",
         "16,8,1,4,1,2,5,1"),
    64: ("64,4,2,1,1,1,3,2", "64,8,1,1,1,1,4,1", "64,7,1,1,1,1,5,1", "64,7,1,2,1,2,3,1", "64,7,1,2,1,1,5,1",
         "64,8,1,2,1,1,4,1", "48,7,1,2,1,2,4,1", "32,8,1,2,1,2,3,1"),
    128: ("128,8,1,1,1,1,3,1", "64,8,1,2,1,1,4,1", "64,4,2,1,1,1,3,2", "128,7,1,1,1,1,3,1", "128,7,1,2,1,1,4,1",
          "128,8,1,2,1,1,3,1", "96,7,1,2,1,1,4,1", "96,8,1,2,1,1,3,1"),
}  # fmt: skip


def scheme_of(name: str) -> Scheme:
    """A scheme by any of its names."""
    record = named(name)
    assert record is not None, f"no scheme {name!r}"
    return record


def form_of(problem: Problem) -> Form:
    """A weight's form."""
    form = host.form_of(scheme_of(problem.scheme), (16, problem.shape[1]), 1, True)
    assert form is not None, f"{problem.scheme} in rows of {problem.shape[1]} is not read"
    return Form(*form[:-1], problem.dtype == FP16)


def bit_variants(problem: Problem, every: bool) -> list[Variant | None]:
    """The rule's, and other tiles."""
    form, (n, k) = form_of(problem), problem.shape
    tiles = CANDIDATES[next(most for most in CANDIDATES if problem.rows <= most)] if every else ()
    others = [placed(Variant(*map(int, one.split(","))), form, problem.rows, n, k) for one in tiles]
    return [one for one in dict.fromkeys([choose(form, problem.rows, n, k), *others]) if one is not None] or [
        None
    ]


def by_bits(x: Any, w: Quantized, bias: Any = None, variant: Any = None, allocate: Any = None) -> Any:
    """The product by `sm90_intn_small_m`."""
    return host.sm90_intn_small_m(x, w, bias, variant)


def compile_bits(pairs: Iterable[tuple[Problem, Any]]) -> None:
    """Into the cache of cubins."""
    tasks = [(variant, form_of(problem)) for problem, variant in pairs if variant is not None]
    in_threads(lambda task: KERNEL.cubin(*task), tasks)


def on_device(w: Quantized) -> Quantized:
    """A weight on the GPU."""
    return replace(w, **{name: one.cuda() for name, one in vars(w).items() if isinstance(one, torch.Tensor)})


def exact_bits(problem: Problem) -> tuple[Any, ...]:
    """Any codes, scales 1/2, 1 and 2, zero points of 8 bits."""
    draw = torch.Generator("cuda").manual_seed(sum(problem.shape) + problem.rows)
    w = random_bits(problem.scheme, problem.shape)
    w.codes.copy_(torch.randint(0, 256, w.codes.shape, device="cuda", generator=draw))
    w.scale.copy_(2.0 ** torch.randint(-1, 2, w.scale.shape, device="cuda", generator=draw))
    if w.zero is not None:
        w.zero.copy_(torch.randint(-128, 128, w.zero.shape, device="cuda", generator=draw))
    x = torch.randint(-1, 2, (problem.rows, problem.shape[1]), device="cuda", generator=draw).to(
        problem.dtype
    )
    bias = small_bias(problem)
    return x, w, bias, cases.exact_result(x, w, bias)


def bounded_bits(problem: Problem) -> tuple[Any, ...] | None:
    """Random numbers of the host, small shapes alone: products and the reference's bound."""
    if problem.shape not in SMALL:
        return None
    w = cases.weight(scheme_of(problem.scheme), *problem.shape)
    x = cases.inputs(problem.rows, problem.shape[1], problem.dtype)
    return x.cuda(), on_device(w), *cases.distance_allowed(x, w, None)


def random_bits(scheme: str, shape: Shape) -> Quantized:
    """A weight of normal numbers."""
    return fast.quantize(torch.randn(shape, device="cuda"), scheme_of(scheme), packed=True)


def bit_peers(scheme: str, shape: Shape, held: list[Any]) -> Callable[[Any], dict[str, list[Call]]]:
    """bfloat16, and the kernels of other devices, or dequantization and torch's product."""
    dense = dense_weights(shape)

    def older(x: torch.Tensor, w: Quantized) -> Any:
        with mock.patch.object(host, "launch_for", return_value=None):
            y = family_times.linear(x, w, device=None)
        return torch.nn.functional.linear(x, fast.dequantize(w, x.dtype)) if y is None else y

    return lambda x: {"bf16": by_torch(dense, x), "older": [partial(older, x, w) for w in held]}


def public_bits(asked: Asked) -> Iterator[Check]:
    """`fast.linear` takes the kernel."""
    for name in ("int2_g32", "int3_g32_asymmetric", "int6_g128"):
        yield f"fast.linear {name}", partial(wrong_public_bits, name)


def wrong_public_bits(name: str) -> Iterator[str]:
    """Other bits than the kernel's."""
    x, w, *_ = exact_bits(Problem(name, SHAPES[2], 16))
    yield from differs("fast.linear", fast.linear(x, w), by_bits(x, w))


INTN = Family(
    families.SM90_INTN_SMALL_M.name, families.SM90_INTN_SMALL_M.about, by_bits, bit_variants, compile_bits, BIT_PROBLEMS,
    exact_bits, random_bits, bit_peers,
    schemes=("int2_g32", "int3_g32", "int5_g32", "int6_g32", "int3_g128", "int3_g32_asymmetric"), shapes=SHAPES,
    rows=(1, 2, 4, 8, 16, 32, 64, 128), random=bounded_bits, named=lambda one: "rule" if one is None else numbers(one),
    more=public_bits,
)  # fmt: skip


# Codes of 8 bits by codes of 8 bits.

#: Tokens, programs that share them, stages that one warpgroup is behind the other.
S8_VARIANTS = ((256, 2, 2), (128, 2, 2), (256, 1, 2), (256, 2, 0), (256, 2, 1))
S8_PROBLEMS = tuple(Problem("int8_rowwise", *one) for one in (
    ((4104, 4096), 257, BF16, FP32), ((14336, 4096), 1000, BF16, None), ((4096, 528), 8192, FP16, FP16),
    ((520, 16), 513, BF16, BF16), ((8, 1040), 300, FP32, BF16), ((6144, 14336), 1025, BF16, FP32),
    ((136, 272), 129, FP16, None), ((4112, 1040), 2049, FP32, None), ((1032, 4112), 16391, BF16, BF16),
))  # fmt: skip
#: Tiles of Triton's kernel beside the rule's, of few and of many rows; those that do not fit a product are left out.
FEW_TILES = [Tile(rows, *rest) for rows in (16, 64) for rest in (
    (64, 128, 1, 5, 4, True), (64, 256, 1, 4, 4, True), (64, 256, 2, 4, 4, True), (128, 128, 1, 5, 4, True),
    (128, 256, 1, 3, 8, True))]  # fmt: skip
MANY_TILES = [Tile(128, 256, 128, 1, stages, 8, False) for stages in (3, 4)] + [
    Tile(128, 128, 128, 1, 4, 8, False), Tile(128, 128, 128, 1, 5, 4, False), Tile(64, 256, 128, 1, 4, 4, False),
    Tile(256, 128, 128, 1, 4, 8, False), Tile(128, 64, 128, 1, 6, 4, False), Tile(256, 128, 64, 1, 6, 8, False)]  # fmt: skip


def drawn_codes(problem: Problem) -> tuple[Quantized, Quantized, Any, torch.Tensor]:
    """Codes of all sizes, scales, a bias about as large as the products; exact sums, each step rounded to float32, then
    once."""
    (n, k), m = problem.shape, problem.rows
    x, w = (
        torch.randint(0, 256, (rows, k), device="cuda", dtype=torch.int16).to(torch.uint8) for rows in (m, n)
    )
    x_scale, scale = torch.rand(m, 1, device="cuda") * 1e-3, torch.rand(n, 1, device="cuda") - 0.5
    zero = (
        torch.randint(-128, 128, (m, 1), device="cuda").to(torch.int8)
        if problem.scheme.endswith("asymmetric")
        else None
    )
    bias = None if problem.bias is None else torch.randn(n, device="cuda").to(problem.bias)
    sums = x.view(torch.int8).double() - (0.0 if zero is None else zero.double())
    y = (sums @ w.view(torch.int8).double().t()).float() * x_scale * scale.t()
    wanted = (y if bias is None else y + bias.float()).to(problem.dtype)
    left = Quantized(x, x_scale, None, zero, (m, k), 1, SCHEMES[problem.scheme])
    return (
        left,
        Quantized(w, scale, None, None, (n, k), 1, SCHEMES["int8_rowwise"]),
        (bias, problem.dtype),
        wanted,
    )


def s8_variants_of(problem: Problem, every: bool) -> list[Any]:
    """All that are compared, each with as many stages as fit."""
    stored = s8_host.is_stored(problem.dtype)
    return [s8_host.fitted(tokens, pair, stored, skew) for tokens, pair, skew in S8_VARIANTS]


def by_s8(x: Quantized, w: Quantized, given: Any = None, variant: Any = None, allocate: Any = None) -> Any:
    """The product by `sm90_s8_gemm`; given: a bias and the dtype of the output."""
    bias, dtype = given or (None, BF16)
    return s8_gemm(x, w, bias, dtype, variant, allocate)


def compile_s8(pairs: Iterable[tuple[Problem, Any]]) -> None:
    """Into the cache of cubins."""
    tasks = [(one, s8_host.problem_of(problem.dtype)) for problem, one in pairs]
    in_threads(lambda task: s8_host.KERNEL.cubin(*task), tasks)


def by_tiles(x: Quantized, w: Quantized, given: Any = None, tile: Any = None, allocate: Any = None) -> Any:
    """The product by `triton_int_scaled_mm`."""
    bias, dtype = given or (None, BF16)
    return scaled_host.linear_of_codes(x, w, bias, dtype, None, tile=tile)


def tiles_of(problem: Problem, every: bool) -> list[Tile]:
    """The rule's first."""
    m, others = problem.rows, FEW_TILES if problem.rows <= 64 else MANY_TILES
    rule = int_tile_of(m, *problem.shape)
    return [*dict.fromkeys([rule, *(one for one in others if every and one.rows >= min(m, 16))])]


def stored_codes(scheme: str, shape: Shape) -> Quantized:
    """A weight whose inputs are of the scheme: its codes are symmetric."""
    stored = {"int8_rowwise_asymmetric": "int8_rowwise"}.get(scheme, scheme)
    return fast.quantize(torch.randn(shape, device="cuda", dtype=BF16), stored)


def code_inputs(problem: Problem) -> Quantized:
    """Codes of normal numbers beside zero."""
    x = torch.randn(problem.rows, problem.shape[1], device="cuda", dtype=BF16) + 0.3
    return fast.quantize(x, problem.scheme)


@torch.compile(dynamic=False)
def scaled(sums: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What follows torch's integer sums, in one pass."""
    return (sums.float() * x * w).to(BF16)


def by_int_mm(x: Quantized, w: Quantized) -> torch.Tensor:
    """torch's product of the same codes."""
    return scaled(torch._int_mm(x.codes.view(torch.int8), w.codes.view(torch.int8).t()), x.scale, w.scale.t())


def by_scaled_mm(x: Quantized, w: Quantized) -> torch.Tensor:
    """torch's product of float8, a scale for each row."""
    a, b = (q.codes.view(torch.float8_e4m3fn) for q in (x, w))
    return torch._scaled_mm(a, b.t(), x.scale, w.scale.t(), out_dtype=BF16, use_fast_accum=True)


def code_peers(scheme: str, shape: Shape, held: list[Any]) -> Callable[[Any], dict[str, list[Call]]]:
    """bfloat16; a layer, its quantization included; the public function; torch's products of int8 and of float8."""
    dense, recipe = dense_weights(shape), Recipe(weight=held[0].scheme, activation=SCHEMES[scheme])
    layers = [from_quantized(w, recipe, BF16).requires_grad_(False) for w in held]
    floats = several(lambda: fast.quantize(dense[0], "fp8_rowwise"), dense[0].nbytes / 2)

    def of(x: Quantized) -> dict[str, list[Call]]:
        given = fast.dequantize(x, BF16)
        eight = fast.quantize(given, "fp8_rowwise")
        found: dict[str, list[Call]] = {
            "bf16": by_torch(dense, given),
            "layer": by_torch(layers, given),
            "codes": [partial(fast.linear_of_codes, x, w, dtype=BF16) for w in held],
            "fp8": [partial(by_scaled_mm, eight, w) for w in floats],
        }
        if x.zero is None and len(x.codes) > 16:
            found["int_mm"] = [partial(by_int_mm, x, w) for w in held]
        return found

    return of


def routed(asked: Asked) -> Iterator[Check]:
    """The public call takes the kernel, and its repetition does."""
    yield "linear_of_codes", wrong_route


def wrong_route() -> Iterator[str]:
    """What is wrong with it."""
    x, w, (bias, dtype), right = drawn_codes(Problem("int8_rowwise", (4096, 4096), 1024, BF16, BF16))
    dispatch.CALLS.clear()
    for call in ("first", "again"):
        yield from differs(call, fast.linear_of_codes(x, w, bias, dtype=dtype), right)
    steps = [step for call, _ in dispatch.CALLS.values() for step in getattr(call, "steps", ())]
    if not any(getattr(launch, "kernel", None) is s8_host.KERNEL for launch, *_ in steps):
        yield "the kernel was not taken"


S8 = Family(
    families.SM90_S8_GEMM.name, families.SM90_S8_GEMM.about, by_s8, s8_variants_of, compile_s8, S8_PROBLEMS, drawn_codes,
    stored_codes, code_peers, schemes=("int8_rowwise",), shapes=(*SHAPES, (6144, 4096)), rows=(256, 512, 1024, 2048, 8192),
    named=lambda one: one.name, inputs=code_inputs, more=routed,
)  # fmt: skip
SCALED_MM = Family(
    families.TRITON_INT_SCALED_MM.name, families.TRITON_INT_SCALED_MM.about, by_tiles, tiles_of, lambda pairs: None,
    tuple(Problem(name, shape, rows) for name in ("int8_rowwise", "int8_rowwise_asymmetric") for shape in SHAPES
          for rows in (2, 16, 64, 256, 1024)),
    drawn_codes, stored_codes, code_peers, schemes=("int8_rowwise", "int8_rowwise_asymmetric"), shapes=SHAPES,
    rows=(2, 16, 64, 256, 1024, 8192), named=lambda one: numbers(astuple(one)), inputs=code_inputs,
)  # fmt: skip

SUBJECTS = tuple(one.subject for one in (INTN, S8, SCALED_MM))
