"""States on several ranks: the bits of one process, through checkpoints too; and a sharding that rows of states do not have."""

import pytest

from ao_lab.optim import slots
from tests.support.distributed.ranks import check_on_ranks


def test_ranks_have_the_bits_of_one_process(tmp_path):
    check_on_ranks("optim.states", str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [((4000, 64), 256, 1), ((32, 16, 3, 3), 256, 1), ((8, 512, 512), 256, 2), ((512,), 256, 0)],
)
def test_axes_that_count_rows(shape, block, expected):
    assert slots.lead_axes(shape, block) == expected
