"""Times of two products of one x by 2:4 weights in one launch, beside a launch each and one weight with the rows of both, and
of silu of one times the other; CUDA graphs in turn over weights that exceed the second-level cache together, beside int4 alone
in the preshuffled layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import fast
from fast.kernels.linear_small import pair as dense
from fast.kernels.linear_small.host import linear_small
from fast.kernels.sm90_sparse24_w4a16_gemv.host import sm90_sparse24_w4a16_gemv
from fast.kernels.sm90_sparse24_w4a16_gemv.pair import (
    sm90_sparse24_w4a16_gemv_pair,
    sm90_sparse24_w4a16_gemv_swiglu,
)
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.small.times import rate
from tests.gpu.linear.small.weights import filled_weight
from tests.gpu.sparsity.products import int4_timing as speed
from tests.gpu.sparsity.progress import Progress

#: Rows of both weights: a gate and what it gates, queries and keys, keys and values.
SHAPES, K = ((14336, 14336), (4096, 1024), (1024, 1024)), 4096
COUNTS, ROUNDS, GROUP = (1, 2, 4, 8, 16), 9, 64
Calls = dict[str, list[Any]]


def drawn(rows: tuple[int, ...], make: Any, size: float) -> list[Any]:
    """Weights in turn, some of so many rows each time."""
    number = max(2, int(speed.COLD / (size * sum(rows) * K)) + 1)
    return [[make((n, K)) for n in rows] for _ in range(number)]


class Weights:
    """Those of a shape: pairs, and in `one` and `stored_one` a weight with the rows of both."""

    def __init__(self, rows: tuple[int, int]) -> None:
        self.sparse = drawn(rows, lambda shape: speed.sparse_weight(shape, GROUP), 0.44)
        self.one = [[torch.cat(parts) for parts in zip(*both, strict=True)] for both in self.sparse]
        self.stored = drawn(rows, stored_weight, 0.56)
        self.stored_one = drawn((sum(rows),), stored_weight, 0.56)
        self.floor = sum(part.nbytes for part in self.one[0]) / rate()


def stored_weight(shape: tuple[int, int]) -> Any:
    """int4 alone."""
    return filled_weight(f"int4_g{GROUP}", shape)


def calls_of(x: torch.Tensor, held: Weights) -> Calls:
    """By name."""
    sparse, stored = held.sparse, held.stored

    def two(w: Any) -> list[Any]:
        return [sm90_sparse24_w4a16_gemv(x, *one, None, GROUP) for one in w]

    def two_dense(w: Any) -> list[Any]:
        return [linear_small(x, one) for one in w]

    found: Calls = {
        "two": [lambda w=w: two(w) for w in sparse],
        "pair": [lambda w=w: sm90_sparse24_w4a16_gemv_pair(x, *w, GROUP) for w in sparse],
        "one weight": [lambda w=w: sm90_sparse24_w4a16_gemv(x, *w, None, GROUP) for w in held.one],
        "int4 two": [lambda w=w: two_dense(w) for w in stored],
        "int4 one weight": [lambda w=w: linear_small(x, *w) for w in held.stored_one],
    }
    if stored[0][0].shape == stored[0][1].shape:
        found |= {
            "int4 pair": [lambda w=w: dense.linear_small_pair(x, *w) for w in stored],
            "two and swiglu": [lambda w=w: fast.swiglu(*two(w)) for w in sparse],
            "pair and swiglu": [
                lambda w=w: fast.swiglu(*sm90_sparse24_w4a16_gemv_pair(x, *w, GROUP)) for w in sparse
            ],
            "swiglu": [lambda w=w: sm90_sparse24_w4a16_gemv_swiglu(x, *w, GROUP) for w in sparse],
            "int4 swiglu": [lambda w=w: dense.linear_small_swiglu(x, *w) for w in stored],
        }
    return found


def timed(counts: Sequence[int], progress: Progress) -> Iterator[dict[str, Any]]:
    """A row for each shape and number of rows of x, printed."""
    for rows in SHAPES:
        if progress.left() < 0:
            progress.left_out.append(f"times of {rows}")
            continue
        held = Weights(rows)
        for count in counts:
            x = torch.randn(count, K, device="cuda", dtype=torch.bfloat16)
            graphs = {name: captured(calls) for name, calls in calls_of(x, held).items()}
            us = in_turn(graphs, ROUNDS)
            told = "  ".join(f"{name} {time:.2f}" for name, time in us.items())
            progress.say(
                f"{rows} x {K}, {count:2} rows: {told}  | floor {held.floor:.2f}, two / pair {us['two'] / us['pair']:.2f}"
            )
            yield {"rows": rows, "k": K, "count": count, "us": us, "floor": held.floor}


__all__ = ["COUNTS", "timed"]
