"""`Updates`: one optimizer step of many parameters in place.

CPU tensors go through the reference, or through a loop that Numba compiled (`fast.cpu.loops.optim`), with the same bits. CUDA
tensors of one pair of dtypes go through one launch of one kernel (`fast.kernels.optim`), whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fast.dispatch import has_kernels
from reference.arrays.bridges import to_numpy, to_torch
from reference.optim.states import State, States, matrix_shape
from reference.optim.update import Key, Stored, update
from reference.quantize.stored import Quantized

#: Kernels run on CPU tensors, in Triton's interpreter; set by tests.
INTERPRETED = False


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
    """

    p: torch.Tensor
    g: torch.Tensor
    step: torch.Tensor
    first_moment: Moment
    second_moment: Moment | None
    error: torch.Tensor | None = None
    parameter: int = 0
    first: int = 0

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


class Updates:
    """What steps of one optimizer keep between them: tables and launches of its parameters on GPUs."""

    def __init__(self) -> None:
        self._launches: Any = None

    def __call__(
        self, slots: Sequence[Slot], rule: Rule, *, group: int = 0, skip: torch.Tensor | None = None
    ) -> None:
        """One step of every parameter, in place; `step` of each becomes one more.

        group: a number that tells rules of one optimizer apart. skip: float32 of one element on the GPU of the parameters, not
        0 where the step is to be left out; of parameters on a CPU there is none.

        Raises ValueError for parameters on a device that has no kernel for these states.
        """
        on_device = [slot for slot in slots if slot.p.device.type != "cpu" or _interpreted(slot)]
        for slot in slots:
            if slot not in on_device:
                _by_reference(slot, rule)
        if on_device:
            self._on_device(on_device, rule, group, skip)

    def _on_device(self, slots: Sequence[Slot], rule: Rule, group: int, skip: torch.Tensor | None) -> None:
        from fast.kernels.optim import host

        for slot in slots:
            if not (slot.p.is_cpu or has_kernels(slot.p)) or not host.covers(rule):
                raise ValueError(
                    f"no kernel steps {rule.states.name} states of a parameter on {slot.p.device}: kernels take CUDA devices "
                    f"of compute capability 9.0 and later and states without a companding function; use states='8bit', or a CPU"
                )
        if self._launches is None:
            self._launches = host.Launches()
        self._launches.update(slots, rule, group, skip)


def _interpreted(slot: Slot) -> bool:
    """Whether Triton's interpreter runs kernels on CPU tensors here; tests ask for it."""
    return INTERPRETED and slot.p.is_cpu


def _by_reference(slot: Slot, rule: Rule) -> None:
    step = int(slot.step.item()) + 1
    shape = slot.matrix(rule.states.first.block)
    stored = Stored(
        to_numpy(slot.p.detach()).reshape(shape),
        _loaded(slot.first_moment, rule.states.first, shape),
        None if slot.second_moment is None else _loaded(slot.second_moment, rule.states.second, shape),
        None if slot.error is None else to_numpy(slot.error).reshape(shape),
    )
    made = update(
        stored, to_numpy(slot.g).reshape(shape), rule.states, step=step, lr=float(rule.lr), betas=rule.betas, eps=rule.eps,
        weight_decay=rule.weight_decay, kind=rule.kind, stochastic_round=rule.stochastic_round,
        key=Key(rule.seed, slot.parameter, slot.first),
    )  # fmt: skip
    slot.p.detach().copy_(to_torch(made.p).reshape(slot.p.shape))
    _write(slot.first_moment, made.first)
    if slot.second_moment is not None:
        _write(slot.second_moment, made.second)
    if slot.error is not None:
        slot.error.copy_(to_torch(made.error).reshape(slot.error.shape))
    slot.step.fill_(step)


def _loaded(moment: Moment, state: State, shape: tuple[int, int]) -> Any:
    if state.scheme is None or moment.scale is None:
        return to_numpy(moment.codes).reshape(shape)
    codes = to_numpy(moment.codes).reshape(shape[0], -1)
    scale = to_numpy(moment.scale).reshape(shape[0], -1)
    return Quantized(codes, scale, None, None, shape, 1, state.scheme, packed=True)


def _write(moment: Moment, made: Any) -> None:
    codes = made.codes if isinstance(made, Quantized) else made
    moment.codes.copy_(to_torch(codes).reshape(moment.codes.shape))
    if moment.scale is not None:
        moment.scale.copy_(to_torch(made.scale).reshape(moment.scale.shape))


__all__ = ["Moment", "Rule", "Slot", "Updates"]
