"""Muon: torch's steps bit for bit in bfloat16, the same rule in float32, and no slow products on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.models import train
from experiments.models.muon import Muon, orthogonal
from tests.experiments.harness import tiny

SHAPES = ((8, 24), (24, 8), (16, 16), (1, 5))
OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(make, steps=4):
    """The parameters after some steps on the gradients of one seed; the last parameter never has one."""
    parameters, generator = matrices(), torch.Generator().manual_seed(1)
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters[:-1]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_in_bfloat16_are_torchs_bit_for_bit(nesterov):
    options = {**OPTIONS, "nesterov": nesterov}
    ours, made = stepped(lambda given: Muon(given, dtype=torch.bfloat16, **options))
    theirs, peer = stepped(lambda given: torch.optim.Muon(given, **options))
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    state = made.state_dict()["state"], peer.state_dict()["state"]
    assert state[0].keys() == state[1].keys()
    assert all(torch.equal(state[0][n]["momentum_buffer"], state[1][n]["momentum_buffer"]) for n in state[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    kept = x.clone()
    y = orthogonal(x, (3.4445, -4.7750, 2.0315), 5, eps=1e-7, dtype=torch.float32)
    assert torch.equal(x, kept)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    values = torch.linalg.svdvals(y)
    # The polynomial holds values that have grown past 0.3 inside [0.68, 1.14]; smaller ones are on their way there.
    assert values.max() < 1.2
    assert values[: max(1, min(shape) // 2)].min() > 0.6


def test_the_loss_of_a_closure_comes_back():
    (parameter,) = matrices()[:1]
    optimizer = Muon([parameter], dtype=torch.float32, **OPTIONS)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(parameter, before)


def test_other_adjustments_are_refused():
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        Muon(matrices(), dtype=torch.float32, adjust_lr_fn="match_rms_adamw", **OPTIONS)


class Products(TorchDispatchMode):
    """Notes the dtypes of every matrix product."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("mm", "linear", "matmul", "attention")):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("further", [False, True])
def test_training_on_a_cpu_multiplies_in_float32_alone(further):
    settings = tiny.replace(tiny.TRAIN, start=tiny.TRAIN, matrix_rate=None) if further else tiny.TRAIN
    begun = train.LanguageModel(tiny.TRAIN.model) if further else None
    with Products() as seen:
        train.train(settings, tiny.corpus(), "cpu", begun)
    assert seen.dtypes == {torch.float32}
