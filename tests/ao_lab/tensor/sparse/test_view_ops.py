"""Pieces and views of a 2:4 tensor are those of the dense tensor, bit for bit, or a clear error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_lab import SparseQuantizedTensor, quantized_compressed
from ao_lab.tensor.sparse.slicing import column_step
from tests.support.quantized_weights import SPARSE_KINDS, pair, pruned, same

aten = torch.ops.aten


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_transposed(scheme):
    t, dense = pair(scheme, 128, 256)
    for turned in (t.t(), t.transpose(0, 1), t.mT, t.permute(1, 0)):
        assert isinstance(turned, SparseQuantizedTensor)
        assert (turned.shape, turned.stride()) == ((256, 128), (1, 256))
        assert turned.codes.data_ptr() == t.codes.data_ptr()
        assert same(turned.dequantize(), dense.t())
        assert turned.block_axis == -2
    assert torch.equal(t.t().t(), t)
    assert torch.equal(t.permute(0, 1), t)


@given(st.sampled_from(SPARSE_KINDS), st.booleans(), st.data())
def test_slices_are_those_of_the_dense_tensor(scheme, turned, data):
    t, dense = pair(scheme, 256, 512)
    rows, columns = (128 if scheme == "fp8_128x128" else 1), column_step(t)
    cuts = [
        sorted(data.draw(st.tuples(*[st.integers(0, n // step)] * 2)))
        for n, step in ((256, rows), (512, columns))
    ]
    (a, b), (c, d) = (
        (first * step, last * step) for (first, last), step in zip(cuts, (rows, columns), strict=True)
    )
    piece = t.t()[c:d, a:b].t() if turned else t[a:b, c:d]
    assert isinstance(piece, SparseQuantizedTensor)
    assert same(piece.dequantize(), dense[a:b, c:d])
    shape = piece.codes.shape
    assert shape == (b - a, (d - c) // 2 * min(t.scheme.format.bits, 8) // 8)
    assert piece.metadata.shape == (b - a, (d - c) // 8)


@pytest.mark.parametrize(
    ("scheme", "step"), [("int8_rowwise", 8), ("int4_g32", 32), ("int3_g32", 32), ("bfloat16", 8)]
)
def test_cuts_through_bytes_and_blocks_are_refused(scheme, step):
    t, _ = pair(scheme, 64, 256)
    assert column_step(t) == step
    with pytest.raises(ValueError, match=f"cut at multiples of {step}"):
        t[:, 4:]
    with pytest.raises(ValueError, match=f"cut at multiples of {step}"):
        t.t()[:12]
    with pytest.raises(ValueError, match="only step 1"):
        t[::2]
    blocks, _ = pair("fp8_128x128", 256, 256)
    with pytest.raises(ValueError, match="cut at multiples of 128"):
        blocks[1:]


def test_the_last_columns_may_fill_no_byte():
    t = quantized_compressed(pruned(4, 28), "bfloat16")
    assert same(t[:, 16:28].dequantize(), pruned(4, 28)[:, 16:28])
    assert same(torch.cat([t[:, :16], t[:, 16:]], 1).dequantize(), pruned(4, 28))


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_split_and_cat(scheme):
    t, dense = pair(scheme, 256, 512)
    for dim, sizes in ((0, 128), (1, 256), (0, [128, 128]), (1, [384, 128])):
        pieces = t.split(sizes, dim)
        assert [
            same(piece.dequantize(), other)
            for piece, other in zip(pieces, dense.split(sizes, dim), strict=True)
        ]
        assert all(isinstance(piece, SparseQuantizedTensor) for piece in pieces)
        whole = dim == 1 and t.scheme.scale.block in (-1, "tensor")
        assert torch.equal(torch.cat(pieces, dim), t) or whole
        assert same(torch.cat(pieces, dim).dequantize(), dense)
    turned = torch.cat(t.t().split(256, 0), 0)
    assert same(turned.dequantize(), dense.t())
    with pytest.raises(ValueError, match="must sum to 256"):
        t.split([3, 4])


def test_what_does_not_go_together():
    t, _ = pair("int8_rowwise", 64, 128)
    with pytest.raises(ValueError, match="each piece has its own scale"):
        torch.cat([t, pair("int8_rowwise", 64, 128, seed=1)[0]], 1)
    with pytest.raises(ValueError, match="different recipes"):
        torch.cat([t, pair("fp8_rowwise", 64, 128)[0]])
    with pytest.raises(TypeError, match="another kind"):
        torch.cat([t, torch.zeros(64, 128, dtype=torch.bfloat16)])
    short = quantized_compressed(pruned(64, 12), "bfloat16")
    with pytest.raises(ValueError, match="multiples of 8"):
        torch.cat([short, short], 1)


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_views(scheme):
    t, dense = pair(scheme, 128, 256)
    for made in (t.view(128, 256), t.reshape(-1, 256), t.expand(128, -1), aten._unsafe_view(t, [128, 256])):
        assert torch.equal(made, t)
    flat = t.view(-1)
    assert same(flat.dequantize(), dense.reshape(-1))
    assert torch.equal(flat.view(128, 256), t)
    assert torch.equal(t.t().reshape(-1).view(256, 128), t.t())
    assert torch.equal(torch.as_strided(t, (128, 256), (256, 1)), t)
    with pytest.raises(ValueError, match="expand"):
        t.expand(4, 256)
    with pytest.raises(ValueError, match="the last axis must stay"):
        t.view(256, 128)
    with pytest.raises(ValueError, match="no shape"):
        t.view(3, 5)
    if scheme != "fp8_128x128":
        assert same(t.view(4, 32, 256).dequantize(), dense.view(4, 32, 256))


@pytest.mark.parametrize(
    "scheme", ["int8_rowwise", "int4_g32_asymmetric", "fp8_128x128", "bfloat16", "nvfp4"]
)
def test_batches(scheme):
    t, dense = pair(scheme, 128, 256)
    batch = t.expand(3, 128, 256)
    assert same(batch.dequantize(), dense.expand(3, 128, 256))
    assert same(batch[1].dequantize(), dense)
    assert [same(one.dequantize(), dense) for one in batch.unbind()] == [True] * 3
    assert same(batch.transpose(1, 2).dequantize(), dense.expand(3, 128, 256).transpose(1, 2))
    assert same(batch[1:].dequantize(), dense.expand(2, 128, 256))
    assert same(batch[torch.tensor([2, 0])].dequantize(), dense.expand(2, 128, 256))
    with pytest.raises(ValueError, match="in front of the last two"):
        t[0]
    with pytest.raises(IndexError, match="entry 3"):
        aten.select.int(batch, 0, 3)
    x = torch.randn(3, 5, 256, dtype=torch.bfloat16)
    assert same(torch.bmm(x, batch.transpose(1, 2)), torch.bmm(x, dense.expand(3, 128, 256).transpose(1, 2)))


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int3_g32", "fp8_tensorwise", "bfloat16"])
def test_rows_by_number(scheme):
    t, dense = pair(scheme, 64, 128)
    index = torch.tensor([3, 3, 60])
    assert same(t[index].dequantize(), dense[index])
    assert same(t.index_select(0, index).dequantize(), dense[index])
    assert same(torch.nn.functional.embedding(index, t), dense[index])
    assert same(t[:, index], dense[:, index])
    with pytest.raises(ValueError, match="index_select along axis 1"):
        t.index_select(1, index)
    blocks, dense = pair("fp8_128x128", 128, 128)
    assert same(torch.nn.functional.embedding(index, blocks), dense[index])
    assert same(blocks[index], dense[index])
