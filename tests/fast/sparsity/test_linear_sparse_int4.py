"""`fast.linear_sparse_int4` of CPU tensors: the reference's bits, gradients by the dense weight, compiled programs."""

import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.sparsity import linear_sparse_int4 as ops
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.sparsity.cases import as_tensors, exact_case, random_case, zero_points


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_results_are_those_of_the_reference(dtype, storage):
    case = as_tensors(random_case(3, 8, 128, 64, dtype, storage))
    assert_same_bits(fast.linear_sparse_int4(*case), reference.linear_sparse_int4(*case))
    assert_same_bits(
        fast.linear_sparse_int4(case.x[0], *case[1:4]), reference.linear_sparse_int4(case.x[0], *case[1:4])
    )


def test_gradients_are_products_with_the_dense_weight():
    case = as_tensors(exact_case(3, 8, 128, 64))
    x, bias = case.x.requires_grad_(), case.bias.requires_grad_()
    y = fast.linear_sparse_int4(x, *case[1:4], bias)
    g = torch.randint(-2, 3, y.shape).to(y.dtype)
    y.backward(g)
    w = fast.dequantize(sparse_int4_weight(*case[1:4]))
    assert_same_bits(x.grad, (g.float() @ w).to(x.dtype))
    assert_same_bits(bias.grad, g.float().sum(0).to(bias.dtype))
    with pytest.raises(NotImplementedError, match="scales of a stored weight"):
        fast.linear_sparse_int4(x, *case[1:3], case.scale.requires_grad_()).sum().backward()


def test_zero_points():
    """The reference's bits, gradients by the dense weight, the operators, compiled programs."""
    case = exact_case(3, 8, 128, 64)
    case, zero = as_tensors(case), torch.from_numpy(zero_points(case))
    wanted = reference.linear_sparse_int4(*case, zero)
    assert_same_bits(fast.linear_sparse_int4(*case, zero=zero), wanted)
    run = torch.compile(
        lambda x: fast.linear_sparse_int4(x, *case[1:], zero), fullgraph=True, backend="eager"
    )
    assert_same_bits(run(case.x), wanted)
    w = fast.dequantize(sparse_int4_weight(*case[1:4], zero))
    assert_same_bits(torch.ops.ao_lab.sparse_int4_dense(*case[1:4], torch.bfloat16, zero), w.bfloat16())
    x = case.x.requires_grad_()
    y = fast.linear_sparse_int4(x, *case[1:], zero)
    g = torch.randint(-2, 3, y.shape).to(y.dtype)
    y.backward(g)
    assert_same_bits(x.grad, (g.float() @ w).to(x.dtype))
    operator = torch.ops.ao_lab.linear_sparse_int4
    assert set(torch.library.opcheck(operator, (x, *case[1:], zero)).values()) == {"SUCCESS"}


def test_compiled_programs():
    case = as_tensors(random_case(3, 8, 128, 64))
    run = torch.compile(lambda x: fast.linear_sparse_int4(x, *case[1:]) * 2, fullgraph=True, backend="eager")
    assert_same_bits(run(case.x), fast.linear_sparse_int4(*case) * 2)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        fast.linear_sparse_int4(case.x[:, :64], *case[1:])
    with pytest.raises(TypeError, match="takes torch tensors"):
        fast.linear_sparse_int4(case.x.float().numpy(), *case[1:])


def test_operators_by_themselves():
    case = as_tensors(exact_case(3, 8, 128, 64))
    operator = torch.ops.ao_lab.linear_sparse_int4
    results = torch.library.opcheck(operator, (case.x.requires_grad_(), *case[1:]))
    assert set(results.values()) == {"SUCCESS"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = (*case[1:4], dtype)
        assert set(torch.library.opcheck(torch.ops.ao_lab.sparse_int4_dense, given).values()) == {"SUCCESS"}
        wanted = fast.dequantize(sparse_int4_weight(*case[1:4])).to(dtype)
        assert_same_bits(torch.ops.ao_lab.sparse_int4_dense(*given), wanted)


def test_a_bias_in_float64_is_the_references():
    """On a GPU torch would round it to the input's dtype before it is added, which the reference does not."""
    case = as_tensors(random_case(3, 8, 128, 64))
    assert ops._kernel(None, (), (*case[:4], case.bias.double()), None) is None
