"""Models that transformers shards while it reads them: the weights of one process, from our folders and dense ones."""

import pytest

pytest.importorskip("transformers")
from tests.support.distributed.ranks import check_on_ranks


@pytest.mark.parametrize("when", ["day", pytest.param("night", marks=pytest.mark.nightly)])
def test_two_ranks(when, tmp_path):
    """tp_plan by day; experts over ranks and FSDP2, all kinds and schemes, by night. NF4's columns are refused by name."""
    check_on_ranks("hf_ranks.py", tmp_path, when)
