"""A needle in a haystack: a small attention model trained here, asked for one token among many.

A context is random noise tokens with one needle for each of `KEYS` keys at random places; a needle's token says key and value,
and the model, asked for a key, names its value. The model has one attention layer without positions, so that it takes contexts
of any length. It is trained on short contexts whose noise counts as often as that of contexts to `Plan.longest` tokens does,
with scores of bounded range and values of one length (as models that normalize queries, keys and values have them): in the
longest contexts a needle is a few percent of the attention, beside the mean value of all noise.

Asked are caches in low precision with exact sums, and FP8 attention (weights and values in e4m3) by the model of Hopper's
tensor core, in one chain over the context and in chains of 128 tokens (`reference.attention`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import reference
from ao_lab.kv_cache.recipe import RECIPES
from reference.attention.attention import attention
from reference.schemes.schemes import Scheme

KEYS, VALUES, NOISE = 8, 16, 64
#: Between the largest and the least score: queries and keys have one length, as in models that normalize them.
MARGIN = 9.5
#: How keys and values are stored and sums are taken: a recipe, tokens of a chain (0: exact sums).
METHODS: Mapping[str, tuple[str, int | None]] = {
    "exact": ("bfloat16", 0), "fp8 cache": ("fp8", 0), "int8 cache": ("int8", 0), "int4 cache": ("int4", 0),
    "fp8 sums, one chain": ("fp8", None), "fp8 sums, chains of 128": ("fp8", 128),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A training: steps of `batch` contexts of `length` tokens; width of the model's one head."""

    steps: int = 400
    batch: int = 16
    length: int = 256
    longest: int = 131072
    width: int = 16
    rate: float = 0.02
    seed: int = 0


class NeedleModel(nn.Module):
    """Embedding, one head of attention, answers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.noise = nn.Embedding(NOISE, 2 * width)
        self.keys = nn.Embedding(KEYS, 2 * width)
        self.values = nn.Embedding(VALUES, 2 * width)
        self.asked = nn.Embedding(KEYS, width)
        self.key = nn.Linear(2 * width, width, bias=False)
        self.value = nn.Linear(2 * width, width, bias=False)
        self.answer = nn.Linear(width, VALUES)

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, 1, KEYS, width), keys and values (B, 1, length, width) of ids (B, length)."""
        table = torch.cat([self.noise.weight, (self.keys.weight[:, None] + self.values.weight).flatten(0, 1)])
        x = table[ids][:, None]
        q = functional.normalize(self.asked.weight, dim=-1) * (MARGIN / 2 * (x.shape[-1] // 2) ** 0.5)
        return (
            q.expand(len(ids), 1, -1, -1),
            functional.normalize(self.key(x), dim=-1),
            functional.normalize(self.value(x), dim=-1),
        )

    def forward(self, ids: Tensor, repeats: float = 1.0) -> Tensor:
        """Logits of every key's value: (B, KEYS, VALUES). repeats: how often each noise token counts."""
        bias = torch.where(ids < NOISE, math.log(repeats), 0.0)[:, None, None]
        return self.answer(functional.scaled_dot_product_attention(*self.states(ids), attn_mask=bias)[:, 0])


def contexts(batch: int, length: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """ids (batch, length) and the values (batch, KEYS) of their needles."""
    ids = draw.integers(0, NOISE, (batch, length))
    values = draw.integers(0, VALUES, (batch, KEYS))
    places = np.argsort(draw.random((batch, length)), axis=1)[:, :KEYS]
    np.put_along_axis(ids, places, NOISE + np.arange(KEYS) * VALUES + values, axis=1)
    return torch.from_numpy(ids), torch.from_numpy(values)


def trained(plan: Plan) -> NeedleModel:
    """The model after its training, on a CPU the same bit for bit."""
    draw = np.random.default_rng(plan.seed)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(plan.seed)
        model = NeedleModel(plan.width)
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=0.0)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * (1 - step / plan.steps)
        ids, values = contexts(plan.batch, plan.length, draw)
        repeats = float((plan.longest / plan.length) ** draw.random())
        loss = functional.cross_entropy(model(ids, repeats).flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


class Asked(NamedTuple):
    """Answers over many needles: shares that are right, and that are not those of exact sums over unrounded states."""

    found: float
    unlike: float


def asked(
    models: Sequence[NeedleModel], length: int, method: str, contexts_each: int, seed: int = 0
) -> Asked:
    """Every model is asked for all needles of so many contexts of this length."""
    right, unlike = [], []
    for number, model in enumerate(models):
        draw = np.random.default_rng((seed, number, length))
        for _ in range(contexts_each):
            ids, values = contexts(1, length, draw)
            said = answers(model, ids, method)
            right.append((said == values).double().mean())
            unlike.append((said != answers(model, ids, "exact")).double().mean())
    return Asked(*(float(torch.stack(x).mean()) for x in (right, unlike)))


def answers(model: NeedleModel, ids: Tensor, method: str) -> Tensor:
    """What a model says of every key, (B, KEYS)."""
    y = attended(*(x.numpy() for x in model.states(ids)), *METHODS[method])
    return model.answer(torch.from_numpy(y)[:, 0]).argmax(-1)


def attended(q: Any, k: Any, v: Any, recipe: str, chain: int | None) -> Any:
    """Attention to stored keys and values, float32; chain 0: exact sums, else FP8 sums of so many tokens, None of all."""
    chosen = RECIPES[recipe]
    if chain != 0:
        held = reference.quantize(v, "fp8_tensorwise")
        values = np.asarray(reference.decode(held.codes, held.scheme.element), np.float32)
        return attention(q, k, values, accumulation="hopper_fp8", promote=chain) * np.float32(held.scale)
    stored = [
        _stored(x, scheme, axis) for x, scheme, axis in zip((k, v), chosen.schemes, chosen.axes, strict=True)
    ]
    return attention(q, *stored, computed=(k, v), window=chosen.window)


def _stored(x: Any, scheme: Scheme | None, axis: int) -> Any:
    """What a cache holds of x (B, heads, length, width): of blocks along tokens the full ones, behind them x."""
    if scheme is None:
        return x
    block = scheme.scale.block if axis == 2 else 1
    assert isinstance(block, int)
    whole = x.shape[2] // block * block
    held = reference.dequantize(reference.quantize(x[:, :, :whole], scheme, axis=axis))
    return np.concatenate([np.asarray(held), x[:, :, whole:]], 2)


__all__ = ["METHODS", "Asked", "NeedleModel", "Plan", "answers", "asked", "attended", "contexts", "trained"]
