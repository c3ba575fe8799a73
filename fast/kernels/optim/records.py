"""What a step of an optimizer is given: stored moments, parameters, and the rule of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.optim.states import State, States, matrix_shape


@dataclass(frozen=True)
class Moment:
    """A stored moment: codes (uint8, packed) and float32 or float16 scales; of float32 states `codes` is the moment itself."""

    codes: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter of a step, all tensors contiguous and on one device.

    p: float32, bfloat16 or float16. g: its gradient. step: float32 of no axis, the number of steps made. error: int8 or int16
    of p's shape where there is a master weight. parameter: its number in the optimizer; first: blocks of it before this shard.
    inside: elements before this shard that lie in its first block, of a vector whose states are float32.
    """

    p: torch.Tensor
    g: torch.Tensor
    step: torch.Tensor
    first_moment: Moment
    second_moment: Moment | None
    error: torch.Tensor | None = None
    parameter: int = 0
    first: int = 0
    inside: int = 0

    def matrix(self, block: int) -> tuple[int, int]:
        """(rows, length)."""
        return matrix_shape(tuple(self.p.shape), block)


@dataclass(frozen=True)
class Rule:
    """What a step of a group of parameters does, as `reference.optim.update.update` takes it; lr is a number or a tensor."""

    kind: str
    states: States
    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    stochastic_round: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Kind:
    """What the kernel is compiled for."""

    kind: str
    p: torch.dtype
    g: torch.dtype
    first: State
    second: State
    rounds: bool
    master: int
    ragged: bool
    aligned: bool
    #: Whether roots and reciprocals need no test for rare exponents.
    fast: bool

    @property
    def size(self) -> int:
        """Elements of a block."""
        return self.first.block


def covers(states: States, kind: str) -> bool:
    """Whether compiled steps take them. Only the second moment has a root and a least code, only the first a fraction."""
    first, second = states.first, states.second
    if first.transform != "none" or first.least or not _is_simple(first):
        return False
    return kind == "lion" or (second.transform != "softsign" and not second.fraction and _is_simple(second))


def _is_simple(state: State) -> bool:
    """Whether it is float32, or codes of 4 or 8 bits under one float32 scale a block, a ratio to its largest magnitude."""
    scheme = state.scheme
    if scheme is None:
        return True
    scale = scheme.scale
    ratio = (
        scale.statistic == "absmax" and scale.rule in ("ratio", "ratio_pow2") and scale.storage == "float32"
    )
    return ratio and scheme.outer is None and scheme.nan == "block" and scheme.format.bits in (4, 8)


__all__ = ["Kind", "Moment", "Rule", "Slot", "covers"]
