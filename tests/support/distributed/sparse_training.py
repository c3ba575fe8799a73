"""Two processes that train a model by FSDP2, its linear layers sparse; run by test_sharding of tests/ao_lab/sparsity/training.

    python -m tests.support.distributed.ranks sparse_training.run RANKS

Prints "equal" where outputs, weights and masks of every step are those of one process.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ao_lab
from ao_lab import SparseTrainingConfig

WHOLE = StateDictOptions(full_state_dict=True)

#: Ranks have 10 rows each, a cut through tiles.
SIZES = (16, 20, 12)
#: Rows of the last layer where tiles are not asked for: one rank has one more.
UNEVEN = 13
CONFIGS = (
    SparseTrainingConfig(),
    SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.1),
    SparseTrainingConfig(masks="recomputed", every=2, transposable=True, gradient="straight-through"),
    SparseTrainingConfig(warmup=1, cooldown=1, steps=4),
)


class Block(nn.Module):
    """Layers that are sharded together, so that their classes stay."""

    def __init__(self, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(SIZES[0], SIZES[1]), nn.Linear(SIZES[1], outputs)

    def forward(self, x):
        return self.last(self.first(x).relu())


def made(config):
    torch.manual_seed(0)
    model = nn.Sequential(Block(SIZES[2] if config.transposable else UNEVEN))
    ao_lab.sparsify_(model, config)
    return model


def sharded(model, **options):
    many = copy.deepcopy(model)
    fully_shard(many[0], **options)
    return fully_shard(many, **options)


def inputs(step):
    return torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(step))


def steps_equal(config):
    """Four steps of AdamW with weight decay, then plain layers."""
    one = made(config)
    many = sharded(one)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1) for model in (one, many)]
    for step in range(4):
        outputs = [model(inputs(step)) for model in (one, many)]
        assert torch.equal(*outputs), (config, step)
        for y, optimizer in zip(outputs, optimizers, strict=True):
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ao_lab.step_sparsity_(one) == ao_lab.step_sparsity_(many)
        same(one, many, config)
    many(inputs(0)).sum().backward()
    optimizers[1].step()
    with pytest.raises(RuntimeError, match="called twice"):
        optimizers[1].step()
    one(inputs(0)).sum().backward()
    optimizers[0].step()
    ao_lab.finish_sparsity_(many)
    ao_lab.finish_sparsity_(one)
    assert type(many[0].first) is nn.Linear
    same(one, many, config)


def same(one, many, config):
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(b.full_tensor(), a), (config, name)
    for (name, a), b in zip(one.named_buffers(), many.buffers(), strict=True):
        assert torch.equal(a, b), (config, name)


def saved(config):
    """Whole files of training, and of a dense model, into shards: what one process has after loading them."""
    one = made(config)
    for step in range(2):
        one(inputs(step)).square().sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.05).step()
        one.zero_grad()
        ao_lab.step_sparsity_(one)
    many = sharded(made(config))
    set_model_state_dict(many, one.state_dict(), options=WHOLE)
    same(one, many, config)
    got = get_model_state_dict(many, options=WHOLE)
    assert list(got) == list(one.state_dict())
    assert all(torch.equal(got[name], value) for name, value in one.state_dict().items())
    torch.manual_seed(7)
    dense = nn.Sequential(Block(one[0].last.out_features)).state_dict()
    one.load_state_dict(dense)
    many.load_state_dict({name: split(value, many, name) for name, value in dense.items()})
    same(one, many, config)


def split(value, model, name):
    like = model.get_parameter(name)
    return distribute_tensor(value, like.device_mesh, like.placements)


def master_weights():
    """Masks are those of the float32 shards, not of the bfloat16 that is gathered: here they differ."""
    config = SparseTrainingConfig(masks="recomputed", gradient="straight-through")
    one = made(config)
    with torch.no_grad():
        tied = 1 + torch.tensor([1.0, 2.0, 3.0, 4.0]) * 2**-12
        one[0].first.weight.copy_(tied.repeat(SIZES[1], SIZES[0] // 4))
    many = sharded(one, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ao_lab.step_sparsity_(many)
    assert many[0].first.sparse_mask[0, :4].tolist() == [False, False, True, True]
    many(inputs(0)).float().sum().backward()


def refused():
    """Layers that are distributed already, and those that are sharded by themselves."""
    config = SparseTrainingConfig()
    with pytest.raises(ValueError, match=r"before fully_shard"):
        ao_lab.sparsify_(fully_shard(nn.Sequential(nn.Linear(8, 8))), config)
    split_up = made(config)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(split_up[0], mesh, {"first": ColwiseParallel(use_local_output=False)})
    with pytest.raises(TypeError, match="Tensor parallelism has no sparse layers"):
        split_up(inputs(0))
    alone = made(config)
    fully_shard(alone[0].first)
    with pytest.raises(TypeError, match=r"0\.first was given to fully_shard by itself"):
        ao_lab.finish_sparsity_(alone)


def run():
    for config in CONFIGS:
        steps_equal(config)
        saved(config)
    master_weights()
    refused()
