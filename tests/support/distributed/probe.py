"""A probe in two processes, under DistributedDataParallel and under FSDP2."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ao_lab import Probe
from ao_lab.probe.candidates import output_error
from reference.probe import errors
from reference.training.recipe import RECIPES
from tests.ao_lab.probe.test_probe import data, network


def joins():
    """Both ways to spread a model."""
    for spread in (DistributedDataParallel, sharded):
        _check(spread, network())


def sharded(model):
    for layer in (model.mlp[0], model.mlp[2]):
        fully_shard(layer)
    return fully_shard(model)


def _check(spread, model):
    weight = copy.deepcopy(model.mlp[0].weight.detach())
    wrapped = spread(model)
    probe = Probe(wrapped, ["rowwise"], every=2, tokens=64, gradients=True)
    mine = data(3, 32, seed=dist.get_rank())
    for x in mine:
        with probe.step():
            wrapped(x).square().mean().backward()
    probe.gather()
    report = probe.report()
    told = [None, None]
    dist.all_gather_object(told, report.to_json())
    assert told[0] == told[1]
    name = next(line.name for line in report.sites if line.name.endswith("down"))
    sample = probe.samples[name]
    rows = {one.numpy().tobytes() for one in torch.cat([mine[0], mine[2]])}
    own = sum(one.numpy().tobytes() in rows for one in sample.x)
    # Of 128 tokens 64, half of them expected from each process; five deviations of 2.8 (hypergeometric).
    assert (sample.count, len(sample.x)) == (128, 64)
    assert 32 - 15 < own < 32 + 15
    line = next(one for one in report.sites if one.name.endswith("mlp.0"))
    x = probe.samples[line.name].x
    found = errors.norm_ratio(
        output_error(RECIPES["rowwise"], x, weight).numpy(), (x.double() @ weight.double().T).numpy()
    )
    assert line.candidates["rowwise"].norm_ratio == found
    assert line.candidates["rowwise"].noise.samples == 4
