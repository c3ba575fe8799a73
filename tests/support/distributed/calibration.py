"""Two or four processes that calibrate together; run by tests/ao_lab/calibration/test_ranks.py."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ao_lab import (
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerTensor,
    SchemeConfig,
    quantize_,
)
from ao_lab.calibration.methods import AWQ, GPTQ, AutoRound, Clip, Smooth
from ao_lab.calibration.ranks import DistributedBatches
from tests.ao_lab.calibration.test_experts import routed
from tests.ao_lab.calibration.test_run import INT4, assert_same, inputs, stack

CASES = {
    "weights": (stack, INT4, (AWQ(ratios=4), Clip(), GPTQ())),
    "experts": (routed, INT4, (GPTQ(damping=0.1),)),
    "inputs": (stack, Int8DynamicActivationInt8WeightConfig(), (Smooth(), GPTQ())),
    "static": (stack, Int8StaticActivationInt8WeightConfig(granularity=PerTensor()), (Clip(),)),
}
SHARES = 4


def only_blocks(module, name):
    return isinstance(module, nn.Linear) and name.startswith("blocks")


def mine(batches):
    """This rank's run of them."""
    count = len(batches) // dist.get_world_size()
    return batches[dist.get_rank() * count :][:count]


def alone():
    """A group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def same_bits(folder, *names):
    """All ranks together, and each alone with all data and as many shares; a folder of blocks is written once."""
    own, batches = alone(), inputs(SHARES, sequences=3)
    for name in names:
        make, config, methods = CASES[name]
        together, single = make(), make()
        resume = os.path.join(folder, name) if name in ("weights", "static") else None
        given = {"filter_fn": only_blocks, "methods": methods}
        first = quantize_(
            together, config, calibration=DistributedBatches(mine(batches), SHARES), resume=resume, **given
        )
        second = quantize_(single, config, calibration=DistributedBatches(batches, SHARES, own), **given)
        assert_same(together, single)
        assert str(first) == str(second), name
        if resume is not None:
            again = make()
            quantize_(
                again, config, calibration=DistributedBatches(mine(batches), SHARES), resume=resume, **given
            )
            assert_same(again, single)


def refusals(folder):
    """An error of one rank is one of all; what cannot be is refused on all, and nothing has changed."""
    batches, model = mine(inputs(4)), stack()
    if dist.get_rank() == 1:
        batches[0][0, 0, 0] = torch.nan
    kind, said = (
        (ValueError, "NaN") if dist.get_rank() == 1 else (RuntimeError, "another rank, rank 1: ValueError")
    )
    with pytest.raises(kind, match=said):
        quantize_(model, INT4, calibration=DistributedBatches(batches), methods=(GPTQ(),))
    batches = mine(inputs(4))
    for given, methods, said in (
        (DistributedBatches(batches[: 1 + dist.get_rank()]), (GPTQ(),), "the same number of batches"),
        (DistributedBatches(batches, 3), (GPTQ(),), "a power of two that the number of ranks, 2, divides"),
        (
            DistributedBatches(batches),
            (AutoRound(steps=1),),
            "AutoRound learns from the batches of one process",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            quantize_(model, INT4, calibration=given, methods=methods)
    config = Int8StaticActivationInt8WeightConfig(granularity=PerTensor(), statistic="moving_average")
    with pytest.raises(ValueError, match="MovingAverage of several ranks depends on the order"):
        quantize_(model, config, only_blocks, calibration=DistributedBatches(batches), methods=(Clip(),))
    assert all(map(torch.equal, model.parameters(), stack().parameters()))
    config = SchemeConfig(scheme="int4_g32")
    report = quantize_(model, config, only_blocks, calibration=DistributedBatches(batches), methods=(Clip(),))
    assert report.changed[0].calibrated.tokens + report.changed[0].calibrated.held_out == 4 * 4 * 16
