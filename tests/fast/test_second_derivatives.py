"""Layers whose gradients have none of their own."""

import pytest
import torch
from torch import nn

import ao_lab
import fast

INT8 = ao_lab.Int8WeightOnlyConfig()


def fake_quantized(model):
    model[0].register_forward_hook(lambda module, args, y: fast.fake_quantize(y, "int8_rowwise"))


CHANGES = {
    "training": lambda model: ao_lab.convert_for_training_(model, "rowwise"),
    "QAT": lambda model: ao_lab.quantize_(model, ao_lab.QATConfig(INT8, step="prepare")),
    "LoRA": lambda model: ao_lab.quantize_(
        model, ao_lab.QATConfig(INT8, step="prepare", lora=ao_lab.LoRA(rank=2))
    ),
    "sparse": lambda model: ao_lab.sparsify_(model, ao_lab.SparseTrainingConfig()),
    "fake_quantize": fake_quantized,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_a_linear_loss_are_no_constants(change):
    """The gradient that arrives is one: torch's own decorator would leave the weight's part out, without a word."""
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    change(model)
    x = torch.randn(2, 64).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no second derivatives.* before quantize_"):
        dx.square().sum().backward()
    model(x).sum().backward()
