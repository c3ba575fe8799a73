"""Experts by number (`ao_lab.tensor.experts.gathered`): as the dense experts by number, in products and everywhere else."""

import copy
import io

import pytest
import torch

from ao_lab.tensor import QuantizedTensor, slicing
from ao_lab.tensor.experts import gathered
from ao_lab.tensor.experts.gathered import Gathered
from ao_lab.tensor.quantized_tensor import quantized

NUMBERS = torch.tensor([3, 0, 3, -1, 1])


def experts(scheme="int4_g32", shape=(4, 64, 128)):
    return quantized(torch.randn(shape, generator=torch.Generator().manual_seed(0)), scheme)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def no_copies(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError("experts are copied")

    monkeypatch.setattr(slicing, "select_rows", refused)


@pytest.mark.parametrize("scheme", ["int4_g32", "nf4", "mxfp4", "fp8_rowwise"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inference", [False, True])
def test_products(no_copies, scheme, rows, inference):
    """From both sides and both ways round; nothing is copied."""
    w = experts(scheme)
    with torch.inference_mode(inference):
        check_products(w, rows)


def check_products(w, rows):
    dense, x, z = w.dequantize()[NUMBERS], random(5, rows, 128), random(5, rows, 64)
    for made, wanted in (
        (torch.bmm(x, w[NUMBERS].mT), torch.bmm(x, dense.mT)),
        (torch.bmm(w[NUMBERS], x.mT), torch.bmm(dense, x.mT)),
        (torch.bmm(z, w[NUMBERS]), torch.bmm(z, dense)),
        (w.mT[NUMBERS] @ z.mT, dense.mT @ z.mT),
    ):
        torch.testing.assert_close(made, wanted)


def test_a_weight_that_was_multiplied_is_copied_and_replaced_as_any():
    w, x = experts(), random(5, 1, 128)
    torch.bmm(x, w[NUMBERS].mT)
    copied, other = copy.deepcopy(w), quantized(random(4, 64, 128), "int4_g32")
    copied.copy_(other)
    w.data = other
    for t in (copied, w):
        torch.testing.assert_close(torch.bmm(x, t[NUMBERS].mT), torch.bmm(x, other.dequantize()[NUMBERS].mT))


def test_products_have_gradients(no_copies):
    w, x = experts(), random(5, 1, 128).requires_grad_()
    with torch.inference_mode():
        torch.bmm(x, w[NUMBERS].mT)
    torch.bmm(x, w[NUMBERS].mT).sum().backward()
    torch.testing.assert_close(x.grad, w.dequantize()[NUMBERS].sum(1, keepdim=True))


@pytest.mark.parametrize("scheme", ["int4_g32", "nf4", "nvfp4"])
def test_all_else_sees_the_parts(scheme):
    w = experts(scheme, (4, 128, 128))
    dense, found = w.dequantize()[NUMBERS], w[NUMBERS]
    assert type(found) is Gathered
    assert torch.equal(found.dequantize(), dense)
    assert torch.equal(found[2].dequantize(), dense[2])
    assert torch.equal(found.mT.dequantize(), dense.mT)
    assert torch.equal(found.clone().dequantize(), dense)
    assert torch.equal(copy.deepcopy(found).dequantize(), dense)
    assert torch.equal(found[NUMBERS].dequantize(), dense[NUMBERS])
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is QuantizedTensor
    assert torch.equal(loaded.dequantize(), dense)


def test_few_are_copied_where_no_kernel_multiplies_groups(monkeypatch):
    """Two of four: less than all made dense."""
    w, x = experts(), random(2, 1, 128)
    assert type(w[NUMBERS[:2]]) is QuantizedTensor
    monkeypatch.setattr(gathered, "groups_reason", lambda w, dtype: None)
    assert type(w[NUMBERS[:2]]) is Gathered
    torch.testing.assert_close(torch.bmm(x, w[NUMBERS[:2]].mT), torch.bmm(x, w.dequantize()[NUMBERS[:2]].mT))


def test_numbers_are_those_of_the_gather():
    w, numbers, x = experts(), NUMBERS.clone(), random(5, 1, 128)
    found = w[numbers]
    numbers.fill_(0)
    torch.testing.assert_close(torch.bmm(x, found.mT), torch.bmm(x, w.dequantize()[NUMBERS].mT))
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            w[torch.tensor([0, 1, 2, wrong])]
    assert w[NUMBERS[:0]].shape == (0, 64, 128)


@pytest.mark.parametrize("many", [1, 5])
def test_blocks_that_span_experts(many):
    """NF4 of experts that are no whole number of its blocks: products and values as any; parts there are none."""
    w, numbers, x = experts("nf4", (4, 8, 12)), NUMBERS[:many], random(many, 1, 12)
    dense = w.dequantize()[numbers]
    assert torch.equal(w[numbers].dequantize(), dense)
    assert torch.equal(w[numbers].mT.dequantize(), dense.mT)
    torch.testing.assert_close(torch.bmm(x, w[numbers].mT), torch.bmm(x, dense.mT))
    with pytest.raises(ValueError, match="no block spans it"):
        w[numbers].clone()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.bmm(x, w[numbers].mT), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.bmm(x, dense.mT))
