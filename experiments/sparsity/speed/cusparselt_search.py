"""cuSPARSELt at its best: every algorithm that it has for a product, timed on the device, scales applied in one compiled pass.

A vector alpha, the weight's scales, is refused for float8 on Hopper, and there is none for rows of x: sums are written as
bfloat16, then one kernel multiplies them by both scales in float32 (a second rounding). Algorithms that compute something else
than the exact product are not taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from experiments.fp8_training.speed.watch import watch_of
from experiments.harness.outcome import Wrong
from experiments.harness.timing import Call
from experiments.sparsity.speed.operands import BF16, FP8, Operands

#: Identifier, split of the sum, and how its parts are added.
Algorithm = tuple[int, int, int]
TIMED = 5


def product(sets: tuple[Operands, ...]) -> list[Call]:
    """A call for each set of operands by the quickest algorithm."""
    stored = [torch._cslt_compress(one.weight) for one in sets]
    found = [(time_of(sets[0], stored[0], one), one) for one in algorithms(sets[0], stored[0])]
    right = [(seconds, one) for seconds, one in found if seconds is not None]
    if not right:
        raise Wrong(f"none of {len(found)} algorithms of cuSPARSELt computes the product")
    best = min(right)[1]
    return [partial(multiplied, one, packed, best) for one, packed in zip(sets, stored, strict=True)]


def multiplied(one: Operands, stored: Tensor, algorithm: Algorithm) -> Tensor:
    """The product with its scales."""
    alg_id, split_k, mode = algorithm
    settings: dict[str, Any] = {"alg_id": alg_id, "split_k": split_k, "split_k_mode": mode}
    if one.weight.dtype == FP8:
        settings["out_dtype"] = BF16
    sums = torch._cslt_sparse_mm(stored, one.x.t(), transpose_result=True, **settings)
    return sums if one.x_scale is None else scaling()(sums, one.x_scale, one.scale)


@lru_cache(maxsize=1)
def scaling() -> Any:
    """sums times both scales, one kernel."""
    return torch.compile(_scaled, dynamic=True)


def _scaled(sums: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
    return (sums.float() * x_scale * scale.t()).to(BF16)


def algorithms(one: Operands, stored: Tensor) -> Iterator[Algorithm]:
    """What the library's own search finds, which looks at splits of the sum too, then every identifier without one."""
    library: Any = torch._C._cusparselt
    out = BF16 if one.weight.dtype == FP8 else None
    alg_id, split_k, mode, most = map(int, library.mm_search(stored, one.x.t(), None, None, out, True))
    first = (alg_id, split_k, mode if split_k != 1 else -1)
    yield first
    yield from (one for number in range(most) if (one := (number, 1, -1)) != first)


def time_of(one: Operands, stored: Tensor, algorithm: Algorithm) -> float | None:
    """Seconds of a product; None where the library refuses the algorithm or its result is wrong."""
    try:
        one.check(multiplied(one, stored, algorithm))
        # As a graph: by single calls the host's planning is timed, and any algorithm is as good as another at few rows.
        watch = watch_of(one.x.device.type)
        graph = watch.capture([partial(multiplied, one, stored, algorithm)] * TIMED)
        return min(watch.seconds([graph] * TIMED)) / TIMED
    except (RuntimeError, Wrong):
        return None


__all__ = ["product"]
