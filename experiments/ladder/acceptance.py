"""How many drafts of its own first layers a trained model accepts: with layer dropout and early exits in training, and without.

Byte-level models trained here from scratch, on the same text in the same order. After each of some prompts of held-out text the
model goes on greedily, by `ao_lab.SelfSpeculation` at several exits, and by greedy decoding without drafts, whose tokens are to
be the same. Tokens are bytes, easier to draft than words: rates are those of this model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ao_lab
from ao_lab.install.versions import cache_argument
from experiments.data.corpus import evaluation_texts
from experiments.harness.measuring import Values
from experiments.models.early_exit import PLAIN, Exits, as_transformers, train_with_exits
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import TINY, Budget, PretrainSettings, bits_per_byte
from experiments.runs.settings import Settings

KIND = "acceptance"
RATE, PER_ROUND, EQUAL, BITS = "acceptance", "tokens a round", "tokens equal to greedy", "bits per byte"
ARMS = {"layer dropout and early exits": Exits(), "plain training": PLAIN}


@dataclass(frozen=True)
class Plan:
    """What is trained and asked. exits: layers that draft; drafts: a round; prompts: of `prompt` bytes, `new` after each.
    seconds: of an arm, on an H200."""

    training: PretrainSettings
    exits: tuple[int, ...]
    drafts: int
    prompts: int
    prompt: int
    new: int
    evaluated: int
    seconds: float = 0.0


#: 27 million parameters in eight layers, so that an exit after two is where one after eight of 32 is.
MODEL = ModelSettings(
    name="byte-level-8-layers", width=512, layers=8, heads=4, kv_heads=4, feed_forward=1536, context=512
)
PLANS = {
    "quick": Plan(
        PretrainSettings(model=TINY, budget=Budget(bytes=24 * 8 * 128), batch=8, rate=4e-3, compiled=False),
        exits=(1,), drafts=2, prompts=1, prompt=32, new=16, evaluated=500,
    ),
    "full": Plan(
        PretrainSettings(model=MODEL, budget=Budget(bytes=24_000_000), batch=16, rate=6e-4, compiled=False),
        exits=(1, 2, 3, 4), drafts=4, prompts=16, prompt=256, new=128, evaluated=200_000, seconds=240.0,
    ),
}  # fmt: skip


def methods(plan: Plan, arm: str) -> dict[str, int]:
    """Names of rows, and their exits."""
    return {f"{arm}, exit after {one} of {plan.training.model.layers}": one for one in plan.exits}


def measure(settings: Settings, plan: Plan, arm: str) -> dict[str, Values]:
    """Train an arm; values of each exit."""
    trained = train_with_exits(plan.training, ARMS[arm], settings.corpus, settings.device)
    texts = {split: text[: plan.evaluated] for split, text in evaluation_texts(settings.corpus).items()}
    losses = bits_per_byte(trained, texts, plan.training.model.context)
    total = sum(map(len, texts.values()))
    bits = sum(losses[split] * len(text) for split, text in texts.items()) / total
    model = as_transformers(trained).to(settings.device)
    if settings.device == "cuda":
        model = model.to(torch.bfloat16)
    asked = list(prompts(b"".join(texts.values()), plan, settings.device))
    with torch.no_grad():
        return {
            name: {**accepted(model, plan, layer, asked), BITS: (bits, "bits")}
            for name, layer in methods(plan, arm).items()
        }


def prompts(text: bytes, plan: Plan, device: str) -> Iterator[Tensor]:
    """Token ids (1, prompt) from evenly spaced places of a text."""
    for number in range(plan.prompts):
        first = number * max(0, len(text) - plan.prompt) // max(1, plan.prompts)
        yield torch.tensor([list(text[first : first + plan.prompt])], device=device)


def accepted(model: Any, plan: Plan, exit_layer: int, asked: list[Tensor]) -> Values:
    """Share of drafts that were right, tokens that a round gave, and how many of all tokens are those of greedy decoding."""
    speculation = ao_lab.SelfSpeculation(
        model, exit_layer=exit_layer, drafts=plan.drafts, max_length=plan.prompt + plan.new
    )
    right = rounds = equal = 0
    for ids in asked:
        found = speculation.generate(ids, plan.new)
        right, rounds = right + found.accepted, rounds + found.rounds
        equal += int((found.tokens == greedy(model, ids, plan.new)).sum()) - ids.shape[1]
    return {
        RATE: (right / (rounds * plan.drafts), "ratio"),
        PER_ROUND: (1 + right / rounds, "tokens"),
        EQUAL: (equal / (len(asked) * plan.new), "ratio"),
    }


def greedy(model: Any, ids: Tensor, new: int) -> Tensor:
    """Token by token through the same kind of cache."""
    cache = ao_lab.KVCache(model, "bfloat16", ids.shape[1] + new)
    tokens, last, held = [ids], ids, {cache_argument(model): cache}
    for _ in range(new):
        last = model(last, **held, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        tokens.append(last)
    return torch.cat(tokens, 1)
