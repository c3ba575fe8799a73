"""Every operation of `QuantizedTensor`'s table gives the bits that the dense tensor would."""

import copy
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ao_lab import quantized
from ao_lab.tensor import slicing
from ao_lab.tensor.op_registry import OPERATIONS
from ao_lab.tensor.value_ops import AVERAGES, CHANGES, LISTS, READS
from reference import Scales
from tests.support.quantized_weights import (
    COLLECTIVES,
    DEVICES,
    KINDS,
    LAYERS,
    SPARSE_KINDS,
    STORED,
    numbers,
    pair,
    recorded_operations,
    same,
    specified,
    stored,
    weight,
)
from tests.support.runs import forks

aten = torch.ops.aten
USED = set()


@pytest.fixture(autouse=True, params=DEVICES)
def _recorded_on_every_device(request, monkeypatch):
    with torch.device(request.param), recorded_operations(monkeypatch, USED):
        yield


@pytest.mark.parametrize("name", STORED)
def test_copies(name):
    t = stored(name, 128, 256)
    for made in (t.detach(), t.clone(), copy.deepcopy(t), aten.alias(t), aten.lift_fresh(t)):
        assert type(made) is type(t)
        assert torch.equal(made, t)
    held = {part: value for part, value in t.parts.items() if value is not None}
    assert all(getattr(t.detach(), part).data_ptr() == value.data_ptr() for part, value in held.items())
    assert all(getattr(t.clone(), part).data_ptr() != value.data_ptr() for part, value in held.items())
    assert torch.equal(t.t().clone(), t.t())


@pytest.mark.parametrize("name", STORED)
def test_to_another_dtype_keeps_the_codes(name):
    t = stored(name, 128, 256)
    half = t.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.codes.view(torch.uint8), t.codes.view(torch.uint8))
    assert same(half.dequantize(), t.dequantize(torch.bfloat16))
    if name in KINDS:
        q = reference.quantize(numbers(name, 128, 256), name)
        assert same(half.dequantize(), reference.dequantize(q, "bfloat16"))
    assert same(t.to(t.device, copy=True).dequantize(), t.dequantize())
    with pytest.raises(TypeError, match="floating-point"):
        t.to(torch.int32)


def test_another_device_moves_every_part():
    static = quantized(weight(32, 64), "nf4", input_scales=Scales(torch.tensor(0.5)))
    for t in (static.to("meta"), stored("int8_rowwise_2:4", 32, 64).to("meta")):
        assert t.device.type == "meta"
        assert {part.device.type for part in t.parts.values() if part is not None} == {"meta"}


@pytest.mark.parametrize("name", STORED)
def test_copy_into(name):
    first, second = stored(name, 128, 256), stored(name, 128, 256, seed=1)
    t = first.clone()
    assert torch.equal(t.copy_(second), second)
    t.copy_(numbers(name, 128, 256))
    assert torch.equal(t, first)
    transposed = t.t().clone()
    transposed.copy_(numbers(name, 128, 256, seed=1).t())
    assert torch.equal(transposed, second.t())
    if name in KINDS:
        assert same(transposed.dequantize(), specified(numbers(name, 128, 256, seed=1), name).t())
    dense = torch.empty(128, 256, dtype=t.dtype)
    assert same(dense.copy_(t), t.dequantize())


def test_copy_into_another_recipe_is_refused():
    t = quantized(weight(32, 64), "int8_rowwise")
    with pytest.raises(ValueError, match="must be the same"):
        t.copy_(quantized(weight(32, 64), "fp8_rowwise"))
    square = quantized(weight(64, 64), "int8_rowwise")
    with pytest.raises(ValueError, match="axes must be the same"):
        square.copy_(square.t())
    with pytest.raises(ValueError, match="axes must be the same"):
        square.copy_(quantized(weight(64, 64), "int8_rowwise", axis=0))
    with pytest.raises(ValueError, match="input_scale"):
        t.copy_(quantized(weight(32, 64), "int8_rowwise", input_scales=Scales(torch.tensor(0.5))))


@pytest.mark.parametrize("name", STORED)
def test_new_tensors_are_zeros_of_the_scheme(name):
    t = stored(name, 128, 256)
    for made, shape in (
        (torch.empty_like(t), (128, 256)),
        (torch.zeros_like(t), (128, 256)),
        (t.new_zeros((256, 512)), (256, 512)),
        (t.new_empty((128, 128)), (128, 128)),
        (torch.zeros_like(t.t()), (256, 128)),
    ):
        assert type(made) is type(t)
        assert same(made.dequantize(), torch.zeros(shape, dtype=t.dtype))


@pytest.mark.parametrize("scheme", ["nvfp4", "nf4", "fp8_tensorwise"])
def test_memory_for_what_is_on_the_meta_device(scheme):
    """As `to_empty` asks for it: of scales without values none are copied."""
    static = Scales(torch.tensor(0.5))
    t = quantized(weight(128, 256).to("meta"), scheme, input_scales=static)
    made = torch.empty_like(t, device="cpu")
    like = quantized(weight(128, 256), scheme, input_scales=static)
    assert [(n, p.shape, p.dtype) for n, p in made.parts.items() if p is not None] == [
        (n, p.shape, p.dtype) for n, p in like.parts.items() if p is not None
    ]
    assert made.device.type == "cpu"
    assert same(made.dequantize(), torch.zeros(128, 256))
    assert torch.equal(made.copy_(like).codes, like.codes)


@pytest.mark.parametrize("name", STORED)
def test_transposed(name):
    t = stored(name, 128, 256)
    for transposed in (t.t(), t.transpose(0, 1), t.mT, t.permute(1, 0)):
        assert type(transposed) is type(t)
        assert transposed.block_axis == -2
        assert (transposed.shape, transposed.stride()) == ((256, 128), (1, 256))
        assert transposed.codes.data_ptr() == t.codes.data_ptr()
        assert same(transposed.dequantize(), t.dequantize().t())
    assert torch.equal(t.t().t(), t)
    assert torch.equal(t.transpose(1, 1), t)
    assert torch.equal(t.permute(0, 1), t)


def test_transposes_in_front_are_refused():
    t = quantized(weight(2, 32, 64), "int8_rowwise")
    with pytest.raises(ValueError, match="only the last two"):
        t.transpose(0, 1)
    with pytest.raises(ValueError, match="only the last two"):
        t.permute(1, 0, 2)
    assert torch.equal(t.permute(0, 2, 1), t.transpose(1, 2))


@pytest.mark.parametrize("name", STORED)
def test_views(name):
    t = stored(name, 128, 256)
    for made in (t.view(128, 256), t.reshape(-1, 256), t.expand(128, -1), aten._unsafe_view(t, [128, 256])):
        assert torch.equal(made, t)
    assert torch.equal(torch.as_strided(t, (128, 256), (256, 1)), t)
    with pytest.raises(ValueError, match="as_strided"):
        torch.as_strided(t, (256, 128), (128, 1))
    with pytest.raises(ValueError, match="expand"):
        t.expand(2, 64, 256)
    with pytest.raises(ValueError, match="last axis"):
        t.view(256, 128)
    with pytest.raises(ValueError, match="no shape"):
        t.view(3, 5)
    flat = t.view(-1)
    assert same(flat.dequantize(), t.dequantize().reshape(-1))
    assert torch.equal(flat.view(128, 256), t)
    assert torch.equal(t.t().reshape(-1).view(256, 128), t.t())


IN_ROWS = [name for name in STORED if not name.startswith(("fp8_128x128", "nf4"))]


@pytest.mark.parametrize("name", IN_ROWS)
def test_views_in_front_of_the_blocks(name):
    t = stored(name, 4, 32, 64)
    flat = t.view(-1, 64)
    assert same(flat.dequantize(), t.dequantize().view(-1, 64))
    assert torch.equal(flat.view(4, 32, 64), t)


@pytest.mark.parametrize("scheme", STORED)
def test_slices_keep_the_bits(scheme):
    t = stored(scheme, 512, 512)
    dense = t.dequantize()
    for index in (
        slice(0, 128),
        slice(128, 384),
        slice(384, None),
        slice(-128, None),
        slice(0, 0),
        slice(384, 128),
    ):
        if scheme == "nf4" and not dense[index].numel():
            continue
        assert same(t[index].dequantize(), dense[index]), index
        if scheme != "nf4":
            assert same(t[:, index].dequantize(), dense[:, index])
            assert same(t.t()[index].dequantize(), dense.t()[index])
            assert same(t.t()[:, index].dequantize(), dense.t()[:, index])
    assert same(t.narrow(0, 128, 256).dequantize(), dense[128:384])


@pytest.mark.parametrize(
    ("scheme", "index"),
    [
        ("int4_g32", (slice(None), slice(16, 64))),
        ("int4_g32", (slice(None), slice(0, 40))),
        ("fp8_128x128", slice(64, 256)),
        ("int3_g32", (slice(None), slice(1, 32))),
        ("nf4", slice(1, 2)),
        ("nf4", (slice(None), slice(0, 64))),
        ("int8_rowwise", slice(0, 64, 2)),
        ("int8_rowwise_2:4", (slice(None), slice(4, None))),
        ("int4_g32_2:4", (slice(None), slice(0, 40))),
        ("int3_g32_2:4", (slice(None), slice(8, 64))),
        ("fp8_128x128_2:4", slice(1, None)),
        ("bfloat16_2:4", (slice(None), slice(0, 12))),
    ],
)
def test_cuts_inside_a_block_are_refused(scheme, index):
    t = stored(scheme, 512, 256)
    with pytest.raises(ValueError, match="dequantize\\(\\) first"):
        t[index]


def test_where_weights_are_cut():
    """Whole blocks, whole bytes of codes, and of metadata, of which one is of eight columns; the last ones may fill none."""
    steps = {"int8_rowwise": 1, "int4_g32": 32, "int8_rowwise_2:4": 8, "int4_g32_2:4": 32, "bfloat16_2:4": 8}
    for name, step in steps.items():
        assert slicing.axis_step(stored(name, 64, 256), 1) == step
    with pytest.raises(ValueError, match="cut at multiples of 32"):
        stored("int3_g32_2:4", 64, 256).t()[:12]
    t = stored("bfloat16_2:4", 4, 28)
    assert same(t[:, 16:].dequantize(), t.dequantize()[:, 16:])
    assert torch.equal(torch.cat([t[:, :16], t[:, 16:]], 1), t)


@given(st.sampled_from(SPARSE_KINDS), st.booleans(), st.data())
def test_slices_of_sparse_weights(scheme, transposed, data):
    t, dense = pair(scheme, 256, 512)
    steps = slicing.axis_step(t, 0), slicing.axis_step(t, 1)
    cuts = [
        sorted(data.draw(st.tuples(*[st.integers(0, n // step)] * 2)))
        for n, step in zip((256, 512), steps, strict=True)
    ]
    (a, b), (c, d) = ([cut * step for cut in pair] for pair, step in zip(cuts, steps, strict=True))
    piece = t.t()[c:d, a:b].t() if transposed else t[a:b, c:d]
    assert same(piece.dequantize(), dense[a:b, c:d])
    assert piece.codes.shape == (b - a, (d - c) // 2 * min(t.scheme.format.bits, 8) // 8)
    assert piece.metadata.shape == (b - a, (d - c) // 8)


@pytest.mark.parametrize("scheme", STORED)
def test_split_and_chunk(scheme):
    t = stored(scheme, 512, 256)
    dense = t.dequantize()
    for ours, theirs in (
        (t.split(128), dense.split(128)),
        (t.chunk(2), dense.chunk(2)),
        (t.split([128, 384]), dense.split([128, 384])),
        (t.t().split(128, 1), dense.t().split(128, 1)),
    ):
        assert len(ours) == len(theirs)
        assert all(same(a.dequantize(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scheme", [name for name in STORED if name != "nf4"])
def test_experts(scheme):
    t = stored(scheme, 3, 128, 256)
    if scheme in KINDS:
        assert same(t.dequantize(), specified(numbers(scheme, 3, 128, 256), scheme))
    for index in range(3):
        assert same(t[index].dequantize(), t.dequantize()[index])
        assert same(t.mT[-index].dequantize(), t.dequantize().mT[-index])
    assert all(same(a.dequantize(), b) for a, b in zip(t.unbind(), t.dequantize().unbind(), strict=True))
    picked = torch.tensor([2, 0])
    if not scheme.startswith("fp8_128x128"):
        for made in (t.index_select(0, picked), t[picked], t.mT[picked].mT):
            assert same(made.dequantize(), t.dequantize()[picked])


def test_places_that_there_are_not():
    t = quantized(weight(3, 128, 256), "int8_rowwise")
    for index in (3, -4):
        with pytest.raises(IndexError):
            t.select(0, index)
    with pytest.raises(ValueError, match="must sum to 128"):
        t.split_with_sizes([64, 32], 1)


def test_experts_of_flat_blocks():
    t = quantized(weight(3, 128, 256), "nf4")
    assert same(t[1].dequantize(), t.dequantize()[1])
    numbers = torch.tensor([2, 1, 2])
    assert same(t.index_select(0, numbers).dequantize(), t.dequantize()[numbers])
    assert same(t[numbers].dequantize(), t.dequantize()[numbers])
    with pytest.raises(ValueError, match=r"index_select along axis 0 .* hold a multiple of 16384 elements"):
        quantized(weight(3, 8, 12), "nf4").index_select(0, numbers)
    with pytest.raises(ValueError, match="select along axis 1"):
        t.select(1, 0)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric", "fp8_128x128"])
def test_whole_blocks_along_any_axis(scheme):
    """As DTensor puts the pieces of strided shards in order; blocks that are cut are refused."""
    t = quantized(weight(2, 256, 256), scheme)
    for dim in (0, 1, 2):
        places = torch.arange(t.shape[dim]).view(2, -1).flip(0).reshape(-1)
        assert same(t.index_select(dim, places).dequantize(), t.dequantize().index_select(dim, places)), dim
    if scheme != "int8_rowwise":
        with pytest.raises(ValueError, match=r"index_select along axis 2 .* cut a block"):
            t.index_select(2, torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="of 256 elements: 256 to 256"):
        t.index_select(2, torch.tensor([256]))


@pytest.mark.parametrize("name", IN_ROWS)
def test_rows_and_masks(name):
    t, picked = stored(name, 8, 64), torch.tensor([7, 0, 7])
    dense = t.dequantize()
    assert same(t[picked].dequantize(), dense[picked])
    assert same(t.index_select(0, picked).dequantize(), dense[picked])
    for places in ((picked > 1).repeat(3)[:8], picked.view(1, 3), (slice(None), picked)):
        assert same(t[places], dense[places])
    assert same(t.t()[picked], dense.t()[picked])
    experts = stored(name, 3, 8, 64)
    with pytest.raises(ValueError, match="a vector of numbers"):
        experts[picked.view(1, 3)]


def test_rows_that_blocks_span():
    picked = torch.tensor([7, 0, 7])
    for t in (
        quantized(weight(8, 64), "int8_rowwise", axis=0),
        stored("fp8_128x128", 128, 128),
        stored("fp8_128x128_2:4", 128, 128),
    ):
        assert same(t[picked], t.dequantize()[picked])


def test_a_part_is_written_under_scales_of_its_own():
    rows, whole = quantized(weight(8, 64), "int8_rowwise"), quantized(weight(8, 64), "fp8_tensorwise")
    before = rows.dequantize(), whole.dequantize()
    rows[:2] = weight(2, 64, seed=1)
    assert same(rows[2:].dequantize(), before[0][2:])
    assert same(rows[:2].dequantize(), quantized(weight(2, 64, seed=1), "int8_rowwise").dequantize())
    for t, part in ((rows, rows[:, :32]), (whole, whole[:2])):
        kept = t.dequantize()
        with pytest.raises(ValueError, match=r"scale of .* also holds for the rest"):
            part.copy_(2 * part.dequantize())
        assert same(t.dequantize(), kept)
    whole[:] = weight(8, 64, seed=1)
    assert same(whole.dequantize(), quantized(weight(8, 64, seed=1), "fp8_tensorwise").dequantize())


@pytest.mark.parametrize("scheme", ["fp8_128x128", "fp8_1x128"])
def test_a_part_that_ends_inside_a_block_is_not_written(scheme):
    """The rest of the block would have another scale; the last block of a tensor may be a part of one."""
    t = quantized(weight(200, 256), scheme)
    before = t.dequantize()
    parts = (t[:4], t[:, :40], t[:132]) if scheme == "fp8_128x128" else (t[:, :40], t[:4, :130])
    for part in parts:
        with pytest.raises(ValueError, match=r"scale of .* also holds for the rest"):
            part.copy_(100 * weight(*part.shape, seed=1))
        assert same(t.dequantize(), before)
    t[128:] = weight(72, 256, seed=1)
    assert same(t[:128].dequantize(), before[:128])


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int8_rowwise_2:4"])
def test_copies_have_the_shape_of_their_target(scheme):
    for t in (stored(scheme, 64, 64), stored(scheme, 64, 64).t()):
        for shape in ((5,), (64, 32), (1, 64, 64)):
            with pytest.raises(ValueError, match="shapes must be the same"):
                t.copy_(torch.zeros(shape))


def test_2to4_is_cut_between_blocks_alone():
    t = stored("fp8_128x128_2:4", 256, 256)
    with pytest.raises(ValueError, match="cut a block"):
        t[:4]
    with pytest.raises(ValueError, match="needs codes and metadata"):
        type(t)({**t.parts, "metadata": None}, t.meta, t.shape)


def test_experts_stored_in_by_out():
    """Blocks along the contraction axis of (experts, in, out)."""
    dense = weight(3, 256, 64)
    t = quantized(dense, "int4_g32", axis=-2)
    assert same(t.dequantize(), specified(dense, "int4_g32", axis=-2))
    x = weight(3, 5, 256, seed=1)
    assert same(torch.bmm(x, t), torch.bmm(x, t.dequantize()))
    assert same(x[0] @ t[0], x[0] @ t.dequantize()[0])
    assert same(t[:, 64:128].dequantize(), t.dequantize()[:, 64:128])


@pytest.mark.parametrize("name", [name for name in STORED if name != "nf4"])
def test_cat_puts_pieces_together(name):
    t = stored(name, 256, 256)
    assert torch.equal(torch.cat(t.split(128)), t)
    assert torch.equal(torch.cat([t[:128], t[128:]], 0), t)
    assert torch.equal(torch.cat([t.t()[:, :128], t.t()[:, 128:]], dim=1), t.t())
    assert torch.equal(torch.cat([t[:, :128], t[:, 128:]], 1), t)


@pytest.mark.parametrize("scheme", ["nf4", "nvfp4", "fp8_tensorwise", "int8_rowwise"])
def test_pieces_under_one_scale_are_put_together(scheme):
    """Copies of the scale that all pieces share, as processes have them."""
    t = quantized(weight(256, 256), scheme)
    assert torch.equal(torch.cat([piece.clone() for piece in t.split(128)]), t)
    if scheme != "nf4":
        assert torch.equal(torch.cat([piece.clone() for piece in t.split(128, 1)], 1), t)


def test_cat_that_cannot_keep_the_scales_is_refused():
    def made(scheme, seed):
        return quantized(weight(32, 64, seed=seed), scheme)

    with pytest.raises(ValueError, match="its own scale"):
        torch.cat([made("int8_rowwise", 0), made("int8_rowwise", 1)], 1)
    with pytest.raises(ValueError, match="its own outer"):
        torch.cat([made("nvfp4", 0), made("nvfp4", 1)])
    with pytest.raises(ValueError, match="cuts blocks of 128"):
        torch.cat([made("fp8_128x128", 0)] * 2)
    with pytest.raises(ValueError, match="multiples of 8"):
        torch.cat([stored("bfloat16_2:4", 64, 12)] * 2, 1)
    with pytest.raises(ValueError, match="multiple of 16384"):
        torch.cat([made("nf4", 0)] * 2)
    with pytest.raises(ValueError, match="different recipes"):
        torch.cat([made("int8_rowwise", 0), made("fp8_rowwise", 0)])
    with pytest.raises(ValueError, match="different recipes"):
        torch.cat([made("int8_rowwise", 0), stored("int8_rowwise_2:4", 32, 64)])
    static = [
        quantized(weight(32, 64), "int8_rowwise", input_scales=Scales(torch.tensor(s))) for s in (0.5, 0.25)
    ]
    with pytest.raises(ValueError, match="its own input_scale"):
        torch.cat(static)
    with pytest.raises(TypeError, match="dense"):
        torch.cat([made("int8_rowwise", 0), weight(32, 64)])


@pytest.mark.parametrize("scheme", [*STORED, "int8_rowwise_asymmetric"])
def test_padding_adds_zeros_at_the_end(scheme):
    t = stored(scheme, 128, 256)
    pad = torch.nn.functional.pad
    assert same(pad(t, (0, 0, 0, 128)).dequantize(), pad(t.dequantize(), (0, 0, 0, 128)))
    assert same(pad(t, (0, 0, 0, 0)).dequantize(), t.dequantize())
    if scheme != "nf4":
        assert same(pad(t, (0, 128)).dequantize(), pad(t.dequantize(), (0, 128)))
        assert same(pad(t.t(), (0, 128)).dequantize(), pad(t.dequantize().t(), (0, 128)))
    for refused in ((1, 0), (0, 128, 0, 128), (0, -128)):
        with pytest.raises(ValueError, match="only zeros at the end of one axis"):
            pad(t, refused)
    with pytest.raises(ValueError, match="only zeros"):
        pad(t, (0, 0, 0, 128), value=1.0)


@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "nvfp4", "nf4"])
def test_new_tensors_have_scales_of_the_whole_tensor(scheme):
    """Copies, so that filling the new tensor leaves the old one alone."""
    t = quantized(weight(128, 256), scheme)
    for made in (torch.empty_like(t), t.new_zeros((0, 256))):
        for name in ("scale", "outer", "zero"):
            ours, theirs = getattr(t, name), getattr(made, name)
            if ours is not None and ours.dim() == 0:
                assert torch.equal(ours, theirs)
                assert ours.data_ptr() != theirs.data_ptr()


def test_a_cut_of_one_row_cuts_its_scale():
    t = quantized(weight(1, 64), "int8_rowwise")
    assert t[:0].scale.shape == (0, 1)
    assert same(t[:1].dequantize(), t.dequantize())


@pytest.mark.parametrize("name", STORED)
def test_inference_mode(name):
    """Torch sends composite operations whole there, and makes views of tensors from outside."""
    t = stored(name, 128, 256)
    x, dense = weight(4, 256, seed=1, dtype=t.dtype), t.dequantize()
    with torch.inference_mode():
        assert same(torch.cat([piece.dequantize() for piece in t.chunk(1)]), dense)
        assert same(t.t().dequantize(), dense.t())
        assert same(t.mT.dequantize(), dense.t())
        assert same(t.narrow(0, 0, 128).dequantize(), dense)
        assert same(x @ t.with_recipe(kernel="dequantize").t(), x @ dense.t())
        assert same(t.detach().clone().t().dequantize(), dense.t())


def test_memory_is_pinned_where_there_is_a_gpu():
    """The table passes it on to every part; without a GPU torch says why it cannot."""
    t = quantized(weight(32, 64), "int4_g32").cpu()
    assert not t.is_pinned()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"pin|CUDA|accelerator|NVIDIA"):
            t.pin_memory()
    else:
        assert t.pin_memory().codes.is_pinned()


def test_equal():
    t = quantized(weight(32, 64), "int4_g32_asymmetric")
    assert torch.equal(t, t.clone())
    assert not torch.equal(t, quantized(weight(32, 64, seed=1), "int4_g32_asymmetric"))
    assert not torch.equal(t, t.t())
    assert not torch.equal(t, t.dequantize())
    assert not torch.equal(t, t.with_recipe(kernel="reference"))
    sparse = stored("int8_rowwise_2:4", 8, 32)
    other = sparse.remade({**sparse.parts, "metadata": sparse.metadata ^ 0})
    assert torch.equal(sparse, other)
    other.metadata[0, 0] ^= 1
    assert not torch.equal(sparse, other)
    assert not torch.equal(sparse, sparse.to_layout("plain"))


def test_what_is_not_in_the_table_says_what_is():
    with pytest.raises(NotImplementedError, match=r"aten\.relu.*int4_g32.*dequantize\(\) it first"):
        quantized(weight(32, 64), "int4_g32").relu()


#: The variable of that process.
ALONE = "AO_LAB_TESTS_ALONE"


@pytest.mark.nightly
def test_every_operation_was_tested():
    """Runs last in this file: it met every entry of the table but those of layers, collectives and adapters (pinning
    needs a GPU).

    All of this file runs once more in a process of its own, since workers share the tests, and the night has some alone.
    """
    if ALONE not in os.environ:
        alone = "import os; [os.environ.pop(name) for name in [*os.environ] if name.startswith('PYTEST_')]; "
        alone += "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
        # Rewriting asserts warns of plugins that the process had imported before.
        options = [
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "--assert=plain",
            "-m",
            "nightly or not nightly",
        ]
        done = forks.python("-c", alone, *options, __file__, env={ALONE: "1"})
        assert done.returncode == 0, done.stdout[-3000:]
        return
    ours = {op for op in OPERATIONS if op.namespace == "ao_lab"}  # test_qat_lora compiles them
    values = {
        *READS,
        *AVERAGES,
        *CHANGES,
        *LISTS,
        aten.view.dtype,
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.div_.Tensor,
        aten.div_.Scalar,
    }  # values/
    bags = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}  # test_lookup_ops
    missing = set(OPERATIONS) - USED - LAYERS - COLLECTIVES - ours - values - bags
    # Reshape is taken apart before it arrives, except under inference mode's dispatch.
    assert missing <= {aten.reshape.default}
