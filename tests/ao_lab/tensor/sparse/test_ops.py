"""Copies, comparisons and new tensors in 2:4 storage, and what holds them: modules, files, compilers, processes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ao_lab import QuantizedTensor, Recipe, SparseQuantizedTensor, quantized, quantized_compressed
from ao_lab.tensor.metadata import PARTS
from ao_lab.tensor.op_registry import OPERATIONS
from ao_lab.tensor.sparse.registry import SPARSE_OPERATIONS
from ao_lab.tensor.value_ops import AVERAGES, CHANGES, LISTS, READS
from reference import SCHEMES, Scales
from tests.support.quantized_weights import COLLECTIVES, SPARSE_KINDS, pair, pruned, same

aten = torch.ops.aten
#: Operations of the common table that take whole parts, or the dense equivalent, as they find them.
COMMON = {
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.clone.default, aten._to_copy.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.as_strided.default, aten.is_pinned.default, aten._pin_memory.default,
    aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default, aten.baddbmm.default, aten.linear.default,
    aten._grouped_mm.default,
    torch.ops._c10d_functional.wait_tensor.default, torch.ops._c10d_functional._wrap_tensor_autograd.default,
}  # fmt: skip
#: Of the values: computed of the dequantized weight, for which tests/ao_lab/tensor/values has 2:4 weights too.
VALUES = {*READS, *CHANGES, *AVERAGES, *LISTS, aten.view.dtype}


def test_every_operation_is_decided():
    """An operation that is added to the common table is looked at here: it cuts parts, or takes them whole."""
    of_torch = {one for one in OPERATIONS if one.namespace != "ao_lab"}
    assert of_torch == COMMON | VALUES | set(SPARSE_OPERATIONS)
    assert not COMMON & set(SPARSE_OPERATIONS)
    assert set(SPARSE_OPERATIONS) >= COLLECTIVES - COMMON


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
        (torch.zeros(8, 64), "shapes must be the same"),
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


def test_pickles_of_dense_tensors_have_no_metadata():
    """What was written before there was 2:4 storage is read as it was: the parts of a dense tensor are the same."""
    dense = quantized(pruned(8, 32), "int8_rowwise")
    assert "metadata" not in PARTS
    assert "metadata" not in dense.__reduce_ex__(2)[1][0]
    assert type(pickle.loads(pickle.dumps(dense))) is QuantizedTensor


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


def test_adapters_multiply_it_outside_of_compiled_programs():
    """Their operator of traced programs has places for the parts of a dense weight alone."""
    from ao_lab.qat import lora as autograd

    t, dense = pair("int8_rowwise", 16, 64)
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = autograd.FrozenLinear.apply(x, t, None)
    assert same(y, torch.nn.functional.linear(x, dense))
    y.sum().backward()
    assert same(x.grad, torch.ones(3, 16, dtype=torch.bfloat16) @ dense)
    with pytest.raises(NotImplementedError, match=r"outside of torch\.compile"):
        torch.ops.ao_lab.frozen_linear(x.detach(), t, None)
