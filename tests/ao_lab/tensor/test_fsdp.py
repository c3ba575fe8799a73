"""`QuantizedTensor` under FSDP2: two ranks on this machine give the bits of one."""

from types import SimpleNamespace

import pytest
import torch

from ao_lab import quantized
from ao_lab.tensor.fsdp import gathered_parts, whole_weight
from tests.support.distributed.ranks import RANKS, check_on_ranks
from tests.support.quantized_weights import STORED, same, stored, weight


def mesh(ranks):
    return SimpleNamespace(size=lambda: ranks)


def gathered(shards, whole):
    """What every rank gets of the parts that the shards send, and what goes with it."""
    sent = [gathered_parts(shard, mesh(len(shards)), whole) for shard in shards]
    return tuple(torch.cat(parts) for parts in zip(*(parts for parts, _ in sent), strict=True)), sent[0][1]


@pytest.mark.parametrize("name", STORED)
def test_shards_make_the_weight_again(name):
    t = stored(name, 256, 256)
    shards = [shard.clone() for shard in t.chunk(RANKS)]
    outputs, metadata = gathered(shards, (256, 256))
    whole, _ = whole_weight(shards[1], outputs, metadata, t.dtype)
    assert torch.equal(whole, t)
    assert same(whole.dequantize(), t.dequantize())
    whole.fsdp_post_all_gather(tuple(part * 0 for part in outputs), metadata, t.dtype, out=whole)
    assert not any(part.view(torch.uint8).any() for part in (whole.codes, whole.metadata) if part is not None)
    whole.fsdp_post_all_gather(outputs, metadata, torch.float32, out=whole)
    assert torch.equal(whole, t)


@pytest.mark.parametrize(
    "scheme", ["int8_rowwise", "int3_g32", "int4_g32_asymmetric", "fp8_tensorwise", "mxfp6_e2m3", "nvfp4"]
)
@pytest.mark.parametrize("rows", [9, 10, 3, 1])
def test_unequal_shards_send_the_bytes_of_rows(scheme, rows):
    """All ranks send tensors of one shape, that of the longest shard, as FSDP2 asks; also those without rows."""
    ranks, t = 4, quantized(weight(rows, 64), scheme)
    longest = -(-rows // ranks)
    shards = [t[longest * rank : longest * (rank + 1)] for rank in range(ranks)]
    for shard in shards:
        sent, _ = gathered_parts(shard, mesh(ranks), (rows, 64))
        assert {tuple(part.shape) for part in sent} == {(longest, 64)}
    outputs, metadata = gathered(shards, (rows, 64))
    whole, own = whole_weight(shards[-1], outputs, metadata, torch.float32)
    assert torch.equal(whole, t)
    assert own == ()
    whole.fsdp_post_all_gather(tuple(part * 0 for part in outputs), metadata, torch.float32, out=whole)
    assert not whole.codes.any()
    whole.fsdp_post_all_gather(outputs, metadata, torch.float32, out=whole)
    assert torch.equal(whole, t)


def test_unequal_shards_send_no_more_than_they_need():
    """4 bits and a scale of 32 bits for 32 of them are 5/8 of a byte an element; 8 bits and a scale more than one."""
    for scheme, count in (("int4_g32", 1), ("int8_rowwise", 2), ("fp8_tensorwise", 1)):
        sent, _ = gathered_parts(quantized(weight(5, 64), scheme), mesh(2), (9, 64))
        assert len(sent) == count


def test_unequal_shards_on_a_device_own_their_memory():
    """FSDP2 frees between layers what it is told of, whole storages; here on the meta device in place of a GPU."""
    shards = [shard.to("meta") for shard in quantized(weight(9, 64), "int8_rowwise").split(5)]
    outputs, metadata = gathered(shards, (9, 64))
    whole, own = whole_weight(shards[0], outputs, metadata, torch.float32)
    assert [part is kept for part, kept in zip(own, (whole.codes, whole.scale), strict=True)] == [True, True]
    assert [part.untyped_storage().nbytes() for part in own] == [9 * 64, 9 * 4]


def test_unequal_shards_of_blocks_that_span_rows_are_refused():
    for scheme in ("fp8_128x128", "nf4"):
        t = quantized(weight(256, 256), scheme)
        with pytest.raises(ValueError, match="divides 383"):
            gathered_parts(t, mesh(3), (383, 256))
    with pytest.raises(ValueError, match="2 ranks cuts 9 rows of a 2:4 weight"):
        gathered_parts(stored("int8_rowwise_2:4", 5, 64), mesh(2), (9, 64))


def test_a_transposed_weight_has_no_rows_to_gather():
    for name in ("int8_rowwise", "int8_rowwise_2:4"):
        with pytest.raises(ValueError, match="stored transposed"):
            gathered_parts(stored(name, 32, 64).t(), mesh(2), (64, 32))


def test_a_weight_that_is_gathered_again_is_no_other():
    """What a compiled forward has kept of it for its backward stays right: autograd counts no change."""
    t = quantized(weight(32, 64), "int8_rowwise")
    outputs, metadata = gathered([t], (32, 64))
    whole, _ = whole_weight(t, outputs, metadata, torch.float32)
    before = whole.codes._version
    whole.fsdp_post_all_gather(outputs, metadata, torch.float32, out=whole)
    assert whole.codes._version == before


def test_parts_are_sent_in_rows():
    """Experts (in, out) have blocks along another axis than the last, and parts in another order; FSDP2 flattens them."""
    t = quantized(weight(4, 64, 32), "int4_g32_asymmetric", axis=-2)
    for ranks in (1, 2):
        sent, _ = gathered_parts(t, mesh(ranks), tuple(t.shape))
        assert all(part.is_contiguous() for part in sent)


def test_one_rank_has_all_the_scales_already():
    for name in ("int8_rowwise", "int8_rowwise_2:4"):
        t = stored(name, 32, 64)
        sent, metadata = gathered_parts(t, mesh(1), (32, 64))
        assert len(sent) == 1
        assert torch.equal(whole_weight(t, sent, metadata, torch.float32)[0], t)


def test_one_axis_and_back():
    t = quantized(weight(32, 64), "int4_g32_asymmetric")
    flat = t.view(-1)
    assert flat.shape == (2048,)
    assert same(flat.dequantize(), t.dequantize().view(-1))
    assert torch.equal(flat.view(32, 64), t)
    for refused in (
        lambda: flat[:64],
        lambda: flat[torch.tensor([1])],
    ):
        with pytest.raises(ValueError, match="shows one axis"):
            refused()


def test_two_ranks():
    """Adapters train beside frozen quantized weights; outputs and gradients are those of one process."""
    check_on_ranks("tensors.fsdp")
