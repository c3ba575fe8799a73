"""Two processes that try loops of torch.distributed with every kind of quantized layer; run by test_loops.

    python -m tests.support.distributed.ranks loops.run RANKS DIRECTORY [KIND ...]

Prints "equal" where each pair has the answer that `ANSWERS` has of it: "right" (the weights, outputs and gradients of one
process), or the words of an error, which both ranks meet.
"""

import copy
import re
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ao_lab
from ao_lab import QuantizedTensor
from tests.support.distributed.tensors import Adapted

KINDS = {
    "int8 weight-only": ao_lab.Int8WeightOnlyConfig,
    "int4 weight-only": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int8 dynamic": ao_lab.Int8DynamicActivationInt8WeightConfig,
    "int8 static": lambda: ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05)),
    "fp8 dynamic": ao_lab.Float8DynamicActivationFloat8WeightConfig,
    "mxfp8": lambda: ao_lab.SchemeConfig(scheme="mxfp8_e4m3"),
    "nvfp4": ao_lab.NVFP4WeightOnlyConfig,
    "nf4": lambda: ao_lab.SchemeConfig(scheme="nf4"),
    "2:4": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32, sparsity="2:4"),
}
WIDTH = 256
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
#: (loop, kind): the words of the error where the answer is not "right". NF4 has its blocks in the flattened tensor.
ANSWERS = {
    (
        "rows of the input",
        "nf4",
    ): "axis 1 in nf4: pieces hold a multiple of 16384 elements of the flattened tensor"
}


def model(kind):
    """Two frozen quantized layers, adapters beside them."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(WIDTH), nn.SiLU(), Adapted(WIDTH))
    if kind == "2:4":
        ao_lab.sparsify_(net, ao_lab.SparsityConfig("2:4"), bases)
    if kind is not None:
        ao_lab.quantize_(net, KINDS[kind](), bases)
    return net


def bases(module, name):
    return name.endswith("base")


def inputs():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def fsdp1(net, joined=False):
    return FullyShardedDataParallel(net, use_orig_params=not joined, device_id=torch.device("cpu"))


def fsdp2(net):
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def compiled(net):
    return torch.compile(fsdp2(net), backend="aot_eager")


#: They take seconds to compile and to import, and are left out where kinds are named.
COMPILED, ACCELERATE = NIGHTLY = ("FSDP2, compiled", "FSDP2, filled by accelerate")
WRAPPERS = {
    "FSDP1": fsdp1,
    "FSDP1, joined": lambda net: fsdp1(net, joined=True),
    "FSDP2": fsdp2,
    COMPILED: compiled,
    "DDP": DistributedDataParallel,
    "no wrapper": lambda net: net,
}


def trains(kind, wrap):
    """Outputs, gradients of adapters where the wrapper shows them, and the same again after them."""
    one = model(kind)
    many = wrap(copy.deepcopy(one))
    for _ in range(2):
        wanted, got = one(inputs()), many(inputs())
        assert torch.equal(got, wanted), "outputs"
        wanted.square().sum().backward()
        got.square().sum().backward()
    if isinstance(many, FullyShardedDataParallel):
        return
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(whole(b.grad), a.grad, rtol=1e-5, atol=1e-5), "gradients"


def states(kind, wrap, folder):
    """A state that was saved, read on two ranks and on one, set whole, and set from rank 0, which alone has it."""
    one = model(kind)
    many = wrap(copy.deepcopy(one))
    wanted = one.state_dict()
    dcp.save(get_model_state_dict(many), checkpoint_id=folder)
    for load in (read, set_whole, set_from_rank_0):
        clear(many.parameters())
        load(many, wanted, folder)
        check_state(many, wanted, load.__name__)
    alone = model(kind).state_dict()
    clear(alone.values())
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(value, wanted[name]) for name, value in alone.items()), "one rank"
    dense = wrap(model(None))  # takes the values of quantized weights
    set_from_rank_0(dense, wanted, folder)
    check_state(dense, {name: numbers(value) for name, value in wanted.items()}, "dense")


def read(many, wanted, folder):
    state = get_model_state_dict(many)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(many, state)


def set_whole(many, wanted, folder):
    set_model_state_dict(many, dict(wanted), options=FULL)


def set_from_rank_0(many, wanted, folder):
    set_model_state_dict(many, dict(wanted) if dist.get_rank() == 0 else {}, options=FROM_RANK_0)


def check_state(many, wanted, what):
    found = get_model_state_dict(many, options=FULL)
    assert found.keys() == wanted.keys(), what
    assert all(torch.equal(whole(value), wanted[name]) for name, value in found.items()), what


def clear(tensors):
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        for part in local.parts.values() if isinstance(local, QuantizedTensor) else [local]:
            if part is not None:
                part.zero_()


def numbers(value):
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def from_accelerate(kind):
    """Shards on the meta device that accelerate fills from rank 0, as `fsdp_cpu_ram_efficient_loading` does."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    one, first = model(kind), SimpleNamespace(is_main_process=dist.get_rank() == 0)
    many = fsdp2(copy.deepcopy(one).to("meta"))
    fsdp2_load_full_state_dict(first, many, one.state_dict() if first.is_main_process else {})
    check_state(many, one.state_dict(), "accelerate")
    assert [p.requires_grad for p in many.parameters()] == [p.requires_grad for p in one.parameters()]
    assert torch.equal(many(inputs()), one(inputs())), "outputs"


def rows(kind):
    """ColwiseParallel: each rank has rows of the weight, and computes outputs of one process."""
    layer = model(kind)[0].base
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    many = parallelize_module(copy.deepcopy(layer), mesh, ColwiseParallel())
    with torch.no_grad():
        wanted = layer(inputs()).chunk(mesh.size(), 1)[dist.get_rank()]
        assert torch.equal(many(inputs()), wanted), "outputs"


def columns(kind):
    """RowwiseParallel: each rank has columns; inputs are quantized slice by slice."""
    layer = model(kind)[0].base
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    many = parallelize_module(copy.deepcopy(layer), mesh, RowwiseParallel())
    pieces = [piece.contiguous() for piece in inputs().chunk(mesh.size(), 1)]
    with torch.no_grad():
        got = many(pieces[dist.get_rank()])
        weights = layer.weight.chunk(mesh.size(), 1)
        wanted = sum(F.linear(x, w) for x, w in zip(pieces, weights, strict=True)) + layer.bias
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6), "outputs"


def loops(folder):
    """By name: what is done with a kind of layer."""
    for name, wrap in WRAPPERS.items():
        yield name, lambda kind, wrap=wrap: trains(kind, wrap)
        if "," not in name:
            place = f"{folder}/{name}"
            yield (
                f"states, {name}",
                lambda kind, wrap=wrap, place=place: states(kind, wrap, f"{place} {kind}"),
            )
    yield ACCELERATE, from_accelerate
    yield "columns of the output", rows
    yield "rows of the input", columns


def tried(loop, kind):
    try:
        loop(kind)
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "right"


def run(folder, *kinds):
    warnings.filterwarnings("ignore")
    for kind in kinds or KINDS:
        for name, loop in loops(folder):
            if kinds and name in NIGHTLY:
                continue
            found, answer = tried(loop, kind), ANSWERS.get((name, kind), "right")
            assert found == answer if answer == "right" else re.search(answer, found), (name, kind, found)
