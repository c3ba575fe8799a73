"""The public functions of `ao_lab` on torch tensors have the answers of `fast`'s, whatever the situation.

Which functions a call of `ao_lab` reaches: those of `fast` for torch tensors, however the arguments are passed.
"""

import pytest
import torch

import ao_lab
from tests.support.situations import EXAMPLES, SITUATIONS, walk

#: Of `ao_lab` it takes tables that are tensors, as `quantize_` makes them.
OF_TENSORS = ("embedding_bag",)
#: What `ao_lab` exports of these functions.
OFFERED = [name for name in EXAMPLES if hasattr(ao_lab, name.partition(",")[0]) and name not in OF_TENSORS]


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "fullgraph"])
@pytest.mark.parametrize("example", OFFERED)
def test_the_answer_is_that_of_fast(example, situation):
    assert list(walk(example, situation, f=ao_lab)) == []


def test_most_functions_are_offered():
    assert {"quantize", "dequantize", "fake_quantize", "encode", "pack", "matmul"} <= set(OFFERED)


@pytest.mark.parametrize("example", ["quantize", "dequantize", "fake_quantize", "encode"])
def test_programs_are_one_graph(example):
    assert list(walk(example, "fullgraph", f=ao_lab)) == []


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
