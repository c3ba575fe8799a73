"""Scales of rows of x of `sm90_w4a16_gemm` on a GPU: bits, and times beside `linear_small` with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fast.gemm.small_m_or_gemm import MOST
from fast.kernels.linear_small import host as small
from fast.kernels.linear_small.dense import arranged_dense
from fast.kernels.linear_small.layout import ArrangedWeight, arrange
from fast.kernels.sm90_w4a16_gemm.host import Product
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.mixed.bits import product, randomly_scaled
from tests.gpu.linear.mixed.times import ROUNDS, Weights, calls_of
from tests.gpu.linear.small import weights

BF16, FP16 = torch.bfloat16, torch.float16
REPEATS = 20
#: Scheme, rows and columns of the weight, rows of x, dtype of x, dtype of a bias: tiles ahead, pairs, splits, turns, two sizes.
CASES: tuple[tuple[Any, ...], ...] = (
    ("int4_g32", (256, 512), 129, BF16, BF16), ("int4_g128", (384, 1024), 1000, FP16, None),
    ("int8_g128", (4096, 4096), 128, BF16, torch.float32), ("int4_g32", (1280, 2048), 40, FP16, FP16),
    ("int4_g32_asymmetric", (14336, 512), 64, BF16, BF16), ("int4_g32", (14336, 512), 128, BF16, None),
    ("mxfp4", (28672, 384), 300, BF16, BF16), ("nf4", (14336, 512), 1024, BF16, FP16), ("nf4", (4096, 2048), 90, FP16, None),
)  # fmt: skip


def wrong_of(case: tuple[Any, ...]) -> Iterator[str]:
    """What differs: of integers under scales that are powers of two, of elements of the weight, of random numbers."""
    name, shape, count, dtype, biased = case
    stored, dense = weights.drawn(name, shape)
    w = arrange(stored)
    assert w is not None
    bias = None if biased is None else (torch.arange(shape[0], device=weights.DEVICE) % 7 - 3).to(biased)
    x = torch.randint(-1, 2, (count, shape[1]), device=weights.DEVICE).to(dtype)
    scale = 2.0 ** torch.randint(-1, 2, (count,), device=weights.DEVICE).float()
    truth = (x.double() @ dense.t()) * scale.double()[:, None] + (0.0 if bias is None else bias.double())
    wanted, label = truth.float().to(dtype), f"scales of rows, {name} {shape} {count} rows {dtype}"
    bad = sum(not torch.equal(product(x, w, bias, x_scale=scale), wanted) for _ in range(REPEATS))
    if bad:
        yield f"{label}: integers differ {bad} times"
    yield from wrong_elements(label, randomly_scaled(w), dtype, bias)
    yield from outside_of(label, randomly_scaled(w), count, dtype)


def wrong_elements(label: str, w: ArrangedWeight, dtype: torch.dtype, bias: Any) -> Iterator[str]:
    """Each column of the weight times a scale: sums, scaled ones and those with the bias are rounded to float32, then once."""
    scale = torch.randn(w.shape[1], device=weights.DEVICE)
    sums = arranged_dense(w, dtype).t().float() * scale[:, None]  # type: ignore[union-attr]
    wanted = (sums if bias is None else sums + bias.float()).to(dtype)
    x = torch.eye(w.shape[1], device=weights.DEVICE, dtype=dtype)
    found = product(x, w, bias, x_scale=scale)
    if not torch.equal(found, wanted):
        different = found != wanted
        yield f"{label}: {int(different.sum())} scaled elements differ, first {different.nonzero()[:3].tolist()}"


def outside_of(label: str, w: ArrangedWeight, count: int, dtype: torch.dtype) -> Iterator[str]:
    """Codes by random weights: a rounding of the result, one of the scaled sum, and a unit of float32 for each term."""
    x = torch.randint(-127, 128, (count, w.shape[1]), device=weights.DEVICE).to(dtype)
    scale = torch.rand(count, device=weights.DEVICE) * 0.02 + 0.001
    dense, by = arranged_dense(w, dtype).double(), scale.double()[:, None]  # type: ignore[union-attr]
    truth, size = (x.double() @ dense.t()) * by, (x.double().abs() @ dense.abs().t()) * by
    unit = torch.finfo(dtype).eps / 2
    allowed = truth.abs() * unit + size * ((w.shape[1] + 1) * 2.0**-23) * (1 + unit) + torch.finfo(dtype).tiny
    far = int((~((product(x, w, None, x_scale=scale).double() - truth).abs() <= allowed)).sum())
    if far:
        yield f"{label}: {far} outside of the bound"


def told(made: Weights, count: int) -> str:
    """Microseconds of the product with scales, without, and by `linear_small` with them."""
    x = torch.randn(count, made.shape[1], device=weights.DEVICE, dtype=BF16)
    scale = torch.rand(count, device=weights.DEVICE)
    call = Product(x, made.arranged[0], None, x_scale=scale)
    own = [partial(call, x, w.words, w.scale, w.zero, None, scale) for w in made.arranged]
    graphs = {
        f"scaled {call.variant.name}": captured(own),
        "plain": captured(calls_of(x, made.arranged, None)),
    }
    if count <= MOST:
        others = [partial(small.linear_small, x, w, x_scale=scale) for w in made.arranged]
        graphs["linear_small scaled"] = captured(others)
    took = in_turn(graphs, ROUNDS)
    return f"{made.name} {made.shape} {count} rows: " + ", ".join(
        f"{name} {us:.1f}" for name, us in took.items()
    )


__all__ = ["CASES", "told", "wrong_of"]
