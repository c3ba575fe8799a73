"""Rows sorted by expert times the preshuffled weight of the expert of each, on a GPU: what is taken, launched and repeated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.hopper.operands import GROUP, TensorMaps, addresses_of, processors_of
from fast.kernels.launch import cache
from fast.kernels.launch.call import FLOAT_NAMES
from fast.kernels.linear_small.grouped import check_experts
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.mixed_mm import host
from fast.kernels.mixed_mm.select import MULTIPROCESSORS, TILE, stage
from fast.kernels.mixed_mm.variants import ATOM, FEATURES, Variant, Weight, fitted
from fast.kernels.quantize.geometry import ceil_div

#: Rows of tiles, and of the last one of an expert where that holds what is left; 0 where all are of one size.
TILES = ((64, 0), (128, 64), (192, 64), (192, 128), (256, 64), (256, 128))
#: An expert's rows as the rule expects them, over the average: they are not divided evenly.
SPREAD = tuple((5 + i) / 10 for i in range(11))


def mixed_mm_of_experts(
    x: torch.Tensor, experts: ArrangedWeight, ends: torch.Tensor, *, key: Any = None, record: Any = None
) -> torch.Tensor | None:
    """x (T, K), sorted by expert, times the transpose of each expert's weight (N, K): (T, N) in x's dtype.

    experts: an arranged weight whose parts have an axis of experts in front, of one element; `shape` is that of one of them.
    ends: int32 (E,), on x's device: the row after each expert's last one, none of which the host reads; rows behind the last
    end are undefined, as torch's `_grouped_mm` leaves them. Sums are float32 over all of K, rounded once to x's dtype: each row
    has the bits that `mixed_mm` gives it without parts of K. None where the dense weights have to be multiplied, see
    `host.refused_operands`. key, record: see `launch.cache`. ValueError for shapes, dtypes and devices that
    do not go together.
    """
    check_experts(x, experts, ends)
    # Weights of experts in NF4 are not preshuffled; their levels would be those of the first one here.
    if experts.element == "nf4" or host.refused_operands(x, experts, None) is not None:
        return None
    try:
        call = ExpertsProduct(x, experts)
    except (RuntimeError, OSError) as error:
        host.FAILED.append(f"it did not compile or load before: {error}")
        warnings.warn(f"mixed_mm is left out, the dense weights are multiplied: {error}", stacklevel=3)
        return None
    y = call(x, experts.words, experts.scale, experts.zero, ends)
    cache.remember(key, call, record)
    return y


class ExpertsProduct:
    """A call: all that shapes and dtypes say, so that a repetition allocates, looks tensor maps up and launches."""

    def __init__(self, x: torch.Tensor, experts: ArrangedWeight, variant: Variant | None = None) -> None:
        self.index, self.device, self.dtype = x.get_device(), x.device, x.dtype
        self.features, self.length = experts.shape
        self.tokens, count = x.shape[0], len(experts.words)
        self.shape, weight = (self.tokens, self.features), host.weight_of(experts)
        if variant is None:
            average = ceil_div(self.tokens, count)
            variant = choose(average, count, self.features, self.length, weight, processors_of(self.index))
        self.variant, self.maps = variant, TensorMaps(self._describe)
        self.strides, self.allocate = (self.features, 1), host.allocator(self.device)
        self.launch, at_once = host.launch_of(variant, weight, FLOAT_NAMES[self.dtype], self.index)
        self.programs = min(at_once, most_tiles(variant, self.tokens, count, self.features))
        steps = self.length // ATOM
        self.rest = (
            self.tokens, self.features, steps, (experts.group or self.length) // ATOM or 1, 0, GROUP, 0, 0, 0, 1,
            host.NIBBLE, 0,
        )  # fmt: skip
        each = (0 if part is None else part[0].nbytes // 4 for part in (experts.scale, experts.zero))
        self.behind = (experts.words[0].nbytes, *each, count)

    def __call__(self, x: Any, words: Any, scale: Any, zero: Any, ends: Any) -> torch.Tensor | None:
        """The product of operands with the same key; None for a negative view, which has to be resolved."""
        if host.current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self(x, words, scale, zero, ends)
        found = addresses_of((x, words, scale, zero, ends))
        if found is None:
            return None
        (*addresses, last), _kept = found
        y = self.allocate(self.shape, self.strides, self.dtype)
        at = addresses[0], y.data_ptr()
        stream = host.current_stream(self.index)  # type: ignore[misc]
        self.launch(
            self.programs, stream, self.maps[at], *addresses[1:], 0, at[1], *self.rest, last, *self.behind
        )
        return y

    def _describe(self, x: int, y: int) -> bytes:
        """The tensor maps at two addresses."""
        return host.described(self.variant, self.tokens, self.length, self.features, x, y)


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

    def taken(one: Variant) -> float:
        whole, small = (nanoseconds(rows, length, weight) for rows in (one.tokens, one.small or one.tokens))
        each = sum(time_of(one, max(1, round(part * average)), whole, small) for part in SPREAD) / len(SPREAD)
        # Tiles in waves: on average half a tile is waited for at last.
        return each * experts * ceil_div(features, FEATURES) / multiprocessors + whole / 2

    return min(candidates(weight), key=taken)


def candidates(weight: Weight) -> Iterator[Variant]:
    """Variants of experts."""
    return (fitted(tokens, 1, 1, weight, small)._replace(grouped=True) for tokens, small in TILES)


def nanoseconds(tokens: int, length: int, weight: Weight) -> float:
    """Of a tile."""
    return length / ATOM * stage(tokens, weight) + TILE


def time_of(one: Variant, rows: int, whole: float, small: float) -> float:
    """Nanoseconds of the tiles of an expert and 128 features. whole, small: of one tile."""
    tiles, left = divmod(rows, one.tokens)
    return tiles * whole + (0.0 if not left else small if left <= one.small else whole)


__all__ = ["TILES", "ExpertsProduct", "candidates", "choose", "mixed_mm_of_experts", "most_tiles"]
