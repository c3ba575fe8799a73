"""The host side of `sm90_w4a16_gemv` of several weights of one x in one launch: queries, keys and values; a gate and what it
gates.

A launch of a few rows has little of its weight under way at its beginning and end, which is 3 to 5 us of a step a launch
(reports/LOG.md, "A step over 131,072 tokens, compiled"). The programs of several weights follow one another instead. All have
the variant of the largest weight by itself, so that its sums have the bits of `sm90_w4a16_gemv`; smaller ones may be added in
another order than by themselves. A gate and what it gates have one shape, so that both have those bits, and silu of one times
the other those of `reference.swiglu`: a cluster has a program of each, and rounds both before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_w4a16_gemv.host import KERNEL, POINTERS, STEP, Form, Variant, choose, form_of
from fast.launch import cuda
from fast.launch.cuda import BIAS, MULTIPROCESSORS, CudaLaunch
from fast.launch.launcher import Call
from fast.scale_factors import ArrangedWeight

#: The most weights of a launch, which are the places of the source's `Problem`.
MOST_WEIGHTS = 3
#: What is further given of each weight but the first.
FURTHER = ("codes", "scale", "zero", "y")


@lru_cache(maxsize=1024)
def variant_of(form: Form, count: int, rows: tuple[int, ...], k: int) -> Variant | None:
    """The variant of `count` rows of x and weights of so many rows each; None where they are not one launch: where the largest
    is multiplied straight from memory, programs would be of two weights, or parts of K keep one of two from being gated."""
    one = choose(form._replace(weights=1, gated=False), count, max(rows), k)
    if not isinstance(one, Variant) or any(n % (64 * one.blocks) for n in rows):
        return None
    if form.gated and one.splits > 1:
        return None
    programs = sum(map(one.programs, rows))
    waves = programs > MULTIPROCESSORS * one.at_once
    # Parts of K are for weights that leave multiprocessors out; of clusters beyond the first wave few are left for the second.
    return None if waves and one.splits > 1 else one


def launch_for(
    weights: Sequence[ArrangedWeight], count: int, inputs: torch.dtype, gated: bool = False
) -> CudaLaunch | None:
    """What multiplies `count` rows of inputs by 2 to MOST_WEIGHTS weights of one form and K; its pointers are `pointers_of`.

    None where they are not alike, and where no variant has room, compiles and loads.
    """
    first, rows = weights[0], tuple(w.shape[0] for w in weights)
    form = form_of(first, inputs, inputs)._replace(weights=len(weights), gated=gated)
    alike = {(w.element, w.group, w.zero is None, w.shape[1]) for w in weights}
    if not 2 <= len(weights) <= MOST_WEIGHTS or len(alike) > 1 or (gated and len(set(rows)) > 1):
        return None
    variant = variant_of(form, count, rows, first.shape[1])
    if variant is None or not cuda.is_loadable(KERNEL, variant, form, first.words.get_device()):
        return None
    return launch_of(variant, form, count, rows, first.shape[1])


@lru_cache(maxsize=1024)
def launch_of(variant: Variant, form: Form, count: int, rows: tuple[int, ...], k: int) -> CudaLaunch:
    """One launch, compiled once. rows: of each weight."""
    shared, programs = variant.shared(form, count, k // STEP), sum(map(variant.programs, rows))
    further = (*rows[1:], 0)[: MOST_WEIGHTS - 1]
    numbers = ("6i", (count, rows[0], k, BIAS, *further))
    return CudaLaunch(KERNEL, variant, form, pointers_of(len(rows)), programs, shared, numbers)


def pointers_of(weights: int) -> tuple[str, ...]:
    """Pointers of a launch in the order of the source's `Problem`: those of one weight, then what further ones have."""
    return (*POINTERS, *(f"{name}{at}" for at in range(2, weights + 1) for name in FURTHER))


def linear_small_several(
    x: torch.Tensor, *weights: ArrangedWeight, key: Any = None, record: Any = None
) -> tuple[torch.Tensor, ...] | None:
    """x (..., K) times the transposes of 2 to MOST_WEIGHTS arranged weights (N_i, K): (..., N_i) in x's dtype; None as
    `launch_for`. Each is within `reference.linear_error_bound`. key, record: see `dispatch`."""
    names = ("y", *(f"y{at}" for at in range(2, len(weights) + 1)))
    made: tuple[torch.Tensor, ...] | None = _made(x, weights, names, False, names, key, record)
    return made


def linear_small_pair(
    x: torch.Tensor, first: ArrangedWeight, second: ArrangedWeight, *, key: Any = None, record: Any = None
) -> tuple[torch.Tensor, ...] | None:
    """`linear_small_several` of two weights."""
    return linear_small_several(x, first, second, key=key, record=record)


def linear_small_swiglu(
    x: torch.Tensor, gate: ArrangedWeight, up: ArrangedWeight, *, key: Any = None, record: Any = None
) -> torch.Tensor | None:
    """`reference.swiglu` of both products by weights of one shape, the bits of `sm90_w4a16_gemv` and of that; None as
    `launch_for`."""
    made: torch.Tensor | None = _made(x, (gate, up), ("y",), True, "y", key, record)
    return made


def _made(
    x: torch.Tensor, weights: Sequence[ArrangedWeight], names: Sequence[str], gated: bool, template: Any, key: Any, record: Any
) -> Any:  # fmt: skip
    """What one launch writes under these names; None where there is none."""
    launch = launch_for(weights, x.numel() // x.shape[-1], x.dtype, gated)
    if launch is None:
        return None
    given = {"x": x}
    for at, w in enumerate(weights, 1):
        end = str(at) if at > 1 else ""
        given |= {f"codes{end}": w.words, f"scale{end}": w.scale, f"zero{end}": w.zero}  # type: ignore[dict-item]
    call = Call(given)
    for name, w in zip(names, weights, strict=False):
        call.allocate(name, (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, pointers_of(len(weights)))
    return call.result(template, key, record)


__all__ = [
    "MOST_WEIGHTS",
    "launch_for",
    "launch_of",
    "linear_small_pair",
    "linear_small_several",
    "linear_small_swiglu",
    "pointers_of",
    "variant_of",
]
