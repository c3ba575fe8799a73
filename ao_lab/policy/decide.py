"""Which option each layer takes: least time under a budget of error; and other rules beside, as they are published or uniform.

Ours is a multiple-choice knapsack (`reference.calibration.allocate`): the sum of seconds is least while the sum of variances is
at most the square of what outputs may move by; options whose gradients are too noisy are ruled out one by one. Its relaxation
bounds what any choice within the budget could take. Every uniform policy that the budget allows is one of the choices, so none
of them is quicker; and dense is one.

LoKA's rule (arXiv 2605.10886, by notes on it): an option is fit where the mean relative error of its outputs is below a
threshold and it is quicker than 16 bits by a factor; of these the quickest. It has no budget over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ao_lab.gemm.choices import DENSE
from ao_lab.policy.options import LayerOptions, Option
from reference.calibration.allocate import allocate
from reference.training.recipe import PRODUCTS

#: LoKA's threshold of the mean relative error, and its least speedup.
THETA, SPEEDUP = 0.2, 1.05


@dataclass(frozen=True)
class Decision:
    """The option of each layer by its name, and what they come to.

    seconds: the sum over layers. variance: the sum of what outputs move by, squared; room: what it may be. fits: whether every
    option may be taken and the sum is within the room. bound: seconds that no choice within the room is below (None: none).
    """

    name: str
    options: dict[str, Option]
    seconds: float
    variance: float
    room: float
    fits: bool
    bound: float | None = None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f", at least {self.bound * 1e6:.1f} us for any choice"
        moved = f"outputs move by {self.variance**0.5:.3g} of {self.room**0.5:.3g}"
        return f"{self.name}: {self.seconds * 1e6:.1f} us{bound}; {moved}{'' if self.fits else ': beyond the budget'}"


def least_time(layers: Sequence[LayerOptions], room: float) -> Decision:
    """The quickest choice within the room; ValueError where there are no layers or the room is no positive number."""
    if not layers:
        raise ValueError(
            "no layer was both probed and timed; give sample_input that reaches the sites of the report"
        )
    if not room > 0:
        raise ValueError(f"the room for changes of outputs is positive, got {room!r}")
    most = max(len(one.options) for one in layers)
    scores, costs = (np.full((len(layers), most), fill) for fill in (np.inf, 0.0))
    for at, one in enumerate(layers):
        for j, option in enumerate(one.options):
            scores[at, j], costs[at, j] = np.inf if option.reason else option.seconds, option.variance
    found = allocate(scores, costs, room)
    options = {one.name: one.options[j] for one, j in zip(layers, found.choice, strict=True)}
    return summed("least time", options, room, found.bound)


def summed(name: str, options: dict[str, Option], room: float, bound: float | None = None) -> Decision:
    """A decision of its options."""
    seconds, variance = (
        sum(getattr(one, what) for one in options.values()) for what in ("seconds", "variance")
    )
    allowed = not any(one.reason for one in options.values())
    return Decision(name, options, seconds, variance, room, allowed and variance <= room * (1 + 1e-12), bound)


def uniform(layers: Sequence[LayerOptions], recipe: str, room: float) -> Decision:
    """All products of every layer by one recipe ("" for dense); a layer that cannot, or was not timed so, is dense."""

    def pick(one: LayerOptions) -> Option:
        whole = [o for o in one.options if o.recipe == recipe and len(o.products) == len(PRODUCTS)]
        return whole[0] if whole and recipe else one.dense

    return summed(f"uniform {recipe or DENSE}", _each(layers, pick), room)


def loka(
    layers: Sequence[LayerOptions], room: float, theta: float = THETA, speedup: float = SPEEDUP
) -> Decision:
    """LoKA's rule for whole layers: the quickest of what is fit, else dense."""

    def pick(one: LayerOptions) -> Option:
        fit = [
            o
            for o in one.options
            if len(o.products) == len(PRODUCTS) and o.mere < theta and o.seconds * speedup < one.dense.seconds
        ]
        return min(fit, key=lambda o: o.seconds, default=one.dense)

    return summed(f"LoKA (error < {theta:g}, speedup > {speedup:g})", _each(layers, pick), room)


def _each(layers: Sequence[LayerOptions], pick: Callable[[LayerOptions], Option]) -> dict[str, Option]:
    return {one.name: pick(one) for one in layers}


__all__ = ["SPEEDUP", "THETA", "Decision", "least_time", "loka", "summed", "uniform"]
