"""Which functions a call of `ao_lab` reaches: those of `fast` for torch tensors, however the arguments are passed."""

import pytest
import torch

import ao_lab

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ao_lab.fake_quantize(scheme="int8_rowwise", x=x),
        lambda x: ao_lab.rms_norm(eps=1e-6, weight=torch.ones(64), x=x)[0],
        lambda x: ao_lab.swiglu(up=X.half(), gate=x.half()),
    ],
)
def test_gradients_flow_whatever_the_order_of_keywords(call):
    """The reference has no autograd: a tensor that reaches it loses its gradient."""
    x = X.clone().requires_grad_()
    call(x).float().sum().backward()
    assert x.grad is not None
