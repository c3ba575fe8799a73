"""Embedding tables on different ranks, whose sums are exchanged in low precision: the bits and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ao_lab
import fast
from ao_lab.tensor.all_to_all import all_to_all_rows
from tests.support.distributed.ranks import DEVICE

#: Of each rank: samples, and rows of its table.
SAMPLES, WIDTH, ROWS = 6, 64, 20


def rounded(x, scheme):
    return x if scheme is None else fast.dequantize(fast.quantize(x, scheme), x.dtype)


def exchange():
    """Every rank has the ids of all samples and one table; sums go to the rank of their samples, gradients back."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tables = [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(ranks)]
    ids = torch.randint(0, ROWS, (ranks, ranks * SAMPLES, 3), device=DEVICE)
    factor = torch.randn(ranks, ranks * SAMPLES, WIDTH, device=DEVICE)
    mine = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
    for scheme, gradient in (
        ("fp8_rowwise", None),
        ("int8_rowwise", "fp8_rowwise"),
        ("int4_g32_asymmetric", None),
        (None, None),
    ):
        bag = nn.EmbeddingBag.from_pretrained(tables[rank].clone(), freeze=False, mode="sum")
        sums = bag(ids[rank])
        each = [SAMPLES] * ranks
        y = all_to_all_rows(sums, each, each, scheme, gradient=gradient).reshape(ranks, SAMPLES, WIDTH)
        whole = torch.stack([rounded(table[ids[at]].sum(1), scheme) for at, table in enumerate(tables)])
        torch.testing.assert_close(y, whole[:, mine], rtol=0, atol=0 if scheme else 1e-6)
        (y * factor[:, mine]).sum().backward()
        wanted = torch.zeros(ROWS, WIDTH, device=DEVICE)
        g = rounded(factor[rank], gradient)
        wanted.index_add_(0, ids[rank].reshape(-1), g.repeat_interleave(3, 0))
        torch.testing.assert_close(bag.weight.grad, wanted, rtol=0, atol=1e-5)


def unequal():
    """A rank that sends nothing to one and all to the other; bfloat16; a frozen table."""
    rank = dist.get_rank()
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    send = [0, 4] if rank == 0 else [1, 3]
    receive = [0, 1] if rank == 0 else [4, 3]
    y = all_to_all_rows(x, send, receive, "mxfp8_e4m3")
    assert y.dtype == torch.bfloat16
    assert y.shape == (sum(receive), WIDTH)
    if rank == 1:
        assert torch.equal(y[4:], rounded(x[1:], "mxfp8_e4m3"))
    table = ao_lab.quantized(torch.randn(ROWS, WIDTH), "int8_rowwise")
    sums = ao_lab.embedding_bag(table, torch.arange(4), torch.arange(4))
    assert all_to_all_rows(sums, [2, 2], [2, 2]).shape == (4, WIDTH)
    for change, message in (
        ({"send": [4]}, "one number a rank each"),
        ({"send": [1, 1]}, "add up to the rows"),
        ({"scheme": "fp8_tensorwise"}, "has scales of more than a row"),
        ({"gradient": "nvfp4"}, "has scales of more than a row"),
        ({"x": x[0]}, "sends rows of a matrix"),
    ):
        given = {"x": x, "send": send, "receive": receive} | change
        with pytest.raises(ValueError, match=message):
            all_to_all_rows(**given)
    with pytest.raises(TypeError, match="integer"):
        all_to_all_rows(x, [2.0, 2.0], receive)


def one_row_or_none():
    """A rank to which one row comes and one to which none does: parts of 32, 8 and 2 bytes, which lie at no multiple of 4."""
    rank = dist.get_rank()
    x = torch.randn(1 - rank, WIDTH, device=DEVICE)
    send, receive = ([1, 0], [1, 0]) if rank == 0 else ([0, 0], [0, 0])
    for scheme in ("int4_g32_asymmetric", "fp8_rowwise"):
        assert torch.equal(all_to_all_rows(x, send, receive, scheme), rounded(x, scheme))


def all_checks():
    exchange()
    unequal()
    one_row_or_none()
