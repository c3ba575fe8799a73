"""Bits of `sm90_w4a16_gemm` on a GPU: each column of the weight alone, integers, and random numbers within a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fast.kernels.linear_small.dense import arranged_dense
from fast.kernels.linear_small.layout import FACTORED, ArrangedWeight, arrange
from fast.kernels.sm90_w4a16_gemm.host import Product, weight_of
from fast.kernels.sm90_w4a16_gemm.select import candidates
from fast.kernels.sm90_w4a16_gemm.variants import Variant
from fast.scale_factors import EXPONENTS
from tests.gpu.linear.small import weights

REPEATS = 100
BF16, FP16 = torch.bfloat16, torch.float16
#: Scheme, rows and columns of the weight, rows of x, dtype of x, dtype of a bias.
CASES: tuple[tuple[Any, ...], ...] = (
    ("int4_g128", (256, 512), 129, BF16, None), ("int4_g128", (384, 1024), 1000, BF16, BF16),
    ("int4_g64", (256, 640), 200, BF16, torch.float32), ("int4_g32", (128, 256), 130, BF16, None),
    ("int4_g128_asymmetric", (256, 768), 257, BF16, None), ("int4_g32_asymmetric", (640, 512), 300, FP16, BF16),
    ("int8_rowwise", (256, 512), 129, BF16, FP16), ("int8_g128", (384, 384), 511, FP16, None),
    ("int8_rowwise_asymmetric", (128, 1024), 192, BF16, None), ("fp8_rowwise", (256, 896), 385, BF16, BF16),
    ("fp8_tensorwise", (512, 128), 160, FP16, None), ("int4_g128", (1024, 4096), 2049, FP16, FP16),
    ("mxfp4", (256, 512), 129, BF16, None), ("mxfp4", (640, 896), 385, FP16, BF16),
    ("nvfp4", (256, 512), 129, BF16, BF16), ("nvfp4", (384, 1024), 1000, BF16, torch.float32),
    ("nvfp4", (640, 896), 300, FP16, None), ("mxfp8_e4m3", (256, 512), 129, BF16, FP16),
    ("mxfp8_e4m3", (384, 896), 511, FP16, None), ("mxfp4", (1024, 4096), 2049, BF16, BF16),
    ("int4_g128", (4096, 4096), 128, BF16, BF16), ("int4_g32", (1280, 2048), 40, FP16, None),
    ("int4_g128_asymmetric", (2048, 4096), 65, BF16, FP16), ("int8_rowwise", (896, 4096), 33, BF16, None),
    ("fp8_rowwise", (4096, 1792), 100, FP16, BF16), ("mxfp8_e4m3", (2048, 2048), 64, BF16, None),
    ("nvfp4", (1920, 2048), 96, BF16, BF16), ("int4_g128", (14336, 1024), 512, BF16, None),
    ("int8_g128", (6144, 1024), 1024, BF16, None), ("int4_g32_asymmetric", (4096, 2048), 700, BF16, None),
    # Warpgroups that take turns: tiles of 64, 96 and 128, and several of a program.
    ("int4_g128", (14336, 512), 64, BF16, BF16), ("int4_g128_asymmetric", (14336, 768), 90, FP16, None),
    ("int8_rowwise", (14336, 512), 100, BF16, None), ("fp8_rowwise", (28672, 384), 96, FP16, FP16),
    ("mxfp4", (14336, 384), 128, BF16, None), ("nvfp4", (28672, 256), 33, BF16, torch.float32),
    ("mxfp8_e4m3", (28672, 384), 120, BF16, None), ("int4_g32_asymmetric", (14336, 512), 65, BF16, None),
    # Tiles of two sizes: in some columns, in all, by some clusters.
    ("int4_g128", (14336, 512), 1024, BF16, BF16), ("mxfp8_e4m3", (14336, 384), 1000, FP16, None),
    ("nvfp4", (28672, 256), 400, BF16, BF16), ("int4_g128_asymmetric", (6144, 512), 700, BF16, FP16),
    ("mxfp4", (28672, 384), 300, FP16, None), ("fp8_rowwise", (14336, 512), 1024, BF16, None),
    # Levels of a table: each way of multiplying.
    ("nf4", (256, 512), 129, BF16, FP16), ("nf4", (384, 1024), 1000, FP16, None), ("nf4", (1920, 2048), 96, BF16, BF16),
    ("nf4", (28672, 384), 33, FP16, torch.float32), ("nf4", (14336, 384), 128, BF16, None),
    ("nf4", (14336, 512), 1024, BF16, BF16), ("nf4", (1024, 4096), 2049, BF16, None),
)  # fmt: skip


def product(
    x: torch.Tensor, w: ArrangedWeight, bias: Any, variant: Variant | None = None, x_scale: Any = None
) -> Any:
    """The result in memory that held NaN, behind and in front of rows of NaN that must stay."""
    call = Product(x, w, bias, variant, x_scale=x_scale)
    kept = torch.full((x.shape[0] + 2, w.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    call.allocate = lambda shape, strides, dtype: kept[1:-1]
    y = call(x, w.words, w.scale, w.zero, bias, x_scale)
    torch.cuda.synchronize()
    outside = int(kept[0].isfinite().sum() + kept[-1].isfinite().sum())
    assert not outside, f"{outside} elements beyond the result were written"
    return y.clone()


def variants(w: ArrangedWeight, count: int, all_of_them: bool) -> list[Variant | None]:
    """By default the rule's, else all."""
    return [*candidates(count, w.shape[1], weight_of(w))] if all_of_them else [None]


def wrong_of(case: tuple[Any, ...], all_of_them: bool) -> Iterator[str]:
    """What differs."""
    name, shape, count, dtype, biased = case
    stored, dense = weights.drawn(name, shape)
    w = arrange(stored)
    assert w is not None
    bias = None if biased is None else (torch.arange(shape[0], device=weights.DEVICE) % 7 - 3).to(biased)
    x = torch.randint(-1, 2, (count, shape[1]), device=weights.DEVICE).to(dtype)
    truth = x.double() @ dense.t() + (0.0 if bias is None else bias.double())
    wanted = truth.float().to(dtype)
    for variant in variants(w, count, all_of_them):
        label = f"{name} {shape} {count} rows {dtype} {variant.name if variant else ''}"
        bad = 0
        for _ in range(REPEATS if variant is None else 5):
            found = product(x, w, bias, variant)
            bad += not torch.equal(found, wanted)
        if bad:
            different = found != wanted
            first = different.nonzero()[:3].tolist()
            yield f"{label}: integers differ {bad} times, {int(different.sum())} elements, first {first}"
        yield from wrong_columns(label, w, dtype, variant)
        yield from outside_of(label, w, count, dtype, variant)


def wrong_columns(
    label: str, w: ArrangedWeight, dtype: torch.dtype, variant: Variant | None
) -> Iterator[str]:
    """Of random scales every element of the weight, which a row of x with one 1 copies."""
    some = randomly_scaled(w)
    wanted = arranged_dense(some, dtype)
    found = product(torch.eye(w.shape[1], device=weights.DEVICE, dtype=dtype), some, None, variant)
    if not torch.equal(found.t(), wanted):
        different = found.t() != wanted
        yield f"{label}: {int(different.sum())} elements of the weight differ, first {different.nonzero()[:3].tolist()}"


def randomly_scaled(w: ArrangedWeight) -> ArrangedWeight:
    """The codes with scales that are no powers of two; of MX, that are any within reach of float16; of NF4, before levels."""
    torch.manual_seed(0)
    if w.element == "nf4":
        blocks = w.columns // w.group
        drawn = torch.rand(blocks, w.rows, device=weights.DEVICE) * 0.1 + 0.001
        return replace(w, scale=torch.cat([drawn.view(torch.int32), w.scale[blocks:]]))
    if w.element in FACTORED:
        return replace(w, scale=random_factors(w))
    return replace(w, scale=torch.rand_like(w.scale) * 0.1 + 0.001)


def random_factors(w: ArrangedWeight) -> torch.Tensor:
    """As `fast.scale_factors` packs them: exponent fields under 4, or e4m3 scales under a scale that rounds all of them."""
    size, exponent = (w.scale.shape[0] - 1, *w.scale.shape[1:]), EXPONENTS[w.element, w.group]
    if w.group == 16:
        codes = torch.randint(0, 120, (*size, 2), device=weights.DEVICE).to(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).float() * 2.0**exponent
        own, words = 0.00123, values.to(torch.bfloat16).view(torch.int32)
    else:
        fields = exponent + torch.randint(115, 125, (*size, 4), device=weights.DEVICE)
        own, words = 4.0, fields.to(torch.uint8).view(torch.int32)
    first = torch.full((1, *size[1:]), own, device=weights.DEVICE).view(torch.int32)
    return torch.cat([first, words.squeeze(-1)])


def outside_of(
    label: str, w: ArrangedWeight, count: int, dtype: torch.dtype, variant: Variant | None
) -> Iterator[str]:
    """Random inputs: one rounding of the result, and sums that lose a unit of float32 with each of their terms."""
    some = randomly_scaled(w)
    x = torch.randn(count, w.shape[1], device=weights.DEVICE).to(dtype)
    dense = arranged_dense(some, dtype).double()  # type: ignore[union-attr]
    truth, size = x.double() @ dense.t(), x.double().abs() @ dense.abs().t()
    unit = torch.finfo(dtype).eps / 2
    allowed = truth.abs() * unit + size * (w.shape[1] * 2.0**-23) * (1 + unit) + torch.finfo(dtype).tiny
    found = [product(x, some, None, variant) for _ in range(5)]
    far = int((~((found[0].double() - truth).abs() <= allowed)).sum())
    if far:
        yield f"{label}: {far} outside of the bound"
    if not all(torch.equal(found[0], one) for one in found):
        yield f"{label}: other bits another time"


__all__ = ["CASES", "product", "randomly_scaled", "wrong_of"]
