"""Sparse training under FSDP2: two ranks on this machine have the weights and masks of one."""

from tests.support.distributed.ranks import check_on_ranks


def test_two_ranks():
    check_on_ranks("sparse_training_ranks.py")
