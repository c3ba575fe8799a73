"""The compiled loop of an optimizer step has the reference's bits, in every case and on every kind of rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fast.kernels.optim.records import covers
from fast.optim import update
from reference.optim.states import STATES
from tests.support.optim import CASES, SHAPES, compared, slots_of

#: Cases whose loops the day compiles; the others differ in one constant.
DAY = (0, 8)


def covered(case):
    return case.dtype != torch.float16


@pytest.fixture(autouse=True)
def _small_parameters_too(monkeypatch):
    monkeypatch.setattr(update, "LEAST", 0)


def compare(case):
    rule, slots, kept = slots_of(case, torch.device("cpu"), np.random.default_rng(0), SHAPES)
    assert (
        update._loop_of(rule.kind, rule.states, case.dtype, case.dtype, case.rounds, update._master(slots[0]))
        is not None
    )
    assert compared(case, rule, slots, kept, steps=3) > 1000


@pytest.mark.parametrize("at", DAY, ids=lambda at: CASES[at].name)
def test_bits(at):
    compare(CASES[at])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [case for at, case in enumerate(CASES) if at not in DAY and covered(case)],
    ids=lambda case: case.name,
)
def test_bits_of_other_cases(case):
    compare(case)


def test_what_the_loop_does_not_cover_goes_by_the_reference():
    case = next(case for case in CASES if not covered(case))
    rule, slots, kept = slots_of(case, torch.device("cpu"), np.random.default_rng(0), ((2, 300),))
    assert update._loop_of(rule.kind, rule.states, case.dtype, case.dtype, False, 0) is None
    assert compared(case, rule, slots, kept, steps=2) > 1000


def test_states_that_compiled_steps_cover():
    """Neither a companding function, nor a rule of one moment for the other one, which they would leave out."""
    ours = STATES["8bit"]
    swapped = replace(ours, first=ours.second, second=ours.first)
    assert [name for name, one in STATES.items() if not covers(one, "adamw")] == ["flashoptim.8bit"]
    assert not covers(swapped, "adamw")
    assert not covers(replace(swapped, first=replace(ours.second, transform="none")), "lion")
    assert not covers(replace(ours, second=ours.first), "adamw")
    assert covers(replace(ours, second=ours.first), "lion")
