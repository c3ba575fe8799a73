"""Two processes under DistributedDataParallel, the model's weights quantized, adapted or prepared; run by test_collectives.

    python tests/support/distributed/ddp_ranks.py RANKS

Each rank begins with other weights. Prints "equal" where afterwards all have those of rank 0, bit for bit, and train alike.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ao_lab
from ao_lab import QATConfig, QuantizedTensor, quantize_
from tests.support.distributed.ranks import start_ranks

CONFIGS = (
    ao_lab.Int8WeightOnlyConfig(),
    ao_lab.Int4WeightOnlyConfig(group_size=32),
    ao_lab.NVFP4WeightOnlyConfig(),
    ao_lab.NF4WeightOnlyConfig(),
    ao_lab.SchemeConfig(scheme="fp8_128x128"),
    ao_lab.Float8DynamicActivationFloat8WeightConfig(),
)
LORA = ao_lab.LoRA(rank=4, dtype=torch.float32)


def model(seed, dtype=torch.float32):
    """Two layers to be quantized, a norm and a head that stay and are trained, an embedding."""
    torch.manual_seed(seed)
    layers = (
        nn.Embedding(128, 128),
        nn.Linear(128, 256),
        nn.LayerNorm(256),
        nn.Linear(256, 128),
        nn.Linear(128, 8),
    )
    return nn.Sequential(*layers).to(dtype)


def tensors(net):
    """All plain tensors of a model, quantized weights as their parts."""
    for name, parameter in net.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            yield from (
                (f"{name}.{part}", value) for part, value in parameter.parts.items() if value is not None
            )
        else:
            yield name, parameter.detach()


def check_same_everywhere(net):
    for name, value in tensors(net):
        every = [torch.empty_like(value.reshape(-1).view(torch.uint8)) for _ in range(dist.get_world_size())]
        dist.all_gather(every, value.reshape(-1).view(torch.uint8))
        assert all(torch.equal(one, every[0]) for one in every), name


def different(net):
    """Fails where ranks begin alike: the check would prove nothing."""
    first = next(value for _, value in tensors(net)).reshape(-1).view(torch.uint8)
    every = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(every, first)
    assert len(every) == 1 or not torch.equal(every[0], every[1])
    return net


def under_ddp():
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for config in CONFIGS:
            net = model(rank, dtype)
            quantize_(net, config, lambda module, name: name in ("1", "3"))
            run(different(net), f"{config} {dtype}")
    for options in ({}, {"lora": LORA}):
        net = model(rank)
        config = ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)
        quantize_(net, QATConfig(config, **options), lambda module, name: name in ("1", "3"))
        run(different(net), f"QAT {options}")
    transposed()


def run(net, name):
    rank = dist.get_rank()
    steps_before = [value.clone() for _, value in tensors(net)]
    parallel = DistributedDataParallel(net)
    check_same_everywhere(net)
    if rank == 0:
        assert all(torch.equal(a, b) for a, (_, b) in zip(steps_before, tensors(net), strict=True)), name
    steps = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    quantized = {key for key, p in net.named_parameters() if isinstance(p, QuantizedTensor)}
    before = {key: value.clone() for key, value in tensors(net)}
    for step in range(2):
        ids = torch.randint(0, 128, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        parallel(ids).float().square().mean().backward()
        steps.step()
        steps.zero_grad()
    check_same_everywhere(net)
    changed = {key for key, value in tensors(net) if not torch.equal(before[key], value)}
    assert changed, name
    assert not any(key.rsplit(".", 1)[0] in quantized for key in changed), (name, changed)


def transposed():
    """A weight that is stored the other way round, as transformers' Conv1D has it, beside a dense one."""
    torch.manual_seed(dist.get_rank())
    net = nn.Module()
    net.weight = nn.Parameter(ao_lab.quantized(torch.randn(64, 32), "int8_rowwise").t(), requires_grad=False)
    net.bias = nn.Parameter(torch.randn(8))
    DistributedDataParallel(net)
    check_same_everywhere(net)
    assert net.weight.shape == (32, 64)


if __name__ == "__main__":
    start_ranks(under_ddp)
