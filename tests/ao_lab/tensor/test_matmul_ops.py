"""Products with a `QuantizedTensor` and lookups in one give the bits that the dequantized tensor gives."""

import pytest
import torch
from torch.nn import functional

from ao_lab import QuantizedTensor, Recipe, quantized
from reference import SCHEMES
from tests.support.linear_cases import ROUNDOFF, distance_allowed
from tests.support.quantized_weights import (
    DEVICES,
    KINDS,
    LAYERS,
    STORED,
    numbers,
    recorded_operations,
    same,
    specified,
    stored,
    weight,
)

USED = set()


def dequantizing(t):
    """The tensor under the one kernel whose bits are those of the dequantized weight, on every device."""
    return t.with_recipe(kernel="dequantize")


@pytest.fixture(autouse=True, params=DEVICES)
def _recorded_on_every_device(request, monkeypatch):
    with torch.device(request.param), recorded_operations(monkeypatch, USED):
        yield


@pytest.mark.parametrize("activation", [None, "fp8_rowwise"])
def test_grouped_products(activation):
    """Tokens sorted by expert, as mixtures of experts multiply them."""
    recipe = Recipe(weight=SCHEMES["mxfp8_e4m3"], activation=activation and SCHEMES[activation])
    t = quantized(weight(3, 64, 128), recipe)
    x, ends = weight(10, 128, seed=1), torch.tensor([4, 4, 10], dtype=torch.int32)
    inputs = x if activation is None else specified(x, activation)
    made = torch._grouped_mm(x, t.mT, offs=ends)
    assert same(made, torch._grouped_mm(inputs, t.dequantize().mT, offs=ends))
    with pytest.raises(ValueError, match="does not support grouped matmuls"):
        torch._grouped_mm(x, t.with_recipe(kernel="reference").mT, offs=ends)
    with pytest.raises(TypeError, match="first operand"):
        torch._grouped_mm(t, x.view(1, 10, 128).mT, offs=ends)


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_that_of_the_dequantized_weight(scheme, bias):
    """With the kernel that dequantizes, which on a CPU is the one that is chosen."""
    dense = numbers(scheme, 128, 256)
    x, added = (
        weight(2, 7, 256, seed=1, dtype=dense.dtype),
        weight(128, seed=2, dtype=dense.dtype) if bias else None,
    )
    t = dequantizing(stored(scheme, 128, 256))
    value = specified(dense, scheme) if scheme in KINDS else t.dequantize()
    assert same(functional.linear(x, t, added), functional.linear(x, value, added))
    with torch.no_grad():
        assert same(functional.linear(x, t, added), functional.linear(x, value, added))
    with torch.inference_mode():
        assert same(functional.linear(x, t, added), functional.linear(x, value, added))
        # Past `__torch_function__`, where inference mode keeps the operation whole.
        assert same(torch.ops.aten.linear.default(x, t, added), functional.linear(x, value, added))
    half = x.to(torch.bfloat16)
    assert same(functional.linear(half, t), functional.linear(half, t.dequantize(torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", KINDS)
def test_linear_is_inside_the_bound(scheme, dtype):
    """The kernel that is chosen, on whatever device, for a row and for some."""
    t = quantized(weight(128, 256), scheme)
    for rows in (1, 7, 200):
        x, added = weight(rows, 256, seed=1, dtype=dtype), weight(128, seed=2, dtype=dtype)
        wanted, allowed = distance_allowed(x, t.quantized, added)
        # Where nothing is fused, the weight is rounded to the inputs' dtype.
        narrowed = ROUNDOFF[dtype] * (x.double().abs() @ t.dequantize(torch.float32).double().abs().t())
        allowed = allowed + (1 + ROUNDOFF[dtype]) * narrowed
        with torch.no_grad():
            assert ((functional.linear(x, t, added).double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("scheme", STORED)
def test_products(scheme):
    t = dequantizing(stored(scheme, 128, 256))
    x, value = weight(5, 128, seed=1, dtype=t.dtype), t.dequantize()
    assert same(x @ t, x @ value)
    assert same(t @ x.new_ones(256, 3), value @ x.new_ones(256, 3))
    assert same(torch.addmm(value[0], x, t), torch.addmm(value[0], x, value))
    assert same(
        torch.addmm(x.new_ones(5, 256), x, t, alpha=2), torch.addmm(x.new_ones(5, 256), x, value, alpha=2)
    )
    assert same(t @ t.t(), value @ value.t())
    assert same(t @ x.new_ones(256), value @ x.new_ones(256))
    assert same(functional.linear(x.new_ones(256), t), functional.linear(x.new_ones(256), value))
    batch = dequantizing(quantized(weight(2, 128, 256), "int8_rowwise"))
    y = weight(2, 5, 128, seed=3)
    assert same(torch.bmm(y, batch), torch.bmm(y, batch.dequantize()))
    assert same(y @ batch, y @ batch.dequantize())
    added = y.new_ones(2, 5, 256)
    assert same(torch.baddbmm(added, y, batch), torch.baddbmm(added, y, batch.dequantize()))


@pytest.mark.parametrize("scheme", STORED)
def test_gradient_of_the_input(scheme):
    t = dequantizing(stored(scheme, 128, 256))
    gradients = []
    for w in (t, t.dequantize()):
        x = weight(6, 256, seed=1, dtype=t.dtype).requires_grad_()
        functional.linear(x, w).square().sum().backward()
        gradients.append(x.grad)
    assert same(*gradients)


#: Inputs of a layer that are no matrix in memory: windows of images, channels first, one input repeated.
NO_MATRICES = {
    "permuted": lambda: weight(2, 3, 4, 256, seed=1).permute(0, 2, 1, 3),
    "channels first": lambda: weight(2, 256, 3, seed=1).transpose(1, 2),
    "repeated": lambda: weight(1, 3, 1, 256, seed=1).expand(2, 3, 4, 256),
}


@pytest.mark.parametrize("inputs", NO_MATRICES.values(), ids=NO_MATRICES)
@pytest.mark.parametrize("scheme", [*KINDS, "int8_rowwise_2:4", "int4_g32_asymmetric_2:4"])
def test_inputs_that_are_no_matrix_in_memory(scheme, inputs):
    """With gradients torch repeats the weight for them. It is one matrix still: the bits are those of contiguous inputs, or
    torch's own where blocks are of the flattened tensor, which is made dense."""
    t = stored(scheme, 128, 256)
    flat = bool(t.scheme.scale.flat_size)
    made = []
    for w, x in ((t, inputs()), (t.dequantize(), inputs()) if flat else (t, inputs().contiguous())):
        x = x.detach().requires_grad_()
        y = functional.linear(x, w)
        y.square().sum().backward()
        made.append((y, x.grad, x @ w.t()))
    assert all(same(*pair) for pair in zip(*made, strict=True))


def test_a_repeated_weight_is_made_dense_once(monkeypatch):
    t, shapes, original = quantized(weight(128, 256), "int8_rowwise"), [], QuantizedTensor.dequantize
    t = t.with_recipe(kernel="dequantize")
    monkeypatch.setattr(
        QuantizedTensor, "dequantize", lambda x, *given: shapes.append(x.shape) or original(x, *given)
    )
    functional.linear(weight(4, 300, 256).transpose(0, 1).requires_grad_(), t)
    assert shapes == [(256, 128)]


@pytest.mark.parametrize("scheme", STORED)
def test_embedding(scheme):
    t = stored(scheme, 128, 256)
    index = torch.tensor([[0, 5, 127], [5, 5, 1]])
    assert same(functional.embedding(index, t), functional.embedding(index, t.dequantize()))
    assert same(functional.embedding(index, t, padding_idx=5), functional.embedding(index, t.dequantize()))


@pytest.mark.parametrize("scheme", ["int8_rowwise", "nvfp4"])
def test_embedding_dequantizes_only_the_rows_it_needs(monkeypatch, scheme):
    t, shapes, original = quantized(weight(128, 256), scheme), [], QuantizedTensor.dequantize
    monkeypatch.setattr(
        QuantizedTensor, "dequantize", lambda x, *given: shapes.append(x.shape) or original(x, *given)
    )
    functional.embedding(torch.tensor([[3], [7]]), t)
    assert shapes == [(2, 256)]


@pytest.mark.parametrize("scheme", STORED)
def test_a_weight_times_a_batch(scheme):
    """W @ x with a batch of x, as Mamba does with a layer's weight: torch repeats the matrix, and multiplies batches."""
    t = dequantizing(stored(scheme, 64, 128))
    x = weight(3, 128, 5, seed=1, dtype=t.dtype)
    assert same(t @ x, t.dequantize().expand(3, 64, 128) @ x)
    repeated = t.expand(2, 3, 64, 128)
    assert same(
        repeated.dequantize() if isinstance(repeated, QuantizedTensor) else repeated,
        t.dequantize().expand(2, 3, 64, 128),
    )
    with pytest.raises(ValueError, match="only to its own shape"):
        t.expand(3, 128, 128)


def test_a_weight_with_quantized_inputs_times_a_batch():
    t, x = weight(64, 128), weight(3, 128, 5, seed=1)
    made = quantized(t, Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["fp8_rowwise"]))
    rounded = specified(x.mT.contiguous(), "fp8_rowwise")
    assert same(made @ x, torch.bmm(rounded, made.dequantize().expand(3, 64, 128).mT).mT)
    flat = quantized(t, Recipe(weight=SCHEMES["nf4"], activation=SCHEMES["fp8_rowwise"]))
    with pytest.raises(ValueError, match="blocks are of the flattened tensor"):
        flat.expand(3, 64, 128)


def test_every_operation_was_tested():
    """By these tests, run once more: others may have run in another process."""
    test_grouped_products(None)
    test_linear_is_that_of_the_dequantized_weight("int8_rowwise", True)
    test_products("int8_rowwise")
    test_embedding("int8_rowwise")
    test_a_weight_times_a_batch("int8_rowwise")
    assert set() == LAYERS - USED
