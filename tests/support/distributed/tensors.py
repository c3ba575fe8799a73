"""What ranks do with weights that are quantized, adapted, prepared or 2:4: collectives, DDP, FSDP2, tuning.

Each function raises where outputs, gradients, weights and the gathered state are not those of one process.
"""

import copy
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ao_lab
from ao_lab import QATConfig, QuantizedTensor, SchemeConfig, SparseQuantizedTensor, quantize_
from ao_lab.gemm.choices import choices_for, path_of
from tests.support.quantized_weights import pair

UNEQUAL = ("int4_g32_asymmetric", "fp8_tensorwise", "nvfp4", "int8_rowwise")
SCHEMES = ("int4_g32_asymmetric", "fp8_tensorwise", "nvfp4", "nf4")


class Adapted(nn.Module):
    """A frozen layer and what trains beside it."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(scheme):
    torch.manual_seed(0)
    made = nn.Sequential(Adapted(256), nn.SiLU(), Adapted(256))
    quantize_(made, SchemeConfig(scheme=scheme), lambda module, name: name.endswith("base"))
    return made


def compare_unequal(scheme, mesh):
    """Rows that the ranks do not divide, and fewer rows than ranks."""
    for rows in (9, 1):
        one = nn.Sequential(nn.Linear(256, rows))
        quantize_(one, SchemeConfig(scheme=scheme))
        many = copy.deepcopy(one)
        fully_shard(many[0], mesh=mesh)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            assert torch.equal(many(x), one(x)), (scheme, rows)
        many[0].reshard()
        whole = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(whole["0.weight"], one[0].weight), (scheme, rows)


def fsdp():
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for scheme in SCHEMES:
        compare_fsdp(scheme, mesh)
    for scheme in UNEQUAL:
        compare_unequal(scheme, mesh)


def compare_fsdp(scheme, mesh):
    one = adapted(scheme)
    many = copy.deepcopy(one)
    for layer in (many[0], many[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(many, mesh=mesh)
    shard = many[0].base.weight.to_local()
    assert shard.codes.shape[0] == one[0].base.weight.codes.shape[0] // mesh.size(), scheme
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        expected, got = one(x), many(x)
        assert torch.equal(got, expected), scheme
        expected.square().sum().backward()
        got.square().sum().backward()
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            if a.requires_grad:
                # The same gradient on every rank, averaged over the ranks.
                assert torch.equal(b.grad.full_tensor(), a.grad), (scheme, name)
        for both in (one, many):
            both.zero_grad()


CONFIGS = (
    ao_lab.Int8WeightOnlyConfig(),
    ao_lab.Int4WeightOnlyConfig(group_size=32),
    ao_lab.NVFP4WeightOnlyConfig(),
    ao_lab.NF4WeightOnlyConfig(),
    ao_lab.SchemeConfig(scheme="fp8_128x128"),
    ao_lab.Float8DynamicActivationFloat8WeightConfig(),
)
LORA = ao_lab.LoRA(rank=4, dtype=torch.float32)


def ddp_model(seed, dtype=torch.float32):
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
    """All plain tensors of a ddp_model, quantized weights as their parts."""
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


def ddp():
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for config in CONFIGS:
            net = ddp_model(rank, dtype)
            quantize_(net, config, lambda module, name: name in ("1", "3"))
            trains_alike(different(net), f"{config} {dtype}")
    for options in ({}, {"lora": LORA}):
        net = ddp_model(rank)
        config = ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)
        quantize_(net, QATConfig(config, **options), lambda module, name: name in ("1", "3"))
        trains_alike(different(net), f"QAT {options}")
    transposed()


def trains_alike(net, name):
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


def check_gathered(scheme):
    t, _ = pair(scheme, 64, 128)
    piece = t.chunk(dist.get_world_size())[dist.get_rank()].clone()
    assert torch.equal(all_gather_tensor(piece, 0, dist.group.WORLD), t)


def check_in_place(scheme):
    t, _ = pair(scheme, 64, 128)
    mine = t.clone() if dist.get_rank() == 0 else pair(scheme, 64, 128, seed=1)[0]
    dist.broadcast(mine, 0)
    assert torch.equal(mine, t)


def check_placed(scheme):
    t, _ = pair(scheme, 64, 128)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(t, mesh, [Shard(0)])
    assert isinstance(shard.to_local(), SparseQuantizedTensor)
    assert torch.equal(shard.full_tensor(), t)
    if scheme != "int8_rowwise":
        return
    assert torch.equal(shard.redistribute(mesh, [Replicate()]).to_local(), t)


def check_fully_sharded(scheme):
    t, dense = pair(scheme, 64, 128)
    layer = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(t, requires_grad=False)
    fully_shard(layer)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(layer(x), torch.nn.functional.linear(x, dense))


def sparse():
    for scheme in ("int8_rowwise", "int4_g32", "bfloat16"):
        check_in_place(scheme)
        check_gathered(scheme)
        check_placed(scheme)
        check_fully_sharded(scheme)


#: Adapters of the model's own dtype: FSDP2 reduces the gradients of one group in one dtype.
QAT_LORA = ao_lab.LoRA(rank=4, dtype=torch.float32)
QAT_CASES = (
    (ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), {}),
    (ao_lab.Int4WeightOnlyConfig(group_size=32), {"learn_scales": True}),
    (ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(), {"start_step": 1}),
    (ao_lab.Int8DynamicActivationInt8WeightConfig(kernel="int8"), {}),
    (ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), {"lora": QAT_LORA}),
    (ao_lab.Int4WeightOnlyConfig(group_size=32), {"lora": replace(QAT_LORA, rounds="sum")}),
)


def compare_qat(config, options):
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


def qat():
    for config, options in QAT_CASES:
        compare_qat(config, options)


def tuned(folder):
    """A layer that all have, and one that is this rank's alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["AO_LAB_CACHE"] = f"{folder}/{rank}"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32 * (rank + 1)))
    ao_lab.convert_for_training_(model, "rowwise")
    made = ao_lab.tune(model, torch.randn(16, 64))
    all_made = [None] * ranks
    dist.all_gather_object(all_made, made.choices)
    assert all(one == made.choices for one in all_made), "ranks differ"
    assert {c.problem.n for c in made.choices if c.problem.direction == "output"} == {64, 32}
    assert set(choices_for(torch.device("cpu"))) == set(made.choices)
    assert path_of(torch.device("cpu")).exists() == (rank == 0), "rank 0 alone writes"
