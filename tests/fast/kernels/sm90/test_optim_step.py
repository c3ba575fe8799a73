"""`sm90_step` in the emulator, bit for bit with the reference; planted faults; what is compiled, and what is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fast.kernels.optim import host, sm90_step
from fast.kernels.optim.sm90_step import KERNEL, Problem, Variant
from reference.arrays.bridges import to_numpy, to_torch
from reference.optim.states import STATES
from reference.optim.update import Key, Numbers, update
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, at_night, unchanged
from tests.fast.kernels.sm90.machine_code import compiled, complaints, disassembled
from tests.fast.kernels.sm90.products import require_nvrtc
from tests.support.optim import Case, gradient, same, slots_of

#: One warp, so that the emulator is quick; two turns.
SMALL = Variant(1, 4, 1, 2)
CASES = {
    "4 bits": Case("4bit"),
    "4 bits, stochastic": Case("4bit", rounds=True),
    "4 bits, Adam, 24-bit master": Case("4bit", "adam", master="24bit"),
    "4 bits, blocks of 512": Case("4bit", block=512),
    "8 bits, stochastic": Case("8bit", rounds=True),
    "8 bits, 24-bit master": Case("8bit", master="24bit"),
    "8 bits, Adam, 32-bit master, blocks of 32": Case("8bit", "adam", master="32bit", block=32),
}


def prepared(case):
    """(rule, slots, what the reference stores) of two parameters, of seven and of one block, and a shard without elements."""
    block = case.block or STATES[case.states].first.block
    shapes = ((7, block), (block,), (0, block))
    return slots_of(case, torch.device("cpu"), np.random.default_rng(0), shapes)


def written(rule, slots):
    """Tables of a step, with the numbers that the first launch writes."""
    kind = host.kind_of(slots[0], rule)
    problem = sm90_step.problem_of(kind)
    tables = host.Tables(torch.device("cpu"), problem)
    tables.put(np.array([host.row_of(slot, rule) for slot in slots]), sm90_step.blocks_of(problem, SMALL))
    for row, slot in zip(tables.numbers, slots, strict=True):
        step = int(slot.step) + 1
        numbers = Numbers.of(rule.kind, step, rule.lr, rule.betas, rule.eps, rule.weight_decay)
        row[:10] = torch.from_numpy(np.append(numbers.array, np.float32(step)))
        slot.step.fill_(step)
    return tables


def stepped(rule, slots, skip=False, **device):
    """Run the kernel in the emulator, on the slots in place."""
    tables = written(rule, slots)
    tables.numbers[:, 10] = float(skip)
    parts = [tables.tiles, tables.tensors, tables.numbers]
    for slot in slots:
        moments = (slot.first_moment, slot.second_moment)
        parts += [slot.p, slot.g, slot.error, *(x for one in moments for x in (one.codes, one.scale))]
    StandIn(**device).made(lambda: sm90_step.launch(tables.problem, *parts[:3], rule.seed, SMALL), *parts)


def spoiled(g, step):
    """Of the first step NaN in one block, infinity in one and squares beyond the largest float32 in one."""
    if step == 1:
        g[5], g[130 :: 1 << 20], g[g.size // 2] = np.nan, -np.inf, 3e25


def agree(case, steps=2, spoil=None, **device):
    """Whether steps of a case have the reference's bits. spoil: changes gradients (elements, step)."""
    rule, slots, kept = prepared(case)
    draw = np.random.default_rng(1)
    for step in range(1, steps + 1):
        for slot in slots:
            g = gradient(tuple(slot.p.shape), draw, step, 1e17)
            if spoil is not None and g.size:
                spoil(g.reshape(-1), step)
            slot.g.copy_(torch.from_numpy(g).to(slot.g.dtype))
        kept = [
            after(rule, slot, one, step) if one.p.size else one for slot, one in zip(slots, kept, strict=True)
        ]
        stepped(rule, slots, **device)
        if not all(
            is_same(slot, one, exact=case.rounds or case.master != "none")
            for slot, one in zip(slots, kept, strict=True)
        ):
            return False
    return True


def is_same(slot, stored, exact=False):
    """Whether a step left the reference's bits; of parameters that are rounded to nearest any NaN (exact: no other one)."""
    found, wanted = (torch.isnan(p.float()) for p in (slot.p, to_torch(stored.p).reshape(slot.p.shape)))
    shape = stored.p.shape
    p = (
        stored.p
        if exact
        else np.where(to_numpy(found).reshape(shape), to_numpy(slot.p).reshape(shape), stored.p)
    )
    try:
        same("", slot, replace(stored, p=p))
    except AssertionError:
        return False
    return torch.equal(found, wanted)


def after(rule, slot, stored, step):
    """What the reference stores after a step."""
    g = to_numpy(slot.g).reshape(stored.p.shape)
    return update(stored, g, rule.states, step=step, lr=rule.lr, betas=rule.betas, eps=rule.eps, kind=rule.kind,
                  weight_decay=rule.weight_decay, stochastic_round=rule.stochastic_round,
                  key=Key(rule.seed, slot.parameter, slot.first))  # fmt: skip


@pytest.mark.parametrize("name", at_night(CASES, "4 bits, blocks of 512"))
def test_bits(name):
    """Whole turns and a part of one; zeros, and one block of a parameter; a shard without elements."""
    require_nvrtc()
    assert agree(CASES[name])


@pytest.mark.parametrize(
    "name", at_night(["4 bits, stochastic", "8 bits, 24-bit master"], "8 bits, 24-bit master")
)
def test_what_is_not_finite(name):
    """Its block is NaN and stays so; squares stop at the largest float32, and no other block changes."""
    require_nvrtc()
    assert agree(CASES[name], spoil=spoiled)


def test_a_step_that_is_left_out():
    """Nothing is written."""
    require_nvrtc()
    rule, slots, kept = prepared(CASES["4 bits"])
    slots[0].g.fill_(1.0)
    stepped(rule, slots, skip=True)
    assert all(is_same(slot, one) for slot, one in zip(slots, kept, strict=True))


#: A piece of the source and what takes its place.
FAULTS = {
    "what is read ahead is not waited for": ('"n"(STAGES - 2)', '"n"(STAGES - 1)'),
    "the next turn is read over this one": ("fetch_turn(before,", "fetch_turn(stage,"),
    "of the turn before": ("const u32 stage = stages + slot * STAGE", "const u32 stage = stages"),
    "the upper half of random words first": ("i % 2 ? HIGH : LOW", "i % 2 ? LOW : HIGH"),
    "runs draw the same words": ("problem, t, run + r * LANES)", "problem, t, run)"),
    "a block's last lane does not count": ("i < LANES; i *= 2", "i < LANES / 2; i *= 2"),
    "squares grow beyond the largest float32": ("if (CLAMPED) v = fminf(v, LARGEST);", ";"),
    "roots are rounded twice": ("__fmaf_rn(rest, __fmul_rn(guess, 0.5f), root)", "root"),
    "codes of 0 stay": ("fmaxf(__fmul_rn(root[i], scale.factor), 1.0f)", "__fmul_rn(root[i], scale.factor)"),
    "a block that is not finite has codes": ("pattern(scale.stored) >= INFINITY_BITS ? 0 : codes", "codes"),
    "lanes read behind the last block": ("min(ahead + own, last - 1)", "ahead + own"),
    "scales of the first block": ("t.first_scale[block] = first_new.stored", "t.first_scale[0] = first_new.stored"),
    "a left-out step is made": ("if (n[10] != 0.0f) return;", ";"),
}  # fmt: skip


def is_right(name, change=unchanged):
    """Whether what a case leaves is right with a change of the source."""
    if name == "left out":
        rule, slots, kept = prepared(CASES["4 bits"])
        slots[0].g.fill_(1.0)
        stepped(rule, slots, skip=True, change=change)
        return all(is_same(slot, one) for slot, one in zip(slots, kept, strict=True))
    return agree(CASES[name], spoil=spoiled, change=change)


@pytest.mark.parametrize("fault", at_night(FAULTS, *list(FAULTS)[3:]))
def test_the_emulator_sees(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right, ["4 bits", "8 bits, 24-bit master", "left out"])


#: Instructions an element, of both ways through a turn and of what a program does once.
LIMITS = {
    Problem(4, 128, False, False, 0): 66, Problem(8, 256, False, False, 0): 54, Problem(8, 256, False, False, 8): 60,
}  # fmt: skip


@pytest.mark.parametrize("problem", LIMITS, ids=str)
def test_compiled(problem):
    """No spills; few instructions; elements in 16 bytes, nothing in single bytes."""
    variant = sm90_step.VARIANTS[problem.bits]
    cubin, log = compiled(KERNEL, variant, problem)
    assert complaints(log, variant.threads * variant.resident) == []
    names = [line.text.split()[0] for line in disassembled(cubin).lines]
    assert len(names) / (2 * sm90_step.EACH) <= LIMITS[problem]
    moves = [name for name in names if name.startswith(("LDGSTS", "STG"))]
    # Copies in two runs for each turn ahead and the next one, stores on either way.
    assert sum(name.endswith(".128") for name in moves) == 4 * variant.stages + 4
    assert not [name for name in moves if ".U8" in name or ".S8" in name]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("4bit", rounds=True), Problem(4, 128, False, True, 0)),
        (Case("8bit", "adam", master="24bit", block=64), Problem(8, 64, True, False, 8)),
        (Case("8bit", block=1024), None),
        (Case("8bit", dtype=torch.float32), None),
        (Case("8bit", betas=(0.9, 0.1)), None),
        (Case("torchao.4bit"), None),
        (Case("lion.8bit", "lion"), None),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_what_is_taken(case, problem):
    """Of the default states what is aligned; nothing of others, and nothing without a GPU."""
    block = case.block or 256
    rule, (slot,), _ = slots_of(case, torch.device("cpu"), np.random.default_rng(0), ((4, block),))
    kind = host.kind_of(slot, rule)
    assert sm90_step.problem_of(kind) == problem
    assert sm90_step.problem_of(replace(kind, aligned=False)) is None
    assert sm90_step.taken(kind, slot.p) is None
