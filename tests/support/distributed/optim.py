"""Two processes that train with low-bit states, by FSDP2 and by DDP; run by tests/ao_lab/optim/test_base.py.

All ranks have the same data, so gradients are those of one process, and so must parameters and states be, bit for bit: random
bits are keyed by the place in the whole parameter, blocks end with its rows.
"""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ao_lab.optim import AdamW8bit
from fast.optim import update


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 65))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def sharded(seed=0):
    model = model_of(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, AdamW8bit(model.parameters(), lr=1e-2)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same_model(model, single):
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert torch.equal(whole(mine.detach()), theirs), name


def same_states(optimizer, single):
    pairs = zip(optimizer.param_groups[0]["params"], single.param_groups[0]["params"], strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        for name, value in single.state[theirs].items():
            assert torch.equal(whole(optimizer.state[mine][name]), value), (number, name)


def states(folder):
    """FSDP2 and DDP have the bits of one process; a checkpoint goes on with them, and whole states are those of one process."""
    update.LEAST = 1 << 30  # compiled loops have the same bits
    single = model_of()
    alone = AdamW8bit(single.parameters(), lr=1e-2)
    model, optimizer = sharded()
    train(single, alone, 3)
    train(model, optimizer, 3)
    same_model(model, single)
    same_states(optimizer, alone)
    replicated = DistributedDataParallel(model_of())
    train(replicated, AdamW8bit(replicated.parameters(), lr=1e-2), 3)
    same_model(replicated.module, single)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    again, resumed = sharded(1)
    model_state, optimizer_state = get_state_dict(again, resumed)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(again, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    same_model(again, single)
    same_states(resumed, alone)
    train(single, alone, 2, 3)
    train(again, resumed, 2, 3)
    same_model(again, single)
    same_states(resumed, alone)

    full = get_optimizer_state_dict(again, resumed, options=StateDictOptions(full_state_dict=True))["state"]
    for name, p in single.named_parameters():
        for key, value in alone.state[p].items():
            assert torch.equal(full[name][key], value), (name, key)
    assert copy.deepcopy(resumed.state_dict())["param_groups"][0]["low_bit"]["states"] == "8bit"
