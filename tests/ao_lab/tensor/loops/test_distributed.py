"""Every loop of torch.distributed with every kind of layer has the answer that the table says, on two ranks."""

import pytest

from tests.support.distributed.ranks import check_on_ranks


@pytest.mark.parametrize("kinds", [["int8 dynamic", "nf4"], pytest.param([], marks=pytest.mark.nightly)])
def test_the_answers_are_those_of_the_table(kinds, tmp_path):
    """FSDP1, FSDP2, DDP and none: training beside frozen layers, states by DCP and from rank 0; two ways to cut a layer."""
    check_on_ranks("loops_ranks.py", tmp_path, *kinds)
