"""Quantized layers of inference split over ranks: tensor parallelism in every configuration, experts, stored weights as
DTensors.

A rank's product is that of its slice of the weight, so one process that multiplies the slices one after another has the same
bits; where a product is a sum over slices, ranks add theirs in another order where they are more than two, and a bound is
derived.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.distributed.cases import BITS, SLICES, Case, Rank, Tally

#: Tokens of an input. In sequence parallelism every rank has as many, so one token is one a rank there.
TOKENS = (1, 16, 300)
#: Widths of inputs and hidden features, on CPUs and on GPUs.
WIDTHS = {"cpu": (256, 512), "cuda": (1024, 4096)}


def configurations() -> dict[str, Callable[[], Any]]:
    """Every class of configurations, and the granularities and widths that other kernels multiply."""
    import ao_lab as a

    rows, tensor = a.PerRow(), a.PerTensor()
    blocks = (a.PerBlock((1, 128)), a.PerBlock((128, 128)))
    return {
        "int4 weights": a.Int4WeightOnlyConfig,
        "int4 weights without zero points": lambda: a.SchemeConfig(scheme="int4_g128"),
        "int8 weights": a.Int8WeightOnlyConfig,
        "3-bit weights": lambda: a.LowBitWeightOnlyConfig(bits=3),
        "2-bit weights": a.LowBitWeightOnlyConfig,
        "intx weights": a.IntxWeightOnlyConfig,
        "nf4 weights": a.NF4WeightOnlyConfig,
        "fp8 weights": a.Float8WeightOnlyConfig,
        "mxfp8 weights": a.MXWeightOnlyConfig,
        "mxfp4 weights": lambda: a.MXWeightOnlyConfig(weight_dtype="float4_e2m1fn"),
        "nvfp4 weights": a.NVFP4WeightOnlyConfig,
        "int8 weights and inputs": a.Int8DynamicActivationInt8WeightConfig,
        "int8 inputs, static": lambda: a.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05)),
        "intx weights, int8 inputs": a.Int8DynamicActivationIntxWeightConfig,
        "fp8 weights and inputs by rows": lambda: a.Float8DynamicActivationFloat8WeightConfig(granularity=rows),
        "fp8 weights and inputs by tensor": lambda: a.Float8DynamicActivationFloat8WeightConfig(granularity=tensor),
        "fp8 weights and inputs by blocks": lambda: a.Float8DynamicActivationFloat8WeightConfig(granularity=blocks),
        "int4 weights, fp8 inputs": a.Float8DynamicActivationInt4WeightConfig,
        "mxfp8 weights and inputs": a.MXDynamicActivationMXWeightConfig,
        "nvfp4 weights and inputs": a.NVFP4DynamicActivationNVFP4WeightConfig,
        "int4 weights, 2:4": lambda: a.Int4WeightOnlyConfig(sparsity="2:4"),
        "int8 weights and inputs, 2:4": lambda: a.Int8DynamicActivationInt8WeightConfig(sparsity="2:4"),
        "fp8 weights and inputs by rows, 2:4": lambda: a.Float8DynamicActivationFloat8WeightConfig(
            granularity=rows, sparsity="2:4"
        ),
    }  # fmt: skip


#: Whose blocks are of the flattened weight, so that columns are no slices; words of the error.
NO_COLUMNS = {"nf4 weights": "pieces hold a multiple of"}


class Feed(nn.Module):
    """A layer split by its outputs, and one split by its inputs."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) to the same shape."""
        return self.down(nn.functional.silu(self.up(x)))


def feed(rank: Rank, name: str) -> Feed:
    """A quantized one, the same on every rank."""
    import ao_lab

    torch.manual_seed(0)
    made = Feed(*WIDTHS[rank.device.type]).to(rank.device, rank.dtype)
    with rank.device:
        config = configurations()[name]()
    if "2:4" in name:
        ao_lab.sparsify_(made, ao_lab.SparsityConfig("2:4"))
    ao_lab.quantize_(made, config)
    return made.requires_grad_(False)


def pieces(weight: Any, ranks: int, axis: int, like: Any) -> list[Any]:
    """Slices of a weight, in the layout in which a rank has its own."""
    return [laid_out(one, like) for one in weight.plain.chunk(ranks, axis)]


def laid_out(weight: Any, like: Any) -> Any:
    """A weight in the layout of another."""
    return weight if weight.meta.layout == like.meta.layout else weight.to_layout(like.meta.layout)


def split(rank: Rank, net: Feed, sequence: bool, columns: bool) -> Feed:
    """The first layer's outputs over ranks, the second's inputs; tokens over ranks between such pairs."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ends = Shard(0) if sequence else Replicate()
    gathered = None if columns else Replicate()
    plan = {"up": ColwiseParallel(input_layouts=ends, output_layouts=gathered)}
    if columns:
        plan["down"] = RowwiseParallel(output_layouts=ends)
    parallelize_module(net, rank.mesh(), plan)
    return net


def tensor_parallel(rank: Rank, tally: Tally, name: str) -> None:
    """Slices are those of the whole weight; outputs at each number of tokens, tokens whole and split."""
    one, columns = feed(rank, name), name not in NO_COLUMNS
    if not columns:
        refuse_columns(rank, tally, one, NO_COLUMNS[name])
    for sequence in (False, True) if columns else (False,):
        many = split(rank, copy.deepcopy(one), sequence, columns)
        ups = slices(rank, tally, one.up, many.up, 0)
        downs = slices(rank, tally, one.down, many.down, 1) if columns else None
        for tokens in TOKENS:
            count = max(tokens, rank.size) if sequence else tokens
            x = rank.random(count, one.up.in_features, seed=count)
            given = x.chunk(rank.size)[rank.rank] if sequence else x
            with torch.no_grad():
                found, parts = many(given) + 0, products(one, ups, downs, x)
            words = f"{count} tokens{', split' * sequence}"
            add_up(rank, tally, words, getattr(found, "to_local", lambda f=found: f)(), parts, sequence)


def slices(rank: Rank, tally: Tally, one: Any, many: Any, axis: int) -> list[Any]:
    """Slices of a layer's weight, of which this rank has its own."""
    mine = many.weight.to_local()
    found = pieces(one.weight, rank.size, axis, mine)
    tally.stored(f"slice {rank.rank} of axis {axis}", mine, found[rank.rank])
    return found


def products(one: Feed, ups: list[Any], downs: list[Any] | None, x: Tensor) -> list[Tensor]:
    """What ranks add up: products of the slices of inputs and weight."""
    linear, silu = nn.functional.linear, nn.functional.silu
    biases = one.up.bias.chunk(len(ups))
    hidden = [silu(linear(x, w, b)) for w, b in zip(ups, biases, strict=True)]
    if downs is None:
        return [linear(torch.cat(hidden, -1), one.down.weight, one.down.bias)]
    # torch adds a share of the bias on every rank.
    return [linear(h, w, one.down.bias / len(ups)) for h, w in zip(hidden, downs, strict=True)]


def add_up(rank: Rank, tally: Tally, what: str, found: Tensor, parts: list[Tensor], cut: bool) -> None:
    """Two terms have one sum; of more, n - 1 roundings of sums that stay below the sum of magnitudes."""
    expected = (
        torch.stack([part.double() for part in parts]).sum(0) if len(parts) > 2 else sum(parts[1:], parts[0])
    )
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    if cut:
        expected, size = (t.chunk(rank.size)[rank.rank] for t in (expected, size))
    if len(parts) <= 2:
        tally.bits(what, found, expected)
        return
    unit = torch.finfo(found.dtype).eps / 2
    tally.near(what, found, expected, float(size.max()) * len(parts) * unit)


def refuse_columns(rank: Rank, tally: Tally, one: Feed, words: str) -> None:
    """The error of a weight that has no columns."""
    from torch.distributed.tensor import Shard, distribute_tensor

    try:
        distribute_tensor(one.down.weight.detach(), rank.mesh(), [Shard(1)])
        said = "no error"
    except ValueError as error:
        said = str(error)
    tally.true(f"columns over ranks: {said}", words in said)


def experts(rank: Rank, tally: Tally, scheme: str, inputs: str | None) -> None:
    """Experts over ranks: stored parts of each, their products, and all of them gathered again."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from ao_lab import Recipe, quantized
    from reference import SCHEMES

    recipe = Recipe(weight=SCHEMES[scheme], activation=SCHEMES[inputs] if inputs else None)
    count = 4 * rank.size
    w = quantized(rank.random(count, 256, 256), recipe)
    x = rank.random(count, 16, 256, seed=1)
    many: Any = distribute_tensor(w, rank.mesh(), [Shard(0)])
    mine, whole = many.to_local(), w.plain
    own = slice(4 * rank.rank, 4 * rank.rank + 4)
    tally.stored("experts of this rank", mine.plain, whole[own])
    tally.stored("all experts", many.full_tensor().plain, whole)
    with torch.no_grad():
        expected = torch.bmm(x[own].contiguous(), laid_out(whole[own], mine).transpose(1, 2))
        tally.bits("products", torch.bmm(x[own].contiguous(), mine.transpose(1, 2)), expected)


def stored(rank: Rank, tally: Tally, scheme: str) -> None:
    """A weight cut by rows and by columns, moved between the two, gathered, and its parts sent by themselves."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from ao_lab import quantized

    w = quantized(rank.random(256, 512), scheme).plain
    places: list[Any] = [Replicate(), Shard(0), Shard(1)]
    for place in places:
        many = distribute_tensor(w, rank.mesh(), [place])
        tally.stored(f"{place}, gathered", many.full_tensor(), w)
        for target in places:
            tally.stored(f"{place} to {target}", many.redistribute(rank.mesh(), [target]).full_tensor(), w)
    each = [quantized(rank.random(32, 128, seed=seed), scheme).plain for seed in range(rank.size)]
    got = torch.empty_like(each[0])
    torch.distributed.scatter(got, each if rank.first else None, src=0)
    tally.stored("scattered", got, each[rank.rank])
    everyone = [torch.empty_like(got) for _ in each]
    torch.distributed.all_gather(everyone, each[rank.rank])
    for a, b in zip(everyone, each, strict=True):
        tally.stored("gathered", a, b)


CASES = (
    *(
        Case(f"stored weights, {scheme}", partial(stored, scheme=scheme), BITS)
        for scheme in ("int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise", "fp8_tensorwise", "mxfp4", "nvfp4")
    ),
    *(
        Case(f"experts, {scheme}{f', inputs {inputs}' * bool(inputs)}", partial(experts, scheme=scheme, inputs=inputs), BITS)
        for scheme, inputs in (
            ("int4_g128_asymmetric", None), ("fp8_rowwise", None), ("mxfp4", None),
            ("int8_rowwise", "int8_rowwise"), ("mxfp8_e4m3", "mxfp8_e4m3"),
        )
    ),
    *(
        Case(f"tensor parallel, {name}", partial(tensor_parallel, name=name), SLICES)
        for name in configurations()
    ),
)  # fmt: skip
