"""HSTU, the sequential transducer of generative recommendation (arXiv 2402.17152), as a ranking model.

A layer (the paper's equations 1 to 3) projects the normalized stream to u, v, q and k by one linear layer, weighs values by
SiLU(q k^T a + bias) / N instead of a softmax, N the model's longest sequence, and multiplies the normalized result by u:

    y = x + W2 [u, o, u * norm(o)] + b2,    o_i = sum_j SiLU(a q_i . k_j + p[i - j] + t[bucket(time_i - time_j)]) v_j / N

The paper has SiLU on all of u, v, q, k and the last linear layer over u * norm(o) alone; the open implementation that industry
runs has it on u alone, and [u, o, u * norm(o)] (`activate_all`, `concatenate`). p and t are learned tables, a number a distance
and a number a power of two of seconds; without `relative_bias` positions are embedded instead.

A user's history stands before the candidates that are ranked: history is causal, and a candidate attends to the history and to
itself, no matter how many others there are. The head gives logits of each task at each candidate.

Batches are jagged: tokens of all users one after the other. Linear layers and norms see those alone; attention pads
(`padded_attention`, quadratic in memory), goes user by user over blocks of queries (`blocked_attention`), or is one kernel on a
GPU (`fused_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Queries of a block of `blocked_attention`.
BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class HSTUConfig:
    """Sizes of an HSTU. `name` is what rows call it.

    items, actions: entries of the embedding tables; tasks: logits of a candidate. length: the longest sequence, candidates
    included, by which attention divides. scale: a of the module text; None: 1 / sqrt(qk_width). ValueError for sizes below 1.
    """

    name: str
    items: int
    actions: int = 8
    tasks: int = 1
    width: int = 512
    layers: int = 5
    heads: int = 4
    qk_width: int = 128
    v_width: int = 128
    length: int = 16384
    scale: float | None = None
    relative_bias: bool = True
    buckets: int = 64
    activate_all: bool = False
    concatenate: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        sizes = (
            "items",
            "actions",
            "tasks",
            "width",
            "layers",
            "heads",
            "qk_width",
            "v_width",
            "length",
            "buckets",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of an HSTU is 1 or more, got {getattr(self, name)}")

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Features of u, v, q and k, all heads together."""
        return tuple(self.heads * one for one in (self.v_width, self.v_width, self.qk_width, self.qk_width))  # type: ignore[return-value]

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.qk_width**-0.5 if self.scale is None else self.scale


#: DLRMv3 of MLPerf inference: dense part exact, the table cut to what a test of speed needs.
DLRM_V3 = HSTUConfig(name="hstu-dlrmv3-random", items=1_000_000, relative_bias=False)
#: The paper's large model of public data, ML-3B's length.
ML_3B = HSTUConfig(
    name="hstu-ml3b-random", items=26_744, width=256, layers=16, heads=8, qk_width=32, v_width=32, length=500,
    activate_all=True, concatenate=False,
)  # fmt: skip
TINY = HSTUConfig(
    name="hstu-tiny", items=64, width=32, layers=2, heads=2, qk_width=16, v_width=16, length=48, buckets=16
)


@dataclass(frozen=True)
class Sequences:
    """A jagged batch of B users and T tokens, on one device.

    items, actions, times: (T) int64; actions of candidates are not read; times in seconds, ascending for each user. lengths,
    candidates: of each user (host integers, so that nothing waits for a GPU), candidates the last tokens of a user.
    ValueError where these do not fit together.
    """

    items: Tensor
    actions: Tensor
    times: Tensor
    lengths: tuple[int, ...]
    candidates: tuple[int, ...]

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        if not (len(self.items) == len(self.actions) == len(self.times) == total):
            raise ValueError(
                f"lengths add up to {total} tokens, and there are {len(self.items)} items, {len(self.actions)} actions and "
                f"{len(self.times)} times"
            )
        if len(self.candidates) != len(self.lengths) or any(
            not 0 <= some <= all_ for some, all_ in zip(self.candidates, self.lengths, strict=True)
        ):
            raise ValueError(
                f"each user has 0 or more candidates among its tokens, got {self.candidates} of {self.lengths}"
            )

    @classmethod
    def of_padded(
        cls, items: Tensor, actions: Tensor, times: Tensor, lengths: Sequence[int], candidates: Sequence[int]
    ) -> Sequences:
        """From (B, N) tensors, padded on the right; what is behind a user's length is not read."""
        there = (
            torch.arange(items.shape[1], device=items.device)
            < torch.tensor(lengths, dtype=torch.int64, device=items.device)[:, None]
        )
        return cls(items[there], actions[there], times[there], tuple(lengths), tuple(candidates))

    @property
    def longest(self) -> int:
        """Tokens of the longest user; 0 of an empty batch."""
        return max(self.lengths, default=0)

    def layout(self) -> Layout:
        """Where each token stands."""
        device = self.items.device
        lengths, candidates = (
            torch.tensor(one, dtype=torch.int64, device=device) for one in (self.lengths, self.candidates)
        )
        users = torch.repeat_interleave(lengths, output_size=len(self.items))
        starts = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(len(self.items), device=device) - starts[users]
        return Layout(self, users, positions, starts, lengths, lengths - candidates)


@dataclass(frozen=True)
class Layout:
    """users, positions: (T), of each token; starts, lengths, history: (B), a user's first token, its tokens, those before its
    candidates."""

    batch: Sequences
    users: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    history: Tensor

    @property
    def is_candidate(self) -> Tensor:
        """(T), bool."""
        return self.positions >= self.history[self.users]

    def pad(self, x: Tensor) -> Tensor:
        """(T, ...) to (B, N, ...), zeros behind each user."""
        padded = x.new_zeros(len(self.batch.lengths), self.batch.longest, *x.shape[1:])
        return padded.index_put((self.users, self.positions), x)

    def unpad(self, x: Tensor) -> Tensor:
        """(B, N, ...) to (T, ...)."""
        return x[self.users, self.positions]


def visible(query: Tensor, key: Tensor, history: Tensor | int) -> Tensor:
    """Whether tokens at positions `query` see those at `key` (broadcast): history is causal, a candidate sees history and
    itself."""
    return (key <= query) & ((key < history) | (key == query))


class RelativeBias(nn.Module):
    """A number for every distance of positions and for every power of two of seconds between them; all candidates stand where
    the first does."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(config.length))
        self.times = nn.Parameter(torch.zeros(config.buckets))

    def forward(self, query: Tensor, key: Tensor, query_time: Tensor, key_time: Tensor) -> Tensor:
        """Positions and times (..., Q, 1) and (..., 1, K) to (..., Q, K)."""
        distance = (query - key).clamp(0, len(self.positions) - 1)
        # log2 of 0 seconds and of 1 is bucket 0; exponents are exact, logarithms round.
        seconds = (query_time - key_time).clamp(min=1).to(torch.float32)
        bucket = (torch.frexp(seconds).exponent - 1).long().clamp(max=len(self.times) - 1)
        distance, bucket = torch.broadcast_tensors(distance, bucket)
        return entries(self.positions, distance) + entries(self.times, bucket)


def entries(table: Tensor, index: Tensor) -> Tensor:
    """table[index] of a table (L) and an index (..., K), whose gradient is summed row by row of K first. Of plain indexing a
    GPU adds all that meet in one entry one after the other, and there are millions of indices for tens of entries."""
    return table.expand(*index.shape[:-1], -1).gather(-1, index)


#: q, k, v: (T, heads, width) -> (T, heads, width).
Attention = Callable[[Tensor, Tensor, Tensor, Layout, RelativeBias | None, HSTUConfig], Tensor]


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: RelativeBias | None, config: HSTUConfig
) -> Tensor:
    """Over (B, heads, N, N) scores of the padded batch: the eager form."""
    q, k, v = (layout.pad(one) for one in (q, k, v))
    at = torch.arange(layout.batch.longest, device=q.device)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * config.factor
    if bias is not None:
        times = layout.pad(layout.batch.times)
        queries = torch.minimum(at, layout.history[:, None])[:, :, None]
        scores = scores + bias(queries, at, times[:, :, None], times[:, None])[:, None].to(q.dtype)
    mask = visible(at[:, None], at, layout.history[:, None, None])[:, None]
    weights = functional.silu(scores) / config.length * mask
    return layout.unpad(torch.einsum("bhqk,bkhd->bqhd", weights, v))


# A compiler would unroll the loop over users and blocks into a program of thousands of operations.
@torch.compiler.disable
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: RelativeBias | None, config: HSTUConfig
) -> Tensor:
    """User by user, over blocks of queries and the keys up to their end: no padding, half of the arithmetic, little memory."""
    parts, begin = [], 0
    for length, candidates in zip(layout.batch.lengths, layout.batch.candidates, strict=True):
        user = slice(begin, begin + length)
        states = q[user], k[user], v[user], layout.batch.times[user]
        rows = [slice(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]
        parts += [_block(*states, length - candidates, one, bias, config) for one in rows]
        begin += length
    return torch.cat(parts) if parts else v


def _block(
    q: Tensor, k: Tensor, v: Tensor, times: Tensor, history: int, rows: slice, bias: RelativeBias | None, config: HSTUConfig
) -> Tensor:  # fmt: skip
    keys = torch.arange(rows.stop, device=q.device)
    queries = keys[rows.start :, None]
    scores = torch.einsum("qhd,khd->hqk", q[rows], k[: rows.stop]) * config.factor
    if bias is not None:
        distance_from = queries.clamp(max=history)
        scores = scores + bias(distance_from, keys, times[rows, None], times[: rows.stop]).to(q.dtype)
    weights = functional.silu(scores) / config.length * visible(queries, keys, history)
    return torch.einsum("hqk,khd->qhd", weights, v[: rows.stop])


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: RelativeBias | None, config: HSTUConfig
) -> Tensor:
    """One kernel over the jagged batch, 16-bit tensors on a GPU, forward only; elsewhere `blocked_attention`."""
    if not q.is_cuda:
        return blocked_attention(q, k, v, layout, bias, config)
    return by_kernel(q, k, v, layout, bias, config)


def by_kernel(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: RelativeBias | None, config: HSTUConfig
) -> Tensor:
    """`fast.kernels.attention.pointwise`."""
    from fast.kernels.attention.pointwise import pointwise_attention

    tables = () if bias is None else (layout.batch.times, bias.positions, bias.times)
    found: Tensor = pointwise_attention(
        q,
        k,
        v,
        layout.starts,
        layout.lengths,
        layout.history,
        layout.batch.longest,
        config.factor,
        float(config.length),
        *tables,
    )
    return found


class PointwiseAttention(nn.Module):
    """Attention of a layer, with its bias; `function` is how it is computed."""

    def __init__(self, config: HSTUConfig, function: Attention) -> None:
        super().__init__()
        self.config, self.function = config, function
        self.bias = RelativeBias(config) if config.relative_bias else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """(T, heads, width) to the same."""
        return self.function(q, k, v, layout, self.bias, self.config)


class HSTULayer(nn.Module):
    """One layer; linear layers are `uvqk` (width to 2 v and 2 qk of all heads) and `output`."""

    def __init__(self, config: HSTUConfig, attention: Attention = padded_attention) -> None:
        super().__init__()
        self.config, self.attention = config, PointwiseAttention(config, attention)
        inner = config.widths[0]
        self.input_norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.uvqk = nn.Linear(config.width, sum(config.widths))
        self.attention_norm = nn.LayerNorm(inner, eps=config.epsilon)
        self.output = nn.Linear(inner * (3 if config.concatenate else 1), config.width)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(T, width) to the same."""
        config = self.config
        projected = self.uvqk(self.input_norm(x))
        if config.activate_all:
            projected = functional.silu(projected)
        u, v, q, k = projected.split(config.widths, -1)
        if not config.activate_all:
            u = functional.silu(u)
        v, q, k = (one.unflatten(-1, (config.heads, -1)) for one in (v, q, k))
        attended = self.attention(q, k, v, layout).flatten(1)
        gated = u * self.attention_norm(attended)
        return x + self.output(torch.cat((u, attended, gated), -1) if config.concatenate else gated)


class HSTU(nn.Module):
    """Embeddings, layers, and a head for each candidate."""

    def __init__(self, config: HSTUConfig, attention: Attention = padded_attention) -> None:
        super().__init__()
        self.config = config
        self.items = nn.Embedding(config.items, config.width)
        self.actions = nn.Embedding(config.actions, config.width)
        self.positions = None if config.relative_bias else nn.Embedding(config.length, config.width)
        self.layers = nn.ModuleList(HSTULayer(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.head = nn.Linear(config.width, config.tasks)

    def use_attention(self, attention: Attention) -> None:
        """Attention of all layers."""
        for layer in self.layers:
            layer.attention.function = attention  # type: ignore[union-attr]

    def encode(self, layout: Layout) -> Tensor:
        """The stream (T, width) behind the last norm."""
        batch = layout.batch
        x = self.items(batch.items)
        x = x + self.actions(batch.actions) * ~layout.is_candidate[:, None]
        if self.positions is not None:
            # All candidates are the next item.
            places = torch.minimum(layout.positions, layout.history[layout.users])
            x = x + self.positions(places.clamp(max=self.config.length - 1))
        for layer in self.layers:
            x = layer(x, layout)
        encoded: Tensor = self.norm(x)
        return encoded

    def rank(self, layout: Layout, index: Tensor) -> Tensor:
        """Logits (candidates of all users, tasks) of the tokens at `index`, with nothing that waits for a GPU."""
        logits: Tensor = self.head(self.encode(layout)[index])
        return logits

    def forward(self, batch: Sequences) -> Tensor:
        """Logits (candidates of all users, tasks), user by user. ValueError for a user that is longer than `config.length`."""
        if batch.longest > self.config.length:
            raise ValueError(
                f"a user has {batch.longest} tokens and this HSTU is for {self.config.length}; drop the oldest"
            )
        return self.rank(batch.layout(), candidate_index(batch).to(batch.items.device))


def candidate_index(batch: Sequences) -> Tensor:
    """(candidates of all users) places of candidates among the tokens, on the host."""
    ends = torch.cumsum(torch.tensor(batch.lengths, dtype=torch.int64), 0).tolist()
    parts = [torch.arange(end - some, end) for end, some in zip(ends, batch.candidates, strict=True)]
    return torch.cat(parts) if parts else torch.arange(0)


def ranking_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy of (candidates, tasks), float32."""
    return functional.binary_cross_entropy_with_logits(logits.float(), labels.float())


def random_batch(
    config: HSTUConfig, users: int, candidates: int, seed: int, device: str = "cpu"
) -> Sequences:
    """Users of lengths uniform in 0.8 to 1 of the longest, as the public benchmark draws them, and random tokens."""
    draw = torch.Generator().manual_seed(seed)
    low = max(candidates, math.ceil(0.8 * config.length))
    lengths = tuple(torch.randint(low, config.length + 1, (users,), generator=draw).tolist())
    total = sum(lengths)
    items, actions = (
        torch.randint(most, (total,), generator=draw) for most in (config.items, config.actions)
    )
    gaps = torch.randint(1, 86_400, (total,), generator=draw)
    times = torch.cat([one.cumsum(0) for one in gaps.split(lengths)])
    return Sequences(items.to(device), actions.to(device), times.to(device), lengths, (candidates,) * users)
