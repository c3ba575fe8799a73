"""`Updates`: one optimizer step of many parameters in place.

CPU tensors go through the reference, or through a loop that Numba compiled (`fast.cpu.loops.optim`), with the same bits. CUDA
tensors of one pair of dtypes go through one launch of one kernel (`fast.kernels.optim`), whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fast.cpu.loops import optim as loops
from fast.cpu.threads import in_parts
from fast.dispatch import has_kernels
from fast.kernels.optim.records import Moment, Rule, Slot, covers
from reference.arrays.bridges import to_numpy, to_torch
from reference.optim.states import State, States
from reference.optim.update import Key, Numbers, Stored, update
from reference.quantize.stored import Quantized

#: Kernels run on CPU tensors, in Triton's interpreter; set by tests.
INTERPRETED = False
#: Parameters of fewer elements go through the reference: a loop takes longer to compile than it saves.
LEAST = 4096


class Updates:
    """What steps of one optimizer keep between them: tables and launches of its parameters on GPUs."""

    def __init__(self) -> None:
        self._launches: Any = None

    def __call__(
        self, slots: Sequence[Slot], rule: Rule, *, group: int = 0, skip: torch.Tensor | None = None
    ) -> None:
        """One step of every parameter, in place, which its version counts; `step` of each becomes one more.

        group: a number that tells rules of one optimizer apart. skip: float32 of one element on the GPU of the parameters, not
        0 where the step is to be left out; of parameters on a CPU there is none.

        Raises ValueError for parameters on a device that has no kernel for these states.
        """
        on_device = []
        whole = [whole_blocks(slot) if rule.stochastic_round else slot for slot in slots]
        for slot in whole:
            if not slot.p.is_cpu or INTERPRETED:
                on_device.append(slot)
            elif not _by_loop(slot, rule):
                _by_reference(slot, rule)
        if on_device:
            self._on_device(on_device, rule, group, skip)
        for slot, copied in zip(slots, whole, strict=True):
            if copied is not slot:
                _give_back(slot, copied)
        # They were written to by their addresses, of which torch knows nothing.
        torch.autograd.graph.increment_version([slot.p for slot in slots if not slot.p.is_inference()])

    def _on_device(self, slots: Sequence[Slot], rule: Rule, group: int, skip: torch.Tensor | None) -> None:
        from fast.kernels.optim import host

        for slot in slots:
            if not (slot.p.is_cpu or has_kernels(slot.p)) or not covers(rule.states, rule.kind):
                raise ValueError(
                    f"no kernel steps {rule.states.name} states of a parameter on {slot.p.device}: kernels take CUDA devices "
                    f"of compute capability 9.0 and later, and codes of 4 or 8 bits under float32 scales without a companding "
                    f"function; use states='8bit', or a CPU"
                )
        if self._launches is None:
            self._launches = host.Launches()
        self._launches.update(slots, rule, group, skip)


def whole_blocks(slot: Slot) -> Slot:
    """The slot itself, or of a shard that begins inside a block a copy with zeros before it: random bits are counted by places
    in blocks, so that a shard draws those of its places in the whole vector."""
    if not slot.inside:
        return slot

    def moved(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(t, (slot.inside, 0))

    first, second = slot.first_moment, slot.second_moment
    return replace(
        slot,
        p=moved(slot.p),
        g=moved(slot.g),
        first_moment=Moment(moved(first.codes)),
        second_moment=None if second is None else Moment(moved(second.codes)),
        error=None if slot.error is None else moved(slot.error),
        inside=0,
    )


def _give_back(slot: Slot, copied: Slot) -> None:
    """What a step made of a copy."""
    pairs = [(slot.p, copied.p), (slot.first_moment.codes, copied.first_moment.codes)]
    if slot.second_moment is not None and copied.second_moment is not None:
        pairs.append((slot.second_moment.codes, copied.second_moment.codes))
    if slot.error is not None and copied.error is not None:
        pairs.append((slot.error, copied.error))
    for mine, found in pairs:
        mine.copy_(found[slot.inside :])


def _by_loop(slot: Slot, rule: Rule) -> bool:
    """One step of a CPU parameter by a compiled loop; False where it does not cover it, or is not worth compiling."""
    if slot.p.numel() < LEAST:
        return False
    loop = _loop_of(rule.kind, rule.states, slot.p.dtype, slot.g.dtype, rule.stochastic_round, _master(slot))
    if loop is None:
        return False
    kernel, tables = loop
    step = int(slot.step.item()) + 1
    rows, length = slot.matrix(rule.states.first.block)
    numbers = Numbers.of(rule.kind, step, float(rule.lr), rule.betas, rule.eps, rule.weight_decay)
    key = np.array([rule.seed & 0xFFFFFFFF, rule.seed >> 32, slot.parameter, step, slot.first], np.uint64)
    m, m_scale = _arrays(slot.first_moment, rows)
    v, v_scale = _arrays(slot.second_moment, rows)
    error = np.zeros((0, 0), np.int8) if slot.error is None else slot.error.numpy().reshape(rows, length)
    p, g = (_patterns(tensor).reshape(rows, length) for tensor in (slot.p.detach(), slot.g))

    def work(first: int, last: int) -> None:
        kernel(p, g, m, m_scale, v, v_scale, error, numbers.array, tables, key, length, first, last)

    if rows and length:
        in_parts(work, rows, rows * length)
    slot.step.fill_(step)
    return True


def _master(slot: Slot) -> int:
    return 0 if slot.error is None else 8 * slot.error.element_size()


@lru_cache(maxsize=64)
def _loop_of(
    kind: str, states: States, p: torch.dtype, g: torch.dtype, rounds: bool, master: int
) -> tuple[Any, Any] | None:
    """The loop and its tables, or None where it does not cover these."""
    if not covers(states, kind) or not {p, g} <= {torch.float32, torch.bfloat16}:
        return None
    first, second = loops.moment_of(states.first), loops.moment_of(None if kind == "lion" else states.second)
    half = p == torch.bfloat16
    rule = loops.Rule(
        kind,
        first,
        second,
        half,
        g == torch.bfloat16,
        rounds and half and not master,
        master,
        states.first.block,
    )
    tables = np.stack([loops.thresholds_of(states.first), loops.thresholds_of(states.second)])
    return loops.compiled(rule), tables


def _patterns(tensor: torch.Tensor) -> Any:
    """The bits of a contiguous tensor, over its memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.int32).numpy()


def _arrays(moment: Moment | None, rows: int) -> tuple[Any, Any]:
    """Codes (or float32 values) and scales of a moment as matrices over their memory."""
    nothing = np.zeros((0, 0), np.float32)
    if moment is None:
        return np.zeros((0, 0), np.uint8), nothing
    codes = moment.codes.numpy().reshape(rows, -1)
    return codes, nothing if moment.scale is None else moment.scale.numpy().reshape(rows, -1)


def _by_reference(slot: Slot, rule: Rule) -> None:
    step = int(slot.step.item()) + 1
    if not slot.p.numel():  # the shard of a rank that has no row
        slot.step.fill_(step)
        return
    shape = slot.matrix(rule.states.first.block)
    stored = Stored(
        to_numpy(slot.p.detach()).reshape(shape),
        _loaded(slot.first_moment, rule.states.first, shape),
        None if slot.second_moment is None else _loaded(slot.second_moment, rule.states.second, shape),
        None if slot.error is None else to_numpy(slot.error).reshape(shape),
    )
    result = update(
        stored, to_numpy(slot.g).reshape(shape), rule.states, step=step, lr=float(rule.lr), betas=rule.betas, eps=rule.eps,
        weight_decay=rule.weight_decay, kind=rule.kind, stochastic_round=rule.stochastic_round,
        key=Key(rule.seed, slot.parameter, slot.first),
    )  # fmt: skip
    slot.p.detach().copy_(to_torch(result.p).reshape(slot.p.shape))
    _write(slot.first_moment, result.first)
    if slot.second_moment is not None:
        _write(slot.second_moment, result.second)
    if slot.error is not None:
        slot.error.copy_(to_torch(result.error).reshape(slot.error.shape))
    slot.step.fill_(step)


def _loaded(moment: Moment, state: State, shape: tuple[int, int]) -> Any:
    if state.scheme is None or moment.scale is None:
        return to_numpy(moment.codes).reshape(shape)
    codes = to_numpy(moment.codes).reshape(shape[0], -1)
    scale = to_numpy(moment.scale).reshape(shape[0], -1)
    return Quantized(codes, scale, None, None, shape, 1, state.scheme, packed=True)


def _write(moment: Moment, result: Any) -> None:
    codes = result.codes if isinstance(result, Quantized) else result
    moment.codes.copy_(to_torch(codes).reshape(moment.codes.shape))
    if moment.scale is not None:
        moment.scale.copy_(to_torch(result.scale).reshape(moment.scale.shape))


__all__ = ["Moment", "Rule", "Slot", "Updates"]
