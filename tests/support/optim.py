"""Parameters of one optimizer step beside what the reference makes of them: for the interpreter, and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fast.optim.update import Moment, Rule, Slot, Updates
from reference.arrays.bridges import to_numpy, to_torch
from reference.formats.formats import FORMATS
from reference.optim.states import STATES, States, matrix_shape, states_of
from reference.optim.update import Key, begin, update

SHAPES = ((4, 512), (3, 256), (2, 300), (5000,))


@dataclass(frozen=True)
class Case:
    """What a step is compared for."""

    states: str | States
    kind: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    rounds: bool = False
    master: str = "none"
    block: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    @property
    def name(self) -> str:
        """For a line of a report."""
        parts = [states_of(self.states).name, self.kind, str(self.dtype).removeprefix("torch."), self.master]
        return " ".join(
            [
                *parts,
                *(["stochastic"] if self.rounds else []),
                *([f"block {self.block}"] if self.block else []),
            ]
        )


def with_root(element):
    """The default states with another format of the second moment's root."""
    states = STATES["8bit"]
    scale = replace(states.second.scheme.scale, target=FORMATS[element].max)
    second = replace(states.second, scheme=replace(states.second.scheme, element=element, scale=scale))
    return replace(states, name=f"8bit, root as {element}", second=second)


CASES = (
    Case("8bit", rounds=True),
    Case("8bit", "adam", torch.float32),
    Case("8bit", master="24bit"),
    Case("8bit", master="32bit", block=32),
    Case("8bit", dtype=torch.float16, betas=(0.0, 0.0)),
    Case("4bit", rounds=True),
    Case("float32"),
    Case("lion.8bit", "lion", rounds=True, betas=(0.9, 0.99)),
    Case("torchao.8bit"),
    Case("torchao.4bit", dtype=torch.float32),
    Case("torchao.fp8"),
    Case(with_root("float8_e4m3fnuz")),
)  # fmt: skip


def slots_of(case, device, rng, shapes=SHAPES):
    """(rule, slots, what the reference stores) of parameters of several shapes, some of them zeros."""
    states = states_of(case.states)
    states = states.with_block(case.block) if case.block else states
    rule = Rule(case.kind, states, 0.01, case.betas, 1e-8, 0.1, case.rounds, seed=(7 << 32) + 5)
    slots, kept = [], []
    for number, shape in enumerate(shapes):
        p = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(case.dtype)
        matrix = matrix_shape(shape, states.first.block)
        stored = begin(to_numpy(p).reshape(matrix), states, case.kind, case.master)
        kept.append(stored)
        moments = [None if one is None else moment(one, device) for one in (stored.first, stored.second)]
        error = None if stored.error is None else to_torch(stored.error.copy()).to(device)
        slots.append(
            Slot(p.to(device), torch.zeros(shape, dtype=case.dtype, device=device), torch.zeros((), device=device), moments[0],
                 moments[1], error, number + 3, 5 * number)
        )  # fmt: skip
    return rule, slots, kept


def moment(stored, device):
    """A stored moment on a device."""
    if isinstance(stored, np.ndarray):
        return Moment(torch.from_numpy(stored.copy()).to(device))
    return Moment(to_torch(stored.codes.copy()).to(device), to_torch(stored.scale.copy()).to(device))


def gradient(shape, rng, step, huge):
    """Of many sizes; some are 0, and some of the second step huge."""
    g = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 1, shape)
    g[..., ::7] = 0
    if step == 2:
        g = np.where(rng.random(shape) < 0.01, huge * np.sign(g), g)
    return g.astype(np.float32)


def compared(case, rule, slots, kept, steps, seed=1):
    """The number of values that agreed; AssertionError at the first that does not."""
    rng, updates, count = np.random.default_rng(seed), Updates(), 0
    huge = 1e4 if case.dtype == torch.float16 else 1e20
    for step in range(1, steps + 1):
        for slot in slots:
            slot.g.copy_(torch.from_numpy(gradient(tuple(slot.p.shape), rng, step, huge)).to(slot.g.dtype))
        after = []
        for slot, stored in zip(slots, kept, strict=True):
            g = to_numpy(slot.g.cpu()).reshape(stored.p.shape)
            after.append(
                update(stored, g, rule.states, step=step, lr=rule.lr, betas=rule.betas, eps=rule.eps, kind=rule.kind,
                       weight_decay=rule.weight_decay, stochastic_round=rule.stochastic_round,
                       key=Key(rule.seed, slot.parameter, slot.first))
            )  # fmt: skip
        kept = after
        updates(slots, rule)
        for number, (slot, stored) in enumerate(zip(slots, kept, strict=True)):
            assert float(slot.step) == step
            count += same(f"step {step}, parameter {number}", slot, stored)
    return count


def same(where, slot, stored):
    """Compare everything that a step writes, bit for bit."""
    pairs = [("p", slot.p, stored.p), ("error", slot.error, stored.error)]
    for name, mine, theirs in (
        ("first", slot.first_moment, stored.first),
        ("second", slot.second_moment, stored.second),
    ):
        if theirs is None:
            continue
        if isinstance(theirs, np.ndarray):
            pairs.append((name, mine.codes, theirs))
            continue
        pairs += [(f"{name} scale", mine.scale, theirs.scale), (name, mine.codes, theirs.codes)]
    count = 0
    for name, mine, theirs in pairs:
        if theirs is None:
            continue
        a = bits(to_numpy(mine.cpu()).reshape(theirs.shape))
        b = bits(np.ascontiguousarray(theirs))
        if not np.array_equal(a, b):
            at = tuple(np.argwhere(a != b)[0])
            raise AssertionError(
                f"{where}, {name}: {(a != b).sum()} of {a.size} differ, first at {at}: {a[at]} for {b[at]}"
            )
        count += a.size
    return count


def bits(array):
    """An array as integers of its width."""
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
