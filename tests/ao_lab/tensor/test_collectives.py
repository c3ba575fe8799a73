"""`QuantizedTensor` between processes (DTensors, collectives, DDP): two ranks on this machine give the bits of one process.

Rows between ranks as codes and scales: two ranks on this machine, and what is said without them.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ao_lab
from ao_lab.tensor import all_to_all
from ao_lab.tensor.all_to_all import all_to_all_rows, joined, row_bytes, values_of
from ao_lab.tensor.view_ops import Bundle, waited
from reference import SCHEMES
from tests.fast.kernels.compiling.recorded_launches import Flat, Recorded
from tests.support.distributed.ranks import check_on_ranks


@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_two_ranks(tmp_path, part):
    """Placements, products, a model (by night three) and its states, compiled and beside FSDP2; what is refused is refused on
    both."""
    check_on_ranks("tensor_parallel.recorded", tmp_path, *part.split())


def test_hashes_are_completed_once():
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import DTensor

    from ao_lab.tensor.quantized_tensor import QuantizedTensor
    from ao_lab.tensor.torch_changes import HASH, hash_local_tensors

    hash_local_tensors(QuantizedTensor)
    first = getattr(DTensor, HASH, None)
    hash_local_tensors(QuantizedTensor)
    assert getattr(DTensor, HASH, None) is first


@pytest.mark.parametrize("given", [True, False])
def test_work_that_is_waited_for_is_asynchronous(given):
    """NCCL gives an empty work else, and a wait for it ends the process without a word."""
    asked = []

    def collective(*args, **kwargs):
        asked.append(args[4] if len(args) > 4 else kwargs["async_op"])
        return args[0], SimpleNamespace(wait=lambda: asked.append("waited"))

    collective._schema = torch.ops.c10d.broadcast_.default._schema
    waited(collective, [[torch.ones(1)], None, 0, 0, *([False] if given else [])], {})
    assert asked == [True, "waited"]


def test_collectives_of_sparse_weights():
    check_on_ranks("tensors.sparse")


def test_every_rank_gets_the_weights_of_rank_0():
    check_on_ranks("tensors.ddp")


def test_flattened_weights_are_cut_where_they_were_joined():
    weight = ao_lab.quantized(torch.randn(4, 32), "int8_rowwise")
    dense = torch.randn(7)
    flat = torch.cat([dense, weight.view(-1)])
    assert (type(flat), flat.shape, flat.dtype) == (Bundle, (135,), torch.float32)
    assert torch.equal(flat[:7], dense)
    assert torch.equal(flat.narrow(0, 7, 128).view(4, 32), weight)
    with pytest.raises(ValueError, match=r"cut where they were joined, at \[7, 135\]; got 0 to 8"):
        flat[:8]
    with pytest.raises(NotImplementedError, match="can be broadcast and cut, or dequantize"):
        flat + 1


def test_other_joins_with_dense_tensors_are_refused():
    weight = ao_lab.quantized(torch.randn(4, 32), "int8_rowwise")
    with pytest.raises(TypeError, match="cat of a QuantizedTensor and a dense tensor"):
        torch.cat([weight, torch.zeros(4, 32)])


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


class Seen(TorchDispatchMode):
    """Names of the operators that pass, which a kernel past the dispatcher is not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_launch_before_and_one_behind(monkeypatch):
    """On a GPU, of rows of 8 bits with one scale; other rows are quantized and copied together."""
    width = {name: row_bytes(name, 128) for name in ("fp8_rowwise", "mxfp8_e4m3")}
    recorded = Recorded(monkeypatch, Flat)
    monkeypatch.setattr(all_to_all, "has_kernels", lambda x: True)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    for _ in range(2):
        sent = joined(x, SCHEMES["fp8_rowwise"])
        assert sent.shape == (64, width["fp8_rowwise"])
        y = values_of(sent, SCHEMES["fp8_rowwise"], 128, x.dtype)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert recorded.counts() == (2, 2)
    with Seen() as seen:
        assert joined(x, SCHEMES["fp8_rowwise"]).shape == sent.shape
    assert "ao_lab::quantize" in seen.names
    assert joined(x, SCHEMES["mxfp8_e4m3"]).shape == (64, width["mxfp8_e4m3"])


def test_there_has_to_be_a_process_group():
    with pytest.raises(ValueError, match="init_process_group makes one"):
        all_to_all_rows(torch.ones(2, 32), [2], [2])
