"""Variants of `sm90_w4a16_gemm`, `linear_small`, the dense route and torch's bfloat16 product, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fast.gemm.small_m_or_gemm import LEAST, MOST, gains
from fast.kernels.linear_small import host as small
from fast.kernels.sm90_w4a16_gemm.select import candidates, nanoseconds
from fast.kernels.sm90_w4a16_gemm.variants import ATOM, Variant, Weight
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.mixed.times import Weights, by_dense, calls_of
from tests.gpu.linear.small import weights

Shape = tuple[int, int]
SCHEMES = (
    "int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "fp8_rowwise", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4",
)  # fmt: skip
SHAPES: tuple[Shape, ...] = ((14336, 4096), (4096, 14336), (6144, 4096))
ROWS = (32, 64, 96, 128, 256, 512, 1024, 2048, 8192)
#: Variants that are timed, the best ones by the model.
MOST_VARIANTS, ROUNDS = 4, 5


def weight_named(name: str) -> Weight:
    """What the kernel decodes of a scheme."""
    element, group = weights.KINDS[name]
    return Weight(element, name.endswith("asymmetric"), max(1, ATOM // (group or ATOM)))


def variants_of(name: str, shape: Shape, rows: int) -> list[Variant]:
    """The best ones by the model, the one that is taken first."""
    features, length = shape
    weight = weight_named(name)
    some = candidates(rows, length, weight)
    return sorted(some, key=lambda one: nanoseconds(one, rows, features, length, weight))[:MOST_VARIANTS]


def cells(schemes: Any, shapes: Any, rows: Any) -> Iterator[tuple[str, Shape, int]]:
    """Scheme, shape and rows, all of a shape first."""
    return ((name, shape, count) for shape in shapes for name in schemes for count in rows)


def small_calls(x: torch.Tensor, made: Weights) -> list[Callable[[], Any]]:
    """By `linear_small` with each weight."""
    return [partial(small.linear_small, x, w) for w in made.arranged]


def timed(made: Weights, count: int) -> dict[str, float]:
    """Microseconds by the name of a variant; of "bf16", of "dense", and up to 128 rows of "linear_small"."""
    x = torch.randn(count, made.shape[1], device=weights.DEVICE, dtype=torch.bfloat16)
    graphs = {"bf16": captured([partial(F.linear, x, w) for w in made.dense])}
    graphs["dense"] = captured([partial(by_dense, x, w) for w in made.arranged[:3]])
    for one in variants_of(made.name, made.shape, count):
        graphs[one.name] = captured(calls_of(x, made.arranged, one))
    if count <= MOST:
        graphs["linear_small"] = captured(small_calls(x, made))
    return in_turn(graphs, ROUNDS)


def row_of(made: Weights, count: int) -> dict[str, Any]:
    """What is written of a cell. rule: the variant that the model takes, or "linear_small"."""
    us, weight, some = timed(made, count), weight_named(made.name), variants_of(made.name, made.shape, count)
    taken = count > MOST or (count >= LEAST and gains(count, *made.shape, weight))
    rule = some[0].name if taken else "linear_small"
    return {
        "scheme": made.name, "shape": made.shape, "rows": count, "rule": rule, "us": us,
        "model": {one.name: round(nanoseconds(one, count, *made.shape, weight) / 1e3, 2) for one in some},
        "speed over bf16": us["bf16"] / us[rule],
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """A line of it."""
    us = row["us"]
    others = " ".join(f"{name}={us[name]:.1f} (model {row['model'][name]:.1f})" for name in row["model"])
    small_us = f" linear_small {us['linear_small']:.1f}" if "linear_small" in us else ""
    return (
        f"{row['scheme']:20} {row['shape']} {row['rows']:5} rows: bf16 {us['bf16']:.1f} dense {us['dense']:.1f}{small_us} "
        f"{others}; "
        f"{row['rule']} x{row['speed over bf16']:.3f}"
    )


__all__ = ["ROWS", "SCHEMES", "SHAPES", "Weights", "cells", "row_of", "told", "variants_of", "weight_named"]
