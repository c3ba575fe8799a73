"""2:4 tensors under FSDP2: shards make the weight again, and only what differs between ranks is sent."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.quantized_weights import SPARSE_KINDS, pair, same

RANKS = 2


def mesh(ranks):
    return SimpleNamespace(size=lambda: ranks)


def gathered(shards, whole):
    sent = [shard.fsdp_pre_all_gather(mesh(len(shards)), whole, None, None, None) for shard in shards]
    return tuple(torch.cat(parts) for parts in zip(*(parts for parts, _ in sent), strict=True)), sent[0][1]


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_shards_make_the_weight_again(scheme):
    t, dense = pair(scheme, 256, 256)
    shards = [shard.clone() for shard in t.chunk(RANKS)]
    outputs, metadata = gathered(shards, (256, 256))
    assert metadata[0][0] == "codes"
    assert metadata[0][-1] == "metadata"
    whole, _ = shards[1].fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
    assert torch.equal(whole, t)
    assert same(whole.dequantize(), dense)
    whole.fsdp_post_all_gather(tuple(part * 0 for part in outputs), metadata, torch.bfloat16, out=whole)
    assert not whole.metadata.any()
    whole.fsdp_post_all_gather(outputs, metadata, torch.bfloat16, out=whole)
    assert torch.equal(whole, t)


def test_one_rank_sends_codes_alone():
    t, _ = pair("int8_rowwise", 64, 64)
    outputs, metadata = gathered([t], (64, 64))
    assert len(outputs) == 1
    assert torch.equal(t.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)[0], t)


def test_what_fsdp_cannot_cut():
    t, _ = pair("int8_rowwise", 9, 64)
    with pytest.raises(ValueError, match="2 ranks cuts 9 rows"):
        t[:5].fsdp_pre_all_gather(mesh(2), (9, 64), None, None, None)
    with pytest.raises(ValueError, match="stored transposed"):
        t.t().fsdp_pre_all_gather(mesh(2), (64, 9), None, None, None)
