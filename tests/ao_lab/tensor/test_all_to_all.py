"""Rows between ranks as codes and scales: two ranks on this machine, and what is said without them."""

import pytest
import torch

from ao_lab.tensor.all_to_all import all_to_all_rows, row_bytes
from tests.support.distributed.ranks import check_on_ranks


def test_two_ranks_have_the_bits_and_gradients_of_one_process():
    check_on_ranks("embeddings.all_checks")


def test_bytes_of_a_row():
    found = [
        row_bytes(name, 128)
        for name in ("fp8_rowwise", "int8_rowwise", "int4_g32", "mxfp8_e4m3", "int8_rowwise_asymmetric")
    ]
    assert found == [132, 132, 80, 132, 133]
    with pytest.raises(ValueError, match="nvfp4 has scales of more than a row"):
        row_bytes("nvfp4", 128)


def test_there_has_to_be_a_process_group():
    with pytest.raises(ValueError, match="init_process_group makes one"):
        all_to_all_rows(torch.ones(2, 32), [2], [2])
