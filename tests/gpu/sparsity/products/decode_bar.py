"""`linear_sparse_int4` beside int4 alone and bfloat16 at the rows of decoding: bits of each choice of tiles, then times.

Operands of the comparison are integers of which all sums are exact, so that every choice has the bits of the float64 product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import fast
from fast.kernels.sparse_linear import host
from fast.kernels.sparse_linear.tilings import (
    FEW_ROWS,
    Tiling,
    arranged_bound,
    in_place,
    input_bound,
    tiling_of,
    weight_bound,
    widened,
)
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.sparsity.products import int4_timing as speed

#: Rows of inputs.
COUNTS = (1, 2, 4, 8, 16)
OWN, DENSE, TORCH = "int4 2:4", "int4", "bf16"


def choices(shape: tuple[int, int], count: int) -> dict[str, Tiling]:
    """The tiles of the rule, and those of all that it chooses among: X as it is or arranged first, reads of one turn or two."""
    given = (*shape, speed.GROUP, count)
    found = {OWN: tiling_of(*given), "in place": in_place(*given)}
    if count <= FEW_ROWS and (made := widened(weight_bound(*given), shape[1], speed.GROUP, count)):
        found["wide"] = made
    if count > 1:
        found["arranged"] = arranged_bound(*given)
    if count > FEW_ROWS:
        found["arranged, its tiles"] = replace(input_bound(*given), arranged=True)
    # The first name of those with the same tiles.
    return {name: one for one, name in {one: name for name, one in reversed(found.items())}.items()}


def multiplied(x: torch.Tensor, w: Any, one: Tiling) -> Any:
    """The product by these tiles."""
    return host.linear_sparse_int4(x, *w, None, speed.GROUP, None, one)


def products(
    x: torch.Tensor, shape: tuple[int, int], sparse: list[Any]
) -> dict[str, list[Callable[[], Any]]]:
    """The product of x with each weight, by each choice."""
    return {
        name: [lambda w=w, one=one: multiplied(x, w, one) for w in sparse]
        for name, one in choices(shape, len(x)).items()
    }


def exact_weight(shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """A weight whose scales are 1/2, 1 and 2."""
    codes, metadata, scale = speed.sparse_weight(shape)
    return codes, metadata, 2.0 ** torch.randint(-1, 2, scale.shape, device=scale.device)


def dense_of(codes: torch.Tensor, metadata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The dense weight in float32, by operations of torch alone."""
    kept = torch.stack([codes & 15, codes >> 4], -1).float()
    kept = torch.where(kept > 7, kept - 16, kept)
    pairs = torch.stack([metadata & 15, metadata >> 4], -1).flatten(1)
    index = torch.stack([pairs & 3, pairs >> 2], -1).long()
    dense = kept.new_zeros((*codes.shape, 4)).scatter_(2, index, kept).flatten(1)
    return dense * scale.repeat_interleave(dense.shape[1] // scale.shape[1], 1)


def different(shape: tuple[int, int], counts: Sequence[int]) -> Iterator[str]:
    """Choices that have other bits than the rounded exact product."""
    w = exact_weight(shape)
    dense = dense_of(*w).double()
    for count in counts:
        x = torch.randint(-2, 3, (count, shape[1]), device="cuda").to(torch.bfloat16)
        wanted = (x.double() @ dense.t()).to(torch.bfloat16)
        for name, one in choices(shape, count).items():
            y = multiplied(x, w, one)
            wrong = -1 if y is None else int((y != wanted).sum())
            if wrong:
                yield f"{shape}, {count} rows, {name} {one}: {wrong} of {wanted.numel()} differ"


def timed(shape: tuple[int, int], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of every choice, of int4 alone and of torch, by rows; prints what is a part of what."""
    sparse = speed.several(speed.sparse_weight, shape, 0.41)
    stored = speed.several(speed.int4_weight, shape, 0.53)
    dense = speed.several(speed.dense_weight, shape, 2.0)
    for count in counts:
        x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
        calls = products(x, shape, sparse)
        calls[DENSE] = [lambda x=x, w=w: fast.linear(x, w) for w in stored]
        calls[TORCH] = [lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in dense]
        times = in_turn({name: captured(each) for name, each in calls.items()}, speed.ROUNDS)
        told = "  ".join(f"{name} {us:.2f}" for name, us in times.items())
        print(
            f"{shape} {count:2} rows: {told}  | int4 / int4 2:4 {times[DENSE] / times[OWN]:.3f}", flush=True
        )
        yield from ({"shape": shape, "rows": count, "name": name, "us": us} for name, us in times.items())


__all__ = ["COUNTS", "different", "timed"]
