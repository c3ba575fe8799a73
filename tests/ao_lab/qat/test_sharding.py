"""Layers in training under FSDP2: two ranks on this machine give the bits of one."""

from tests.support.distributed.ranks import check_on_ranks


def test_two_ranks():
    """Outputs and gradients; weights that are distributed are not converted."""
    check_on_ranks("qat_ranks.py")
