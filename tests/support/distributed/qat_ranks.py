"""Two processes that train a model by FSDP2, its linear layers prepared; run by test_qat_sharding.

    python tests/support/distributed/qat_ranks.py RANKS

Prints "equal" where outputs and gradients are those of one process.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ao_lab
from ao_lab import QATConfig, quantize_
from tests.support.distributed.ranks import start_ranks

#: Adapters of the model's own dtype: FSDP2 reduces the gradients of one group in one dtype.
LORA = ao_lab.LoRA(rank=4, dtype=torch.float32)
CASES = (
    (ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), {}),
    (ao_lab.Int4WeightOnlyConfig(group_size=32), {"learn_scales": True}),
    (ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(), {"start_step": 1}),
    (ao_lab.Int8DynamicActivationInt8WeightConfig(kernel="int8"), {}),
    (ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), {"lora": LORA}),
    (ao_lab.Int4WeightOnlyConfig(group_size=32), {"lora": replace(LORA, rounds="sum")}),
)


def compare(config, options):
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128))
    quantize_(one, QATConfig(config, **options))
    many = copy.deepcopy(one)
    for layer in (many[0], many[2]):
        fully_shard(layer)
    fully_shard(many)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        expected, got = one(x), many(x)
        assert torch.equal(got, expected), config
        expected.square().sum().backward()
        got.square().sum().backward()
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            if a.grad is None:
                assert b.grad is None
                continue
            # The same gradient on every rank, averaged over the ranks.
            assert torch.equal(b.grad.full_tensor(), a.grad), (config, name)
        for both in (one, many):
            both.zero_grad()
            ao_lab.advance_qat(both)
    with pytest.raises(TypeError, match=r"0\.weight is distributed"):
        quantize_(many, QATConfig(config, step="convert"))


def run():
    for config, options in CASES:
        compare(config, options)


if __name__ == "__main__":
    start_ranks(run)
