"""Rows sorted by expert times the preshuffled weight of the expert of each, on a GPU: what is taken, launched and repeated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from fast.cost import Time, quickest
from fast.kernels.sm90_w4a16_gemm import host
from fast.kernels.sm90_w4a16_gemm.host import (
    ATOM,
    FEATURES,
    KERNEL,
    C,
    Problem,
    Variant,
    Weight,
    fitted,
    stage,
)
from fast.kernels.triton_small_m.grouped import check_experts
from fast.launch import cuda
from fast.launch.cuda import GROUP, MULTIPROCESSORS, CudaLaunch, Maps, processors_of
from fast.launch.launcher import FLOAT_NAMES, Call, ceil_div
from fast.scale_factors import ArrangedWeight

#: Pointers of a launch: those of `host`, and the row after each expert's last one.
POINTERS = (*host.POINTERS, "ends")


def sm90_w4a16_gemm_of_experts(
    x: torch.Tensor, experts: ArrangedWeight, ends: torch.Tensor, *, key: Any = None, record: Any = None
) -> torch.Tensor | None:
    """x (T, K), sorted by expert, times the transpose of each expert's weight (N, K): (T, N) in x's dtype.

    experts: an arranged weight whose parts have an axis of experts in front, of one element; `shape` is that of one of them.
    ends: int32 (E,), on x's device: the row after each expert's last one, none of which the host reads; rows behind the last
    end are undefined, as torch's `_grouped_mm` leaves them. Sums are float32 over all of K, rounded once to x's dtype: each row
    has the bits that `sm90_w4a16_gemm` gives it without parts of K. Operands are those that the family takes
    (`fast.gemm.families`); None where the variant does not compile or load. key, record: see `dispatch`. ValueError for
    shapes, dtypes and devices that do not go together.
    """
    check_experts(x, experts, ends)
    launch = launch_of(x, experts)
    if launch is None:
        return None
    y: torch.Tensor = call_of(launch, x, experts, ends).result("y", key, record)
    return y


def launch_of(x: torch.Tensor, experts: ArrangedWeight, variant: Variant | None = None) -> CudaLaunch | None:
    """What multiplies rows of x; its pointers are POINTERS. None where the variant does not compile or load."""
    tokens, count, device = x.shape[0], len(experts.words), x.get_device()
    (features, length), weight = experts.shape, host.weight_of(experts)
    average = ceil_div(tokens, count)
    one = variant or choose(average, count, features, length, weight, processors_of(device))
    problem, shared = Problem(weight, FLOAT_NAMES[x.dtype]), one.shared(weight)
    if not cuda.is_loadable(KERNEL, one, problem, device, shared):
        return None
    at_once = cuda.clusters_at_once(KERNEL, one, problem, shared, device)
    each = (experts.group or length) // ATOM or 1
    numbers = (tokens, features, length // ATOM, each, 0, GROUP, 0, 0, 0, 1, host.NIBBLE, 0)
    small = (0 if part is None else part[0].nbytes // 4 for part in (experts.scale, experts.zero))
    return CudaLaunch(
        KERNEL, one, problem, POINTERS, min(at_once, most_tiles(one, tokens, count, features)), shared,
        (f"{host.NUMBERS}Q", numbers), behind=("3qi4x", (experts.words[0].nbytes, *small, count)),
        maps=Maps(lambda x, y: host.described(one, tokens, length, features, x, y), 1, host.MAPPED),
    )  # fmt: skip


def call_of(launch: CudaLaunch, x: torch.Tensor, experts: ArrangedWeight, ends: torch.Tensor) -> Call:
    """The call whose launch made "y"."""
    call = Call({"x": x, "codes": experts.words, "scale": experts.scale, "zero": experts.zero, "ends": ends})
    call.allocate("y", (x.shape[0], experts.shape[0]), x.dtype)
    call.launch(launch, POINTERS)
    return call


def most_tiles(one: Variant, tokens: int, experts: int, features: int) -> int:
    """Tiles of as many rows, however they are divided among experts, at most."""
    return (tokens // one.tokens + min(tokens, experts)) * ceil_div(features, FEATURES)


@lru_cache(maxsize=1024)
def choose(
    average: int,
    experts: int,
    features: int,
    length: int,
    weight: Weight,
    multiprocessors: int = MULTIPROCESSORS,
) -> Variant:
    """The variant for so many rows of an expert on average: the shortest time by the model of `select`."""
    columns = ceil_div(features, FEATURES)

    def taken(one: Variant) -> float:
        whole, small = (nanoseconds(rows, length, weight) for rows in (one.tokens, one.small or one.tokens))
        return sum(
            longest(
                *(columns * count for count in tiles_of(one, rows, experts)), whole, small, multiprocessors
            )
            for rows in divisions(average, experts)
        )

    return quickest((one, taken(one)) for one in candidates(weight))  # type: ignore[return-value]


def divisions(average: int, experts: int) -> Iterator[list[int]]:
    """Rows of some of the experts, each time divided in another way."""
    count = min(experts, C.looked_at)
    for spread, place in product(C.spreads, C.places):
        parts = (1 + spread * ((place + at) / count - 0.5) for at in range(count))
        yield [max(1, round(part * average)) for part in parts]


def tiles_of(one: Variant, rows: list[int], experts: int) -> tuple[int, int]:
    """Whole tiles and small ones along the rows of so many experts, of which `rows` are some."""
    small = sum(0 < each % one.tokens <= one.small for each in rows)
    whole = sum(ceil_div(each, one.tokens) for each in rows) - small
    return ceil_div(whole * experts, len(rows)), ceil_div(small * experts, len(rows))


def longest(many: int, few: int, whole: float, small: float, programs: int) -> float:
    """Nanoseconds of the program that has most to do, where `programs` take many whole tiles in turn, then few small ones."""
    (each, more), (every, behind) = divmod(many, programs), divmod(few, programs)
    first = (each + 1) * whole + (every + (behind > programs - more)) * small if more else 0.0
    return max(first, each * whole + (every + (behind > 0)) * small)


def candidates(weight: Weight) -> Iterator[Variant]:
    """Variants of experts."""
    return (fitted(tokens, 1, 1, weight, small)._replace(grouped=True) for tokens, small in C.expert_tiles)


def nanoseconds(tokens: int, length: int, weight: Weight) -> float:
    """Of a tile."""
    return Time(1, length / ATOM, stage(tokens, weight), C.tile).total


__all__ = [
    "POINTERS",
    "call_of",
    "candidates",
    "choose",
    "divisions",
    "launch_of",
    "longest",
    "most_tiles",
    "sm90_w4a16_gemm_of_experts",
    "tiles_of",
]
