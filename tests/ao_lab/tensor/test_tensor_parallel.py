"""`QuantizedTensor` in DTensors: two ranks on this machine give the bits of one process."""

import pytest

from tests.support.distributed.ranks import check_on_ranks


def test_two_ranks(tmp_path):
    """Placements, products, models and their states, compiled and beside FSDP2; what is refused is refused on both."""
    check_on_ranks("tensor_parallel_ranks.py", tmp_path)


def test_hashes_are_completed_once():
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import DTensor

    from ao_lab.tensor.quantized_tensor import QuantizedTensor
    from ao_lab.tensor.torch_changes import HASH, hash_local_tensors

    hash_local_tensors(QuantizedTensor)
    first = getattr(DTensor, HASH, None)
    hash_local_tensors(QuantizedTensor)
    assert getattr(DTensor, HASH, None) is first
