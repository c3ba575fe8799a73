"""Copies, comparisons and new tensors in 2:4 storage, and what holds them: modules, files, compilers, processes."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_lab import Recipe, SparseQuantizedTensor, quantized, quantized_compressed
from ao_lab.tensor.slicing import axis_step
from reference import SCHEMES, Scales
from tests.support.quantized_weights import SPARSE_KINDS, pair, pruned, same

aten = torch.ops.aten


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_copies(scheme):
    t, dense = pair(scheme, 128, 256)
    for made in (
        t.detach(),
        t.clone(),
        copy.deepcopy(t),
        aten.alias(t),
        aten.lift_fresh(t),
        pickle.loads(pickle.dumps(t)),
    ):
        assert isinstance(made, SparseQuantizedTensor)
        assert torch.equal(made, t)
        assert same(made.dequantize(), dense)
    assert t.detach().metadata.data_ptr() == t.metadata.data_ptr()
    assert t.clone().metadata.data_ptr() != t.metadata.data_ptr()
    single = t.to(torch.float32)
    assert single.dtype == torch.float32
    assert torch.equal(single.codes.view(torch.uint8), t.codes.view(torch.uint8))
    assert {part.device.type for part in t.to("meta").parts.values() if part is not None} == {"meta"}
    with pytest.raises(TypeError, match="floating-point"):
        t.to(torch.int32)


def test_equal_looks_at_the_metadata():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    other = t.remade({**t.parts, "metadata": t.metadata ^ 0})
    assert torch.equal(t, other)
    other.metadata[0, 0] ^= 1
    assert not torch.equal(t, other)
    assert not torch.equal(t, t.to_layout("plain"))


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_copy_into(scheme):
    first, second = pair(scheme, 128, 256)[0], pair(scheme, 128, 256, seed=1)[0]
    t = first.clone()
    assert torch.equal(t.copy_(second), second)
    t.copy_(pruned(128, 256))
    assert torch.equal(t, first)
    turned = first.t().clone()
    turned.copy_(pruned(128, 256, seed=1).t())
    assert torch.equal(turned, second.t())
    dense = torch.empty(128, 256, dtype=torch.bfloat16)
    assert same(dense.copy_(first), first.dequantize())


def test_copies_that_are_refused_change_nothing():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    before = t.clone()
    for source, message in (
        (torch.ones(8, 32), "prune first"),
        (torch.zeros(8, 64), "must be the same"),
        (quantized(pruned(8, 32), "int8_rowwise"), "a dense one into 2:4"),
        (quantized_compressed(pruned(8, 32), "fp8_rowwise"), "must be the same"),
        (
            quantized_compressed(pruned(8, 32), "int8_rowwise", input_scales=Scales(torch.tensor(0.5))),
            "input_scale",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            t.copy_(source)
    with pytest.raises(ValueError, match="into a dense one"):
        quantized(pruned(8, 32), "int8_rowwise").copy_(t)
    assert torch.equal(t, before)


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_new_tensors_are_zeros_of_the_scheme(scheme):
    t, _ = pair(scheme, 128, 256)
    made = (torch.empty_like(t), torch.zeros_like(t), t.new_zeros((256, 512)), torch.zeros_like(t.t()))
    for one, shape in zip(made, ((128, 256), (128, 256), (256, 512), (256, 128)), strict=True):
        assert isinstance(one, SparseQuantizedTensor)
        assert same(one.dequantize(), torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32", "fp8_tensorwise", "bfloat16", "nvfp4"])
def test_padding(scheme):
    t, dense = pair(scheme, 96, 256)
    padded = torch.nn.functional.pad(t, (0, 0, 0, 32))
    assert isinstance(padded, SparseQuantizedTensor)
    assert same(padded.dequantize(), torch.nn.functional.pad(dense, (0, 0, 0, 32)))
    with pytest.raises(ValueError, match="only zeros at the end"):
        torch.nn.functional.pad(t, (0, 0, 2, 0))


def test_powers_of_two():
    t, dense = pair("int8_rowwise", 8, 32)
    t.mul_(4.0)
    assert same(t.dequantize(), dense * 4)
    plain, dense = pair("bfloat16", 8, 32)
    plain.mul_(0.3)
    assert same(plain.dequantize(), dense * 0.3)


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_files(scheme):
    t, _ = pair(scheme, 128, 256)
    file = io.BytesIO()
    torch.save({"w": nn.Parameter(t.t(), requires_grad=False)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["w"]
    assert isinstance(found, nn.Parameter)
    assert torch.equal(found, t.t())


def test_parts_and_orientation_of_earlier_pickles():
    """Pickles of dense tensors had no metadata; the axis of 2:4 ones said which way round they were read."""
    dense = quantized(pruned(8, 32), "int8_rowwise")
    rebuild, (parts, *others) = dense.__reduce_ex__(2)
    parts.pop("metadata")
    assert torch.equal(rebuild(parts, *others), dense)
    t = quantized_compressed(pruned(8, 32), "int8_rowwise").t()
    rebuild, (parts, fields, *others) = t.__reduce_ex__(2)
    assert torch.equal(rebuild(parts, {**fields, "axis": -2, "transposed": False}, *others), t)


def test_modules():
    layer = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    layer.weight = nn.Parameter(t, requires_grad=False)
    other = copy.deepcopy(layer)
    other.weight.copy_(pruned(8, 32, seed=1))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, t)
    assert layer.to(torch.float32).weight.dtype == torch.float32
    other.weight.data = quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise")
    assert torch.equal(other.weight, quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise"))
    with pytest.raises(TypeError, match="SparseQuantizedTensor, not QuantizedTensor"):
        other.weight.data = quantized(pruned(8, 32), "int8_rowwise")
    shared = t.clone().share_memory_()
    assert shared.metadata.is_shared()


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric", "bfloat16"])
def test_compiled_programs(scheme):
    torch._dynamo.reset()
    t, dense = pair(scheme, 16, 64)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    program = torch.compile(torch.nn.functional.linear, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert same(program(x, t), torch.nn.functional.linear(x, dense))
        other, other_dense = pair("fp8_rowwise", 16, 64)
        assert same(program(x, other), torch.nn.functional.linear(x, other_dense))


def test_hashes_tell_storages_apart():
    t = quantized_compressed(pruned(8, 32), "int8_rowwise")
    same_again = quantized_compressed(pruned(8, 32, seed=1), "int8_rowwise")
    dense = quantized(pruned(8, 32), "int8_rowwise")
    assert t._stable_hash_for_caching() == same_again._stable_hash_for_caching()
    others = (dense, t.t(), t.to(torch.float32), quantized_compressed(pruned(8, 64), "int8_rowwise"))
    assert t._stable_hash_for_caching() not in {one._stable_hash_for_caching() for one in others}


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_products(scheme):
    t, dense = pair(scheme, 128, 256)
    x, bias = torch.randn(5, 256, dtype=torch.bfloat16), torch.randn(128, dtype=torch.bfloat16)
    linear = torch.nn.functional.linear
    assert same(linear(x, t, bias), linear(x, dense, bias))
    with torch.no_grad():
        assert same(linear(x, t, bias), linear(x, dense, bias))
    with torch.inference_mode():
        assert same(linear(x, t), linear(x, dense))
    assert same(x @ t.t(), x @ dense.t())
    assert same(t @ x.t(), dense @ x.t())
    assert same(torch.mv(t, x[0]), torch.mv(dense, x[0]))
    windows = torch.randn(2, 3, 4, 256, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    assert same(linear(windows.requires_grad_(), t), linear(windows.contiguous(), dense))


def test_quantized_inputs_are_those_of_the_dense_layer():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"], kernel="dequantize")
    w, x = pruned(16, 64), torch.randn(3, 64, dtype=torch.bfloat16)
    t, dense = quantized_compressed(w, recipe), quantized(w, recipe)
    assert same(torch.nn.functional.linear(x, t), torch.nn.functional.linear(x, dense))
    reference_recipe = dense.with_recipe(kernel="reference")
    assert same(
        torch.nn.functional.linear(x, t.with_recipe(kernel="reference")),
        torch.nn.functional.linear(x, reference_recipe),
    )


@pytest.mark.parametrize("kernel", ["int8", "scaled_mm", "fused"])
def test_kernels_of_dense_codes_do_not_take_it(kernel):
    element = "int8_rowwise" if kernel == "int8" else "fp8_rowwise"
    activation = None if kernel == "fused" else SCHEMES[element]
    t = quantized_compressed(pruned(16, 64), Recipe(weight=SCHEMES[element], activation=activation))
    with pytest.raises(
        ValueError, match=f"kernel '{kernel}' does not take.*stored as .out, in.*dequantize, reference"
    ):
        torch.nn.functional.linear(torch.randn(3, 64, dtype=torch.bfloat16), t.with_recipe(kernel=kernel))


def test_adapters_multiply_it_in_compiled_programs_too():
    from ao_lab.qat import lora

    t, dense = pair("int8_rowwise", 16, 64)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for linear in (lora.frozen_linear, torch.compile(lora.frozen_linear, backend="aot_eager")):
        inputs = x.clone().requires_grad_()
        y = linear(inputs, t, None)
        assert same(y, torch.nn.functional.linear(x, dense))
        y.sum().backward()
        assert same(inputs.grad, torch.ones(3, 16, dtype=torch.bfloat16) @ dense)


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
    rows, columns = (128 if scheme == "fp8_128x128" else 1), axis_step(t, 1)
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
    assert axis_step(t, 1) == step
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
    with pytest.raises(TypeError, match="and a dense tensor"):
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
