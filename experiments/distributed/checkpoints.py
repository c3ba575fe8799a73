"""Checkpoints of several ranks: two ranks to one process and back, dense to quantized, training to plain layers.

Files are those of torch.distributed.checkpoint. One process reads them without a group (`no_dist`).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.distributed.cases import BITS, Case, Rank, Tally
from experiments.distributed.training import WIDTH, batch, blocks, compare, content, loss_of, plain_, share

SCHEMES = (
    ("int8_rowwise", None), ("int4_g32_asymmetric", None), ("nf4", None), ("nvfp4", None),
    ("fp8_rowwise", "fp8_rowwise"), ("mxfp8_e4m3", "mxfp8_e4m3"),
)  # fmt: skip


def dense(rank: Rank, seed: int = 0) -> nn.Sequential:
    """Layers, the same on every rank."""
    torch.manual_seed(seed)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.SiLU()) for _ in range(2)))
    return made.to(rank.device, rank.dtype).requires_grad_(False)


def quantized_net(rank: Rank, scheme: str, inputs: str | None, seed: int = 0) -> nn.Sequential:
    """The same layers, quantized."""
    from ao_lab import SchemeConfig, quantize_

    made = dense(rank, seed)
    quantize_(made, SchemeConfig(scheme=scheme, activation_scheme=inputs))
    plain_(made)
    return made


def round_trip(rank: Rank, tally: Tally, scheme: str, inputs: str | None) -> None:
    """Shards of two ranks, read by one process, written by it, and read into shards again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    one = quantized_net(rank, scheme, inputs)
    many = share(copy.deepcopy(one))
    dcp.save(get_model_state_dict(many), checkpoint_id=rank.folder / "many")
    alone = quantized_net(rank, scheme, inputs, seed=1)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=rank.folder / "many", no_dist=True)
    alone.load_state_dict(state)
    same(tally, "one process", one, alone)
    if rank.first:
        dcp.save(alone.state_dict(), checkpoint_id=rank.folder / "one", no_dist=True)
    rank.wait()
    again = share(quantized_net(rank, scheme, inputs, seed=2))
    shards = get_model_state_dict(again)
    dcp.load(shards, checkpoint_id=rank.folder / "one")
    set_model_state_dict(again, shards)
    same(tally, "ranks again", one, again)
    x = rank.random(16, 2 * WIDTH)
    tally.bits("outputs", again(x), one(x))


def same(tally: Tally, what: str, one: nn.Module, other: nn.Module) -> None:
    """Parameters by their stored parts."""
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        found: Any = b.detach()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        tally.stored(
            f"{what}, {name}", getattr(found, "plain", found), getattr(a.detach(), "plain", a.detach())
        )


def dense_to_quantized(rank: Rank, tally: Tally, scheme: str) -> None:
    """A dense model that ranks saved, read by one process and quantized; and read into shards of a quantized model's values."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from ao_lab import SchemeConfig, quantize_

    many = share(dense(rank))
    dcp.save(get_model_state_dict(many), checkpoint_id=rank.folder / "dense")
    alone = dense(rank, seed=1)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=rank.folder / "dense", no_dist=True)
    alone.load_state_dict(state)
    quantize_(alone, SchemeConfig(scheme=scheme))
    expected = quantized_net(rank, scheme, None)
    same(tally, "quantized", expected, alone)
    shared = share(copy.deepcopy(alone))
    same(tally, "and shared", expected, shared)


def trained(rank: Rank, tally: Tally, recipe: str) -> None:
    """Two steps, a checkpoint, two steps more: those of a run that was not interrupted; the file loads into plain layers."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        from ao_lab import convert_for_training_

        net = blocks(rank)
        convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
        share(net)
        return net, torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            loss_of(net, batch(rank, rank.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = made(), made()
    steps(*first, range(2))
    model, optimizer = get_state_dict(*first)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=rank.folder / "step")
    steps(*first, range(2, 4))
    steps(*second, range(7, 8))  # weights and scales of another run
    model, optimizer = get_state_dict(*second)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=rank.folder / "step")
    set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    plain = blocks(rank)
    values = plain.state_dict()
    dcp.load({"model": values}, checkpoint_id=rank.folder / "step", no_dist=True)
    for name, parameter in second[0].named_parameters():
        tally.bits(f"plain {name}", values[name], content(parameter))
    steps(*second, range(2, 4))
    compare_shared(tally, first[0], second[0])


def compare_shared(tally: Tally, one: nn.Module, other: nn.Module) -> None:
    """Weights of two models of the same ranks."""
    whole = blocks_like(one)
    compare(tally, "after four steps", whole, other, lambda p: p)


def blocks_like(net: nn.Module) -> nn.Module:
    """The gathered weights of a shared model, under their names."""
    made = nn.Module()
    for name, parameter in net.named_parameters():
        made.register_parameter(name.replace(".", "_"), nn.Parameter(content(parameter).clone()))
    return made


CASES = (
    *(
        Case(
            f"checkpoints, {scheme}{f', inputs {inputs}' * bool(inputs)}",
            partial(round_trip, scheme=scheme, inputs=inputs), BITS, day=scheme == "nf4",
        )
        for scheme, inputs in SCHEMES
    ),
    *(
        Case(f"checkpoints, dense to {scheme}", partial(dense_to_quantized, scheme=scheme), BITS)
        for scheme in ("int4_g32_asymmetric", "fp8_rowwise", "mxfp4")
    ),
    *(
        Case(f"checkpoints, training by {recipe}", partial(trained, recipe=recipe), BITS)
        for recipe in ("tensorwise", "rowwise", "mxfp8")
    ),
)  # fmt: skip
