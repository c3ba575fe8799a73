"""Every loop of the table with every kind of layer has the answer that the table says."""

import re

import pytest

from tests.support.distributed.ranks import check_on_ranks
from tests.support.loops import ANSWERS, DAY, KINDS, LOOPS, tried

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*more than half of the change:UserWarning"),
]


def cases():
    """Every pair; those of the night are marked."""
    for loop in LOOPS:
        for kind in KINDS:
            by_day = kind in (DAY[:1] if loop.startswith("Trainer") else DAY)
            yield pytest.param(loop, kind, marks=() if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("loop", "kind"), [*cases()])
def test_the_answer_is_that_of_the_table(loop, kind, tmp_path):
    answer = ANSWERS.get((loop, kind), ANSWERS.get((loop, ""), "right"))
    found = tried(loop, kind, tmp_path)
    assert found == answer if answer == "right" else re.search(answer, found), found


def test_every_answer_is_of_a_loop():
    assert {loop for loop, _ in ANSWERS} <= set(LOOPS)
    assert {kind for _, kind in ANSWERS} - {""} <= set(KINDS)


@pytest.mark.parametrize("kinds", [["int8 dynamic", "nf4"], pytest.param([], marks=pytest.mark.nightly)])
def test_on_two_ranks(kinds, tmp_path):
    """FSDP1, FSDP2, DDP and none: training beside frozen layers, states by DCP and from rank 0; two ways to cut a layer."""
    check_on_ranks("loops.run", tmp_path, *kinds)
