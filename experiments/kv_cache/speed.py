"""What one layer of decode attention takes, by recipe of the cache and by peers, over sequences and contexts.

On a GPU calls are replayed from CUDA graphs over caches that together exceed the second-level cache; at each size all methods
take turns in one process. Beside them is the time in which a copy moves as many bytes as the cache has, half of them read and
half written: no floor, since attention reads alone, which is up to a tenth quicker. Stand-in: on a CPU a few small caches and
the attention of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ao_lab.kv_cache.recipe import RECIPES
from ao_lab.measure.turns import Plan, Span, Watch, interleaved, prepare, summary, watch_of
from experiments.harness.bench import repeated
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Values, attempt, kernel, status
from experiments.harness.measuring import free as free_memory
from experiments.kv_cache.decode_attention import (
    FLEX,
    NEEDS,
    PEERS,
    TRANSFORMERS,
    Heads,
    Size,
    Stored,
    ours,
    queries,
    several,
)

SPEED, DATA = "speed", "normal-tokens"
TIME, COPY = "time", "time of a copy of its bytes"
#: What peers read.
BASE = "bfloat16"
#: Recipes with a kernel of their own, in the order of pages.
TIMED = ("bfloat16", "fp8", "fp8_residual", "int8", "int4", "int4_tokens")
#: By size: all, or some where only that it runs is of interest.
RECIPES_OF = {"cuda": TIMED, "cpu": ("bfloat16", "fp8", "int4")}
PLANS = {
    "cuda": Plan(rounds=12, warmup=1, span=1e-3, most_calls=256, seconds=0.5),
    "cpu": Plan(rounds=3, warmup=1),
}
HEADS = {"cuda": Heads(), "cpu": Heads(4, 2, 64)}
SIZES = {
    # Sizes with a target first, then from short contexts to long ones.
    "cuda": tuple(dict.fromkeys((
        Size(64, 8192), Size(1, 2048), Size(1, 1024), Size(1, 131072), Size(16, 8192),
        *(Size(batch, 2**power) for power in range(10, 18) for batch in (1, 16, 64)),
    ))),
    "cpu": (Size(1, 64), Size(2, 128)),
}  # fmt: skip
#: Peers of a CPU; sizes of FlexAttention, which compiles for seconds at each.
ON_CPUS = ("SDPA, flash", TRANSFORMERS)
FLEX_AT = (Size(1, 2048), Size(16, 8192), Size(64, 8192))


def peers_of(size: Size, device: str) -> tuple[str, ...]:
    """Those that a size is timed beside."""
    names = tuple(PEERS) if device == "cuda" else ON_CPUS
    return tuple(name for name in names if name != FLEX or size in FLEX_AT)


def refusal(size: Size, heads: Heads, recipes: Sequence[str], device: str) -> str | None:
    """Why the caches of a size cannot be held at once; None where they can."""
    if device != "cuda":
        return None
    tokens = size.batch * size.tokens
    # What an earlier size has left would count as taken.
    free_memory()
    names = {BASE, *recipes}
    needed = tokens * sum(RECIPES[name].bytes_per_token(heads.keys, heads.width) for name in names)
    free = torch.cuda.mem_get_info()[0]
    # Tokens before they are stored, and what methods allocate themselves.
    if 1.15 * needed + 2**32 <= free:
        return None
    return f"does not fit: caches take {needed / 2**30:.0f} GiB of {free / 2**30:.0f}"


def measure(
    size: Size, heads: Heads, device: str, rate: float, recipes: Sequence[str] = TIMED
) -> Mapping[str, Values]:
    """Values of recipes and peers at a size, timed in turn; of one that is missing or fails its status.

    rate: bytes a second of a copy (`copy_rate`).
    """
    names = (*recipes, *peers_of(size, device))
    reason = refusal(size, heads, recipes, device)
    if reason is not None:
        return dict.fromkeys(names, status(reason))
    watch, q = watch_of(device), queries(size, heads, device)
    spans: dict[str, Span] = {}
    held: dict[str, list[Stored]] = {}
    results = {name: _status_of(name) or {} for name in names}
    for name in dict.fromkeys([BASE, *recipes]):
        results[name] = attempt(partial(_fill, held, name, size, heads, device))
    for name in names:
        if not results[name] or "status: ok" in results[name]:
            results[name] = attempt(partial(_begin, watch, q, held, name, PLANS[device], spans))
    _leave_out_failing(watch, spans, results)
    if spans:
        timed = attempt(partial(_time, watch, held, PLANS[device], spans, rate, results))
        if "status: ok" not in timed:
            results |= dict.fromkeys(spans, timed)
    return {name: results[name] for name in names}


def _fill(held: dict[str, list[Stored]], name: str, size: Size, heads: Heads, device: str) -> Values:
    """Keep the caches of a recipe; no values."""
    held[name] = several(RECIPES[name], size, heads, device)
    return {}


def _time(
    watch: Watch, held: Mapping[str, list[Stored]], plan: Plan, spans: dict[str, Span], rate: float,
    results: dict[str, Values],
) -> Values:  # fmt: skip
    """Time what was captured, and add it to the results."""
    times = interleaved(watch, spans, plan)
    for name in spans:
        copied = _caches(held, name)[0].nbytes / rate
        results[name] = {**results[name], **summary(times[name]).values("us"), COPY: (copied * 1e6, "us")}
    first = next(iter(spans))
    results[first] = {**results[first], **repeated(times, first)}
    return {}


def _leave_out_failing(watch: Watch, spans: dict[str, Span], results: dict[str, Values]) -> None:
    """Replay what was captured once, each method alone: one that fails has that as its result, and the others their times."""
    for name, span in list(spans.items()):
        tried = attempt(partial(_replay, watch, span))
        if "status: ok" not in tried:
            results[name] = tried
            del spans[name]


def _replay(watch: Watch, span: Span) -> Values:
    """No values."""
    watch.seconds([span.graph])
    return {}


def _caches(held: Mapping[str, list[Stored]], name: str) -> list[Stored]:
    """Those of a recipe; of a peer those in bfloat16. RuntimeError where they could not be filled."""
    found = held.get(name if name in RECIPES else BASE)
    if found is None:
        raise RuntimeError(f"there is no cache in {BASE} to read: filling it failed")
    return found


def _status_of(name: str) -> Values | None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return status(f"missing: {NEEDS[name]} is not installed")
    return None


def _begin(
    watch: Watch, q: Tensor, held: Mapping[str, list[Stored]], name: str, plan: Plan, spans: dict[str, Span]
) -> Values:
    """Compile, warm up and capture the calls of a method, one for each cache, into `spans`."""
    make = PEERS.get(name, ours)
    calls = [make(q, one) for one in _caches(held, name)]
    named = kernel(launched(calls[0]))
    spans[name] = prepare(watch, calls, plan)
    return named


__all__ = ["COPY", "HEADS", "SIZES", "SPEED", "TIME", "TIMED", "measure", "peers_of"]
