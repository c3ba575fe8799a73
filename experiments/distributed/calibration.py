"""Calibration by several ranks, each with its part of the data: the weights that one process finds from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.distributed.cases import BITS, Case, Rank, Tally

#: Batches of all ranks; sums over them are a tree of so many shares.
SHARES = 8
WIDTH = 128


class Block(nn.Module):
    """A norm, two layers that read one tensor, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        y = self.norm(x)
        return x + self.three(torch.relu(self.one(y)) + self.two(y))


class Stack(nn.Module):
    """Blocks that are calibrated one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def stack(rank: Rank) -> Stack:
    """The same on every rank, channels of different sizes."""
    torch.manual_seed(0)
    made = Stack()
    for block in made.blocks:
        made_weight: Any = block.norm
        made_weight.weight.data.mul_(torch.exp(torch.randn(WIDTH)))
    return made.to(rank.device, rank.dtype)


def batches(rank: Rank) -> list[Tensor]:
    """Batches of all ranks, in their order."""
    return [rank.random(3, 16, WIDTH, seed=seed) for seed in range(SHARES)]


def methods(name: str) -> tuple[Any, Sequence[Any]]:
    """A configuration and what finds its weights."""
    import ao_lab
    from ao_lab.calibration.methods import AWQ, GPTQ, Clip, Smooth

    int4 = ao_lab.SchemeConfig(scheme="int4_g32_asymmetric")
    static = ao_lab.Int8StaticActivationInt8WeightConfig(granularity=ao_lab.PerTensor())
    found: dict[str, tuple[Any, Sequence[Any]]] = {
        "GPTQ": (int4, (GPTQ(),)),
        "AWQ, clipping, GPTQ": (int4, (AWQ(ratios=4), Clip(), GPTQ())),
        "SmoothQuant, GPTQ": (ao_lab.Int8DynamicActivationInt8WeightConfig(), (Smooth(), GPTQ())),
        "static scales": (static, (Clip(),)),
    }
    return found[name]


def calibrate(rank: Rank, tally: Tally, name: str) -> None:
    """All ranks together, and each alone with all data and as many shares."""
    from ao_lab import quantize_
    from ao_lab.calibration.ranks import DistributedBatches

    groups = [torch.distributed.new_group([of]) for of in range(rank.size)]
    config, found = methods(name)
    data, count = batches(rank), SHARES // rank.size
    together, alone = stack(rank), stack(rank)
    mine = DistributedBatches(data[rank.rank * count :][:count], SHARES)
    quantize_(together, config, linear, calibration=mine, methods=found, progress=False)
    whole = DistributedBatches(data, SHARES, groups[rank.rank])
    quantize_(alone, config, linear, calibration=whole, methods=found, progress=False)
    for (where, a), b in zip(alone.named_parameters(), together.parameters(), strict=True):
        tally.stored(
            where, getattr(b.detach(), "plain", b.detach()), getattr(a.detach(), "plain", a.detach())
        )


def linear(module: nn.Module, name: str) -> bool:
    """Layers of blocks."""
    return isinstance(module, nn.Linear) and name.startswith("blocks")


CASES = tuple(
    Case(f"calibration, {name}", partial(calibrate, name=name), BITS, day=name == "GPTQ")
    for name in ("GPTQ", "AWQ, clipping, GPTQ", "SmoothQuant, GPTQ", "static scales")
)
