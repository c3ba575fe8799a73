"""Training on several ranks: FSDP2 by recipe, adapters beside frozen quantized weights, 2:4, states of optimizers.

Every rank has a batch of its own (of 2:4 training all have one). One process runs the batches of the first two ranks one after
another and adds their gradients, divided by the number of ranks; the others' losses are multiplied by 0, so that a sum over any
number of ranks has one order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.distributed.cases import BITS, REFUSED, Case, Rank, Tally

STEPS = 10
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
#: Recipes whose weights cannot be gathered as codes, by words of the error.
NOT_GATHERED = {"blockwise": "gathers weights in their own dtype"}
WIDTH, TOKENS = 128, 32
LEARNING = 1e-2
#: Configurations of frozen bases, by schemes of weights and inputs.
BASES = (
    ("int8_rowwise", None), ("int4_g32_asymmetric", None), ("nf4", None), ("mxfp4", None), ("nvfp4", None),
    ("int8_rowwise", "int8_rowwise"), ("fp8_rowwise", "fp8_rowwise"), ("mxfp8_e4m3", "mxfp8_e4m3"),
)  # fmt: skip


class Block(nn.Module):
    """Two layers around which a residual goes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) to the same shape."""
        return x + self.down(nn.functional.silu(self.up(x)))


def blocks(rank: Rank, count: int = 2) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).to(rank.device, rank.dtype)


def squares(rank: Rank) -> nn.Sequential:
    """Square layers: their shapes do not say which way round codes lie. On GPUs as large as torch's product takes over."""
    torch.manual_seed(0)
    width = sizes_of_squares(rank)[1]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(2))).to(rank.device, rank.dtype)


def sizes_of_squares(rank: Rank) -> tuple[int, int]:
    """Tokens of a batch, and the layers' width."""
    return (1024, 4096) if rank.device.type == "cuda" else (TOKENS, WIDTH)


def batch(rank: Rank, of: int, step: int, sizes: tuple[int, int] = (TOKENS, WIDTH)) -> Tensor:
    """The batch of a rank in a step."""
    return rank.random(*sizes, seed=100 * step + of)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    """A number that depends on every output."""
    return net(x).float().square().mean()


def share(net: nn.Sequential, **options: Any) -> nn.Sequential:
    """Under FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in net:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


def content(t: Tensor) -> Tensor:
    """The whole plain tensor of a parameter or a gradient."""
    t = t.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return getattr(t, "dense", t)


def weight_of(rank: int) -> float:
    """What a rank's loss is multiplied by: see the module's text."""
    return 1.0 if rank < 2 else 0.0


def one_process(rank: Rank, net: nn.Module, batches: Callable[[int], Tensor]) -> Tensor:
    """The loss of this rank's batch, and gradients of all batches averaged. batches: of a rank by its number."""
    mine = torch.empty(0)
    for of in range(rank.size):
        loss = loss_of(net, batches(of)) * weight_of(of)
        if of < 2:
            loss.backward()
        if of == rank.rank:
            mine = loss.detach()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad /= rank.size
    return mine


def train_shared(
    rank: Rank, tally: Tally, recipe: str, codes: bool, states: str | None = None, square: bool = False
) -> None:
    """Ten steps of AdamW: losses, gradients and weights.

    square: layers of `squares`. states: an optimizer of `ao_lab.optim`, whose kernels write to shards by their addresses, and
    after which nothing says that codes and scales are old but the count of its writes.
    """
    from ao_lab import convert_for_training_, precompute_float8_dynamic_scale_for_fsdp

    one, many = (squares(rank) if square else blocks(rank) for _ in range(2))
    sizes = sizes_of_squares(rank) if square else (TOKENS, WIDTH)
    for net in (one, many):
        convert_for_training_(net, recipe, fsdp_float8_all_gather=codes)
    share(many)
    optimizers = [optimizer_of(net, states) for net in (one, many)]
    for step in range(STEPS):
        batches = partial(batch, rank, step=step, sizes=sizes)
        expected = one_process(rank, one, batches)
        found = loss_of(many, batches(rank.rank)) * weight_of(rank.rank)
        found.backward()
        tally.bits(f"loss of step {step}", found, expected)
        compare(tally, f"gradient of step {step}", one, many, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if codes and recipe == "tensorwise" and states is None:
            precompute_float8_dynamic_scale_for_fsdp(many)
    compare(tally, f"weight after {STEPS} steps", one, many, lambda p: p)


def optimizer_of(net: nn.Module, states: str | None) -> Any:
    """torch's AdamW, or one of stored states, which rounds bfloat16 weights stochastically."""
    if states is None:
        return torch.optim.AdamW(net.parameters(), LEARNING, foreach=False)
    import ao_lab.optim

    drawn = next(net.parameters()).dtype == torch.bfloat16
    return getattr(ao_lab.optim, states)(net.parameters(), lr=LEARNING, bf16_stochastic_round=drawn)


def write_row(rank: Rank, tally: Tally, recipe: str) -> None:
    """A row of every shard is made larger than all values between two steps: losses and gradients are those of the weight with
    its new codes and scales."""
    from ao_lab import convert_for_training_

    one, many = blocks(rank), blocks(rank)
    for net in (one, many):
        convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
    share(many)
    for step in range(3):
        batches = partial(batch, rank, step=step)
        expected = one_process(rank, one, batches)
        found = loss_of(many, batches(rank.rank)) * weight_of(rank.rank)
        found.backward()
        tally.bits(f"loss of step {step}", found, expected)
        compare(tally, f"gradient of step {step}", one, many, lambda p: p.grad)
        with torch.no_grad():
            for a, b in zip(layers_of(one), layers_of(many), strict=True):
                shards = a.weight.chunk(rank.size)
                for row in (*(shard[step] for shard in shards), b.weight.to_local()[step]):
                    row.fill_(4.0 + step)
        for net in (one, many):
            net.zero_grad()
    compare(tally, "weight", one, many, lambda p: p)


def layers_of(net: nn.Module) -> list[Any]:
    """Linear layers."""
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


def compare(tally: Tally, what: str, one: nn.Module, many: nn.Module, part: Callable[[Any], Any]) -> None:
    """The same part of each parameter of both; None where one process has none."""
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        expected, found = part(a), part(b)
        if expected is None:
            tally.true(f"{what}, {name}: there is one, in one process there is none", found is None)
        else:
            tally.bits(f"{what}, {name}", content(found), content(expected))


def refuse_codes(rank: Rank, tally: Tally, recipe: str) -> None:
    """The error of a recipe whose weights are not gathered as codes; the model stays as it was."""
    from ao_lab import convert_for_training_

    net = blocks(rank)
    try:
        convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
        said = "no error"
    except ValueError as error:
        said = str(error)
    tally.true(f"{recipe} with codes: {said}", NOT_GATHERED[recipe] in said)
    tally.true("a layer was changed", all(type(block.up) is nn.Linear for block in net))


def plain_(net: nn.Module) -> Any:
    """Quantized weights laid out as ranks send and gather them: a GPU's kernels sum in another order from another layout."""
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight: Any = parameter.detach()
            if hasattr(weight, "parts"):
                setattr(module, name, nn.Parameter(weight.plain, requires_grad=False))
    return net


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(2 * WIDTH, 16, bias=False), nn.Linear(16, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, 2 width) to the same shape."""
        return nn.functional.silu(self.base(x) + self.up(self.down(x)))


def train_adapters(rank: Rank, tally: Tally, weight: str, inputs: str | None) -> None:
    """Three steps of adapters beside frozen bases, which stay as they are, bit for bit."""
    from ao_lab import SchemeConfig, quantize_

    torch.manual_seed(0)
    one = nn.Sequential(Adapted(), Adapted()).to(rank.device, rank.dtype)
    config = SchemeConfig(scheme=weight, activation_scheme=inputs)
    quantize_(one, config, lambda module, name: name.endswith("base"))
    many = share(copy.deepcopy(plain_(one)))
    nets = (one, many)
    optimizers = [
        torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], LEARNING, foreach=False)
        for net in nets
    ]
    for step in range(3):
        batches = [rank.random(TOKENS, 2 * WIDTH, seed=100 * step + of) for of in range(rank.size)]
        expected = one_process(rank, one, batches.__getitem__)
        found = loss_of(many, batches[rank.rank]) * weight_of(rank.rank)
        found.backward()
        tally.bits(f"loss of step {step}", found, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(one.named_parameters(), many.named_parameters(), strict=True):
        whole: Any = b[1].detach()
        tally.stored(name, whole.full_tensor(), a.detach())


def train_sparse(rank: Rank, tally: Tally, masks: str, gradient: str) -> None:
    """Four steps of layers that train with 2:4 weights: outputs, weights and masks, then plain layers."""
    import ao_lab

    torch.manual_seed(0)
    one = nn.Sequential(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)))
    one.to(rank.device, rank.dtype)
    ao_lab.sparsify_(one, ao_lab.SparseTrainingConfig(masks=masks, gradient=gradient))
    many = share(copy.deepcopy(one))
    nets = (one, many)
    optimizers = [
        torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1, foreach=False) for net in nets
    ]
    for step in range(4):
        outputs = [net(rank.random(16, 64, seed=step)) for net in nets]
        tally.bits(f"output of step {step}", outputs[1], outputs[0])
        for y, optimizer in zip(outputs, optimizers, strict=True):
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for net in nets:
            ao_lab.step_sparsity_(net)
        compare(tally, f"weight after step {step}", one, many, lambda p: p)
    for a, b in zip(one.buffers(), many.buffers(), strict=True):
        tally.bits("a mask", b, a)
    for net in nets:
        ao_lab.finish_sparsity_(net)
    compare(tally, "weight of the plain layer", one, many, lambda p: p)


def train_states(rank: Rank, tally: Tally, name: str, wrapper: str) -> None:
    """Five steps with stored states and stochastic rounding: weights and states of one process, the same on every rank."""
    import ao_lab.optim

    kind = getattr(ao_lab.optim, name)

    def made(net: nn.Module) -> Any:
        return kind(net.parameters(), lr=LEARNING, bf16_stochastic_round=True)

    one, many = ragged(rank), ragged(rank)
    wrapped = wrapped_by(wrapper, many, rank)
    single, shared = made(one), made(wrapped)
    for step in range(5):
        batches = [rank.random(8, 300, seed=100 * step + of, dtype=torch.bfloat16) for of in range(rank.size)]
        one_process(rank, one, batches.__getitem__)
        (loss_of(wrapped, batches[rank.rank]) * weight_of(rank.rank)).backward()
        for optimizer in (single, shared):
            optimizer.step()
            optimizer.zero_grad()
    compare(tally, "weight", one, many, lambda p: p)
    for a, b in zip(single.param_groups[0]["params"], shared.param_groups[0]["params"], strict=True):
        for key, value in single.state[a].items():
            tally.stored(f"state {key}", whole(shared.state[b][key]), value)
    if wrapper == "DDP":
        replicas_alike(rank, tally, many)


def skip_together(rank: Rank, tally: Tally) -> None:
    """A gradient that is not finite in one rank's part: all leave the step out, and none goes on without the others."""
    import ao_lab.optim

    net: Any = ragged(rank)
    before = [p.detach().clone() for p in net.parameters()]
    wrapped = wrapped_by("FSDP2", net, rank)
    optimizer = ao_lab.optim.AdamW8bit(wrapped.parameters(), lr=LEARNING)
    wrapped(rank.random(8, 300, dtype=torch.bfloat16)).float().square().mean().backward()
    if rank.rank == rank.size - 1:
        net[0].weight.grad.to_local()[0, 0] = float("inf")
    cuda, said = rank.device.type == "cuda", ""
    if cuda:  # the error comes with the next step, on all ranks
        optimizer.step()
    try:
        optimizer.step()
    except ValueError as error:
        said = str(error)
    tally.true(f"the error says {said!r}", "not finite" in said)
    tally.true(f"{optimizer.left_out} steps were left out", optimizer.left_out == int(cuda))
    for value, parameter in zip(before, net.parameters(), strict=True):
        tally.bits("a weight", content(parameter), value)


def ragged(rank: Rank) -> nn.Module:
    """Rows that ranks do not divide, in bfloat16: stochastic rounding is of such weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 65)).to(rank.device, torch.bfloat16)


def wrapped_by(wrapper: str, net: Any, rank: Rank) -> nn.Module:
    """Under FSDP2, or DDP."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrapper == "FSDP2":
        fully_shard(net, mesh=rank.mesh())
        return net
    ids = [rank.device.index] if rank.device.type == "cuda" else None
    return DistributedDataParallel(net, device_ids=ids)


def whole(value: Any) -> Any:
    """A state of all ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def replicas_alike(rank: Rank, tally: Tally, net: nn.Module) -> None:
    """Every rank's weights beside those of the first."""
    for name, parameter in net.named_parameters():
        first = parameter.detach().clone()
        torch.distributed.broadcast(first, src=0)
        tally.bits(f"{name} of rank {rank.rank} beside that of rank 0", parameter, first)


def gathered_cases() -> list[Case]:
    """Recipes, with codes gathered and values; codes of weights that are written to past torch."""
    found = []
    for recipe in RECIPES:
        found.append(
            Case(f"FSDP2, {recipe}, bfloat16 gathered", partial(train_shared, recipe=recipe, codes=False))
        )
        name = f"FSDP2, {recipe}, codes gathered"
        if recipe in NOT_GATHERED:
            found.append(Case(name, partial(refuse_codes, recipe=recipe), REFUSED))
        else:
            work = partial(train_shared, recipe=recipe, codes=True)
            found.append(Case(name, work, BITS))
    for recipe in ("tensorwise", "rowwise"):
        name = f"FSDP2, {recipe}, codes gathered"
        stored = partial(train_shared, recipe=recipe, codes=True, states="AdamW8bit")
        found.append(Case(f"{name}, AdamW8bit", stored, BITS))
        wide = partial(train_shared, recipe=recipe, codes=True, square=True)
        found.append(Case(f"{name}, square layers", wide, BITS))
        found.append(Case(f"{name}, a row is written", partial(write_row, recipe=recipe), BITS))
    return found


CASES = (
    *gathered_cases(),
    *(
        Case(f"adapters, {weight}{f', inputs {inputs}' * bool(inputs)}", partial(train_adapters, weight=weight, inputs=inputs))
        for weight, inputs in BASES
    ),
    *(
        Case(f"2:4 training, masks {masks}, {gradient}", partial(train_sparse, masks=masks, gradient=gradient))
        for masks, gradient in (("fixed", "masked"), ("recomputed", "sr-ste"))
    ),
    Case("optimizers, a gradient that is not finite on one rank", skip_together, REFUSED),
    *(
        Case(
            f"optimizers, {name}, {wrapper}", partial(train_states, name=name, wrapper=wrapper),
            day=(name, wrapper) == ("AdamW8bit", "DDP"),
        )
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
        for wrapper in ("FSDP2", "DDP")
    ),
)  # fmt: skip
