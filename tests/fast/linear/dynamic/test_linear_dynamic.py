"""`linear_dynamic`: the same as quantizing first, in eager and traced, its gradient and errors, and where it is one launch."""

import pytest
import torch

import fast
from fast.kernels.fp8_skinny import host
from fast.matmul.dynamic import linear as module
from fast.matmul.dynamic.linear import is_one_launch, linear_dynamic
from fast.matmul.linear import linear_of_codes
from reference import SCHEMES

BF16 = torch.bfloat16


def operands(rows=3, n=64, k=256, scheme="fp8_rowwise", dtype=BF16):
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(count, k, generator=draw).to(dtype) for count in (rows, n))
    return x, fast.quantize(w, scheme, axis=-1), torch.randn(n, generator=draw).to(dtype)


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "int8_rowwise", "fp8_tensorwise"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_it_is_quantizing_first(scheme, dtype):
    x, w, bias = operands(scheme=scheme, dtype=dtype)
    wanted = linear_of_codes(fast.quantize(x, scheme, axis=-1), w, bias, dtype=dtype)
    assert torch.equal(linear_dynamic(x, scheme, w, bias), wanted)
    torch.compiler.reset()
    compiled = torch.compile(linear_dynamic, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, scheme, w, bias), wanted)


def test_the_bias_alone_has_a_gradient():
    x, w, bias = operands()
    bias.requires_grad_()
    linear_dynamic(x.requires_grad_(), "fp8_rowwise", w, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 3.0))
    assert x.grad is None
    assert not linear_dynamic(x, "fp8_rowwise", w).requires_grad


def test_operator():
    x, w, bias = operands()
    key = SCHEMES["fp8_rowwise"].key
    arguments = (x, w.codes, w.scale, bias.requires_grad_(), "fp8_rowwise", key)
    torch.library.opcheck(torch.ops.ao_lab.linear_dynamic.default, arguments)


def test_errors():
    x, w, bias = operands()
    with pytest.raises(ValueError, match=r"inputs in rows \(M, K\)"):
        linear_dynamic(x[None], "fp8_rowwise", w)
    with pytest.raises(ValueError, match="bias"):
        linear_dynamic(x, "fp8_rowwise", w, bias[:3])
    with pytest.raises(TypeError, match="takes torch tensors, got list"):
        linear_dynamic([1.0], "fp8_rowwise", w)
    with pytest.raises(TypeError):
        linear_dynamic(x, "fp8_rowwise", x)
    with pytest.raises(ValueError, match="scheme"):
        linear_dynamic(x, "fp8_rowwice", w)
    w.scale.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient for the scales"):
        linear_dynamic(x, "fp8_rowwise", w)


def test_where_it_is_one_launch(monkeypatch):
    monkeypatch.setattr(host, "has_compiler", lambda: True)
    monkeypatch.setattr(host, "gains", lambda *_: True)
    is_one_launch.cache_clear()
    own, other = SCHEMES["fp8_rowwise"].key, SCHEMES["fp8_tensorwise"].key
    assert is_one_launch(1, own, own, (4096, 4096))
    assert not is_one_launch(17, own, own, (4096, 4096))
    assert not is_one_launch(1, other, own, (4096, 4096))
    is_one_launch.cache_clear()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert not is_one_launch(1, own, own, (4096, 4096))
    is_one_launch.cache_clear()
