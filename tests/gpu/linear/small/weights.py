"""Weights of `linear_small` in place on a GPU: random codes, scales that are powers of two, and what they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fast
from ao_lab.config.recipe import named
from fast.kernels.linear_small import host
from fast.kernels.linear_small.layout import FACTORED, WORDS, ArrangedWeight, filled
from fast.scale_factors import rows_of_words, rows_with_parts
from reference import Quantized
from tests.support.linear_cases import exact_levels

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


def tilings(name: str, shape: tuple[int, int], count: int, most: int = 16) -> list[host.Tiling]:
    """Those to be tried."""
    rows, columns = map(filled, shape)
    return host.candidates(rows, columns, *KINDS[name], count, most)


def compiled(task: tuple[Any, ...]) -> str:
    """Compile a call's kernels, into Triton's cache on the disk; no GPU is touched. Returns what went wrong, or nothing.

    task: scheme, shape, rows of X, tiling, dtype's name, whether there is a bias.
    """
    from tests.fast.kernels.compiling.kernel_compiler import compiling

    name, (n, length), count, tiling, dtype, biased = task
    element, group = KINDS[name]
    rows, columns = filled(n), filled(length)
    blocks = columns // group if group else 1
    zero = torch.empty((blocks, rows // 2), dtype=torch.int32) if "asymmetric" in name else None
    words = torch.empty((rows // 64, columns // 64, WORDS[element]), dtype=torch.int32)
    scale = torch.empty((blocks, rows))
    if element in FACTORED:
        scale = torch.empty((rows_of_words(columns, group), rows // 2), dtype=torch.int32)
    if element == "nf4":
        scale = torch.empty((rows_with_parts(rows, columns, n * blocks), rows), dtype=torch.int32)
    w = ArrangedWeight(words, scale, zero, (n, length), element, group)
    kind = getattr(torch, dtype)
    bias = torch.empty(n, dtype=kind) if biased else None
    try:
        with compiling([]):
            host.linear_small(torch.empty((count, length), dtype=kind), w, bias, tiling=tiling)
    except Exception as error:  # noqa: BLE001  the rest goes on
        return f"{task}: {type(error).__name__}: {str(error)[-300:]}"
    return ""
