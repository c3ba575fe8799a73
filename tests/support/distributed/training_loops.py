"""One process of a group: loops of other libraries around layers that train by a recipe; run by tests/ao_lab/training.

    python -m tests.support.distributed.ranks training_loops.run RANKS

Prints "equal" where each does what the table in tests/ao_lab/training/test_loops.py states.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ao_lab
from ao_lab.training.layers import LowPrecisionLinear

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def model(recipe="tensorwise", *, converted=True, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    if converted:
        ao_lab.convert_for_training_(net, recipe, **options)
    return net


def train(net, steps=2):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().sum().backward()
        optimizer.step()
    return net


def check_fsdp1():
    """Trains as one process does; with weights as codes it says that it cannot."""
    truth = train(model()).state_dict()
    for original in (False, True):
        wrapped = train(
            FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=original)
        )
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
            found = wrapped.state_dict()
        assert all(torch.equal(found[name], t) for name, t in truth.items()), original
        assert len(ao_lab.convert_from_training_(wrapped)) == 2
        net = model(fsdp_float8_all_gather=True)
        refused = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=original)
        try:
            refused(X)
        except ValueError as error:
            assert "FSDP1" in str(error)  # noqa: PT017
        else:
            raise AssertionError(original)


def check_dcp():
    """What a sharded converted model saves a plain one loads, and the layers become plain ones that stay sharded."""
    for gathered in (False, True):
        net = model(fsdp_float8_all_gather=gathered)
        for layer in (net[0], net[2]):
            fully_shard(layer)
        fully_shard(net)
        net(X).sum().backward()
        plain = model(converted=False)
        state = {name: torch.zeros_like(t) for name, t in plain.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(net.state_dict(), checkpoint_id=folder)
            dcp.load(state, checkpoint_id=folder)
        assert all(torch.equal(state[name], t) for name, t in plain.state_dict().items()), gathered
        if not gathered:
            assert ao_lab.convert_from_training_(net) == ("0", "2")
            assert isinstance(net[0], FSDPModule)
            assert not isinstance(net[0], LowPrecisionLinear)
            assert torch.equal(net(X), plain(X))


def check_ddp():
    """Random bits are those of one process under the same generator."""
    grads = []
    for wrap in (lambda net: net, DistributedDataParallel):
        net = wrap(model("mxfp4"))
        torch.manual_seed(2)
        net(X).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
        assert len(ao_lab.convert_from_training_(net)) == 2
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def run():
    check_fsdp1()
    check_dcp()
    check_ddp()
