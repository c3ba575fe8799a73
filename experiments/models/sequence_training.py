"""Training an HSTU to rank what a user comes to next, and what it is worth: log loss, normalised entropy, AUC.

An example is a user's history up to some event, and candidates behind it. Where histories have ratings (`RATED`), candidates
are the user's next events and a label is whether one was rated 4 or 5; else (`NEXT`) they are the next item, labelled 1, and
items drawn by how often the training part has them, labelled 0. Held out is what is later: each user's last events of RATED,
the last users (stretches of a text) of NEXT. Runs of one seed begin alike and see the same examples (`click_training`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from experiments.data.impressions import Array
from experiments.data.item_sequences import ItemSequences
from experiments.models.click_training import (
    Change,
    ClickTraining,
    Quality,
    finite,
    joined,
    optimizers,
    quality,
    stepped,
)
from experiments.models.hstu import HSTU, HSTUConfig, Sequences, ranking_loss

RATED, NEXT = "rated", "next"
LIKED, HELD_OUT = 4, 0.15
#: Seconds between two events, which the data do not tell.
SECOND = 1


@dataclass(frozen=True, eq=False)
class Examples:
    """data: histories, zeros before the first event. kind: RATED or NEXT. history: events of an example at most; candidates:
    behind them. ValueError where no user has an event before its candidates in both parts."""

    data: ItemSequences
    kind: str
    history: int = 64
    candidates: int = 8

    def __post_init__(self) -> None:
        for part, ends in (("training", self.ends), ("held out", self.held_out_ends)):
            if not len(ends):
                raise ValueError(
                    f"{self.data.name}: no example of the {part} part; {self.candidates} candidates are too many for "
                    f"sequences of {self.data.items.shape[1]} events, or there are too few users"
                )

    @property
    def actions(self) -> int:
        """Rows of the actions' table."""
        return int(self.data.actions.max()) + 1

    @cached_property
    def parted(self) -> tuple[Array, Array]:
        """Of each user the place of the first event, and that of the first one that is held out (NEXT: of none or all)."""
        users, length = self.data.items.shape
        first = (self.data.items > 0).argmax(1)
        if self.kind == RATED:
            return first, first + ((length - first) * (1 - HELD_OUT)).astype(np.int64)
        return first, np.where(np.arange(users) < int(users * (1 - HELD_OUT)), length, first)

    @cached_property
    def ends(self) -> Array:
        """(examples, 2): users and where their history ends, of the training part."""
        first, until = self.parted
        room = self.candidates if self.kind == RATED else 1
        places = np.arange(self.data.items.shape[1])
        return np.argwhere((places > first[:, None]) & (places + room <= until[:, None]))

    @cached_property
    def held_out_ends(self) -> Array:
        """The same of what is held out: each event is a candidate once (RATED), every so many events are (NEXT)."""
        first, until = self.parted
        places, step = np.arange(self.data.items.shape[1]), self.candidates
        begin = np.maximum(until, first + 1)[:, None]
        return np.argwhere((places >= begin) & ((places - begin) % step == 0))

    @cached_property
    def common(self) -> Array:
        """Items of the training part, as often as they are there: what candidates are drawn from."""
        first, until = self.parted
        places = np.arange(self.data.items.shape[1])
        found: Array = self.data.items[(places >= first[:, None]) & (places < until[:, None])]
        return found

    def batch(
        self, lines: Array, generator: np.random.Generator, device: str = "cpu"
    ) -> tuple[Sequences, torch.Tensor]:
        """Examples (n, 2) as a batch, with the labels (candidates of all, 1) float32."""
        parts = [self._example(int(user), int(end), generator) for user, end in lines]
        items, actions, labels = (np.concatenate([one[at] for one in parts]) for at in range(3))
        counts = [len(one[2]) for one in parts]
        lengths = [len(one[0]) for one in parts]
        times = np.concatenate([np.arange(length) * SECOND for length in lengths])
        tensors = [
            torch.from_numpy(np.ascontiguousarray(one, np.int64)).to(device)
            for one in (items, actions, times)
        ]
        sequences = Sequences(*tensors, tuple(lengths), tuple(counts))
        return sequences, torch.from_numpy(labels.astype(np.float32))[:, None].to(device)

    def _example(self, user: int, end: int, generator: np.random.Generator) -> tuple[Array, Array, Array]:
        """Items and actions, history before candidates, and the candidates' labels."""
        begin = max(int(self.parted[0][user]), end - self.history)
        items, actions = self.data.items[user], self.data.actions[user]
        if self.kind == RATED:
            last = min(end + self.candidates, len(items))
            return items[begin:last], actions[begin:last], actions[end:last] >= LIKED
        drawn = self.common[generator.integers(len(self.common), size=self.candidates - 1)]
        shown = np.concatenate([items[end : end + 1], drawn])
        return (
            np.concatenate([items[begin:end], shown]),
            np.concatenate([actions[begin:end], np.zeros_like(shown)]),
            shown == items[end],
        )

    def batches(
        self, size: int, seed: int, steps: int, device: str = "cpu"
    ) -> Iterator[tuple[Sequences, torch.Tensor]]:
        """So many batches of training examples, drawn by the seed."""
        generator = np.random.default_rng(seed)
        for _ in range(steps):
            yield self.batch(self.ends[generator.integers(len(self.ends), size=size)], generator, device)

    def held_out(
        self, size: int, most: int | None, device: str = "cpu"
    ) -> Iterator[tuple[Sequences, torch.Tensor]]:
        """Held-out examples, all or the first so many; their drawn candidates are the same in every run."""
        generator, ends = np.random.default_rng(0), self.held_out_ends[:most]
        for first in range(0, len(ends), size):
            yield self.batch(ends[first : first + size], generator, device)


def small(examples: Examples, width: int = 64) -> HSTUConfig:
    """An HSTU of two layers and two heads for examples."""
    return HSTUConfig(
        name="HSTU, small", items=examples.data.size, actions=examples.actions, width=width, layers=2, heads=2,
        qk_width=width // 2, v_width=width // 2, length=examples.history + examples.candidates,
    )  # fmt: skip


def trained_quality(
    make: Callable[[], HSTU],
    change: Change | None,
    examples: Examples,
    plan: ClickTraining,
    seed: int,
    device: str = "cpu",
) -> Quality:
    """Of an HSTU that begins with the seed's weights, is changed and trained; plan.batch and plan.evaluated count examples."""
    torch.manual_seed(seed)
    model = make().to(device)
    if change is not None:
        change(model)
    train(model, examples, plan, seed, device)
    return quality(*predictions(model, examples, plan, device))


def train(
    model: nn.Module, examples: Examples, plan: ClickTraining, seed: int, device: str = "cpu"
) -> list[float]:
    """Train in place; the log loss of each step. ValueError where it stops being finite."""
    step, losses = optimizers(model, plan), []
    model.train()
    for batch, labels in examples.batches(plan.batch, seed, plan.steps, device):
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=plan.autocast):
            logits = model(batch)
        losses.append(stepped(ranking_loss(logits, labels), step))
    return finite(losses)


@torch.no_grad()
def predictions(
    model: nn.Module, examples: Examples, plan: ClickTraining, device: str = "cpu"
) -> tuple[Array, Array]:
    """Logits and labels of held-out candidates, float64."""
    model.eval()
    pairs = []
    for batch, labels in examples.held_out(512, plan.evaluated, device):
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=plan.autocast):
            logits = model(batch)
        pairs.append((logits, labels))
    return joined(pairs)


__all__ = ["NEXT", "RATED", "Examples", "small", "train", "trained_quality"]
