"""How long a model is trained and how fast it learns, as fractions of a budget that may be bytes or seconds."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.models.language_model import ModelSettings

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When training ends: after so many bytes of text, or so many seconds of steps, whichever is first.

    ValueError without either, and where one is not positive. Runs that are compared are given bytes: how far seconds reach
    depends on the machine, and a resumed run of seconds need not take the same steps.
    """

    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.bytes, self.seconds) if one is not None]
        if not given or min(given) <= 0:
            raise ValueError(
                f"a budget is a positive number of bytes, of seconds, or both, got {self.bytes} and {self.seconds}"
            )

    def fraction(self, trained: int, seconds: float) -> float:
        """The share of the budget that is used, from 0; training ends at 1."""
        used = [
            spent / limit
            for spent, limit in ((trained, self.bytes), (seconds, self.seconds))
            if limit is not None
        ]
        return max(used)

    def __str__(self) -> str:
        parts = [
            f"{self.bytes / 1e6:g} MB" if self.bytes else "",
            f"{self.seconds:g} s" if self.seconds else "",
        ]
        return " or ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """One training from random weights.

    batch: sequences of `model.context` bytes a step. rate: AdamW's peak learning rate. warmup, decay: the fractions of the
    budget over which the rate rises linearly from 0, and falls linearly to `last_rate` of itself at the end. clip: the
    largest norm of the gradients. seed: fixes the initial weights and the text of each step, so runs of one seed are paired
    whatever their method. method: what the layers were converted to, a name for rows and checkpoints. compiled: whether
    torch.compile is used on a GPU. ValueError for fractions that do not fit and values that are not positive.
    """

    model: ModelSettings
    budget: Budget
    batch: int
    rate: float
    warmup: float = 0.05
    decay: float = 0.3
    last_rate: float = 0.0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    method: str = BFLOAT16
    compiled: bool = True

    def __post_init__(self) -> None:
        if min(self.warmup, self.decay) < 0 or self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup and decay are fractions of the budget that add up to at most 1, got {self.warmup} and {self.decay}"
            )
        if min(self.batch, self.rate) <= 0:
            raise ValueError(f"batch and rate are positive, got {self.batch} and {self.rate}")

    @property
    def step_bytes(self) -> int:
        """Bytes that one step trains on."""
        return self.batch * self.model.context

    def rate_at(self, done: float) -> float:
        """The learning rate where a fraction `done` of the budget is used: a trapezoid."""
        rise = min(1.0, done / self.warmup) if self.warmup else 1.0
        left = min(1.0, (1 - done) / self.decay) if self.decay else 1.0
        return self.rate * rise * (self.last_rate + (1 - self.last_rate) * max(0.0, left))


__all__ = ["BFLOAT16", "Budget", "PretrainSettings"]
