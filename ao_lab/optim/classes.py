"""The classes by torchao's names and with its arguments; each says which states it has by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ao_lab.optim.base import LowBitOptimizer
from reference.optim.states import States

Rate = float | torch.Tensor
Betas = tuple[float, float]


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise ValueError(
            "amsgrad=True needs a third moment, which is not stored in low precision; use amsgrad=False"
        )


class _Adam(LowBitOptimizer):
    """What the six classes of Adam share: torchao's signature."""

    KIND, STATES, DECAY = "adamw", "8bit", 1e-2

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        bf16_stochastic_round: bool = False,
        states: str | States | None = None,
        master: str = "none",
        nonfinite: str = "raise",
        seed: int = 0,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        decay = self.DECAY if weight_decay is None else weight_decay
        super().__init__(
            params, lr, betas, eps, decay, kind=self.KIND, states=states or self.STATES, block_size=block_size,
            bf16_stochastic_round=bf16_stochastic_round, master=master, nonfinite=nonfinite, seed=seed,
        )  # fmt: skip


class AdamW8bit(_Adam):
    """AdamW with moments in 8 bits: e4m3, of the second one its root, which is never 0, rounded stochastically; blocks of 256.

    Arguments of torchao's class, and those of `LowBitOptimizer`. `states="torchao.8bit"` are those of torchao and bitsandbytes.
    """


class AdamW4bit(_Adam):
    """AdamW with moments in 4 bits: e2m1 and the root of the second one in 15 levels, both rounded stochastically, blocks of
    128. `states="torchao.4bit"` are torchao's.
    """

    STATES = "4bit"


class AdamWFp8(_Adam):
    """`AdamW8bit` under torchao's other name: its default states are e4m3 already. `states="torchao.fp8"` are torchao's."""


class Adam8bit(AdamW8bit):
    """As `AdamW8bit`, with Adam's weight decay, which is added to gradients."""

    KIND, DECAY = "adam", 0.0


class Adam4bit(AdamW4bit):
    """As `AdamW4bit`, with Adam's weight decay."""

    KIND, DECAY = "adam", 0.0


class AdamFp8(AdamWFp8):
    """As `AdamWFp8`, with Adam's weight decay."""

    KIND, DECAY = "adam", 0.0


class Lion8bit(LowBitOptimizer):
    """Lion with its moment as e4m3, rounded stochastically: it moves by 1 % a step, less than half a code. bitsandbytes' name
    and defaults.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        block_size: int | None = None,
        bf16_stochastic_round: bool = False,
        states: str | States = "lion.8bit",
        master: str = "none",
        nonfinite: str = "raise",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, 1e-8, weight_decay, kind="lion", states=states, block_size=block_size,
            bf16_stochastic_round=bf16_stochastic_round, master=master, nonfinite=nonfinite, seed=seed,
        )  # fmt: skip


__all__ = ["Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "Lion8bit"]
