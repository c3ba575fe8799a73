"""2:4 tensors between processes: two ranks on this machine have what one has."""

from tests.support.distributed.ranks import check_on_ranks


def test_two_ranks_have_the_bits_of_one():
    check_on_ranks("sparse_ranks.py")
