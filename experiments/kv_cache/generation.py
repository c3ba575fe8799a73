"""What a token takes in a whole model, by recipe of the cache: transformers' `generate()`, and a step in a loop of one's own.

**generate()** (`GENERATE`): with transformers' own static cache, and with ours by `use_kv_cache_`; from the difference of two
lengths of answers, so that the prompt is not in it. **A step** (`STEP`): the model's own forward over a long context, on a GPU
replayed from a CUDA graph, all methods in turn; the cache is filled with random tokens, since no time depends on them. Weights
are random, at the shapes of Llama-3.1-8B, bfloat16 unless the method says int4. Stand-in: on a CPU a tiny model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_lab.kv_cache.cache import KVCache, use_kv_cache_
from ao_lab.kv_cache.recipe import RECIPES
from ao_lab.measure.generation import by_transformers
from ao_lab.measure.turns import Plan, Span, Watch, interleaved, prepare, summary, watch_of
from experiments.harness.bench import repeated
from experiments.harness.measuring import Deadline, Values, attempt, status
from experiments.kv_cache.decode_attention import AT_ONCE
from experiments.kv_cache.speed import TIMED

GENERATE, STEP, DATA = "generate", "step", "random-weights"
TIME, FIRST = "time", "first call"
OWN = "transformers' cache"
#: A recipe's name behind weights in int4.
INT4 = "int4 weights, "
#: Room behind the context: steps before and in what is timed.
SPARE = 128
#: Answers that are timed, after two that compile.
ANSWERS = 3


@dataclass(frozen=True)
class Case:
    """A Llama model, sequences, and tokens of a context; of `generate()` new tokens of a long and of a short answer."""

    name: str
    batch: int
    context: int
    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    long: int = 72
    short: int = 8

    @property
    def setting(self) -> str:
        """As rows have it."""
        return f"{self.name}, {self.batch} x {self.context}"

    def model(self, device: str) -> Any:
        """With random bfloat16 weights, made on the device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=max(131072, self.context) + 2 * SPARE,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


_TINY = {"layers": 2, "hidden": 128, "intermediate": 256, "vocabulary": 512, "heads": 2, "kv_heads": 1}
GENERATED = {
    "cuda": Case("8 layers of Llama-3.1-8B", 16, 8192),
    "cpu": Case("2 small layers", 2, 16, **_TINY, long=6, short=2),
}
STEPPED = {
    "cuda": Case("Llama-3.1-8B", 1, 131072, layers=32),
    "cpu": Case("2 small layers", 1, 192, **_TINY),
}
#: Of a step: with bfloat16 weights, then with int4 weights.
STEPS = (
    OWN,
    "bfloat16",
    "fp8",
    "int8",
    "int4",
    "int4_tokens",
    *(INT4 + name for name in ("bfloat16", "int4", "int4_tokens")),
)
PLANS = {"cuda": Plan(rounds=10, warmup=1, span=1e-9), "cpu": Plan(rounds=2, warmup=1, span=1e-9)}


def generated(
    case: Case, device: str, recipes: Sequence[str], deadline: Deadline
) -> Iterator[tuple[str, Values]]:
    """Milliseconds a token of `generate()` by method, as they are measured, transformers' own cache first; of one that fails or
    that the deadline does not reach its status."""
    model = case.model(device)
    prompt = torch.randint(3, case.vocabulary, (case.batch, case.context), device=device)
    for name in (OWN, *recipes):
        reason = deadline.reason()
        yield name, status(reason) if reason else attempt(partial(_generated, case, model, prompt, name))


def _generated(case: Case, model: Any, prompt: Tensor, name: str) -> Values:
    torch._dynamo.reset()
    use_kv_cache_(model, None if name == OWN else name)
    # transformers remembers that an earlier cache was compiled.
    if hasattr(model, "_previous_max_cache_length"):
        del model._previous_max_cache_length
    more = {"cache_implementation": "static"} if name == OWN else {}

    def seconds(new: int) -> float:
        return by_transformers(model, prompt, new, **more)[0]

    first = seconds(case.long)
    seconds(case.long)
    short = min(seconds(case.short) for _ in range(2))
    each = [(seconds(case.long) - short) / (case.long - case.short) * 1e3 for _ in range(ANSWERS)]
    return {
        TIME: (statistics.median(each), "ms"), f"{TIME}, least": (min(each), "ms"), f"{TIME}, most": (max(each), "ms"),
        FIRST: (first, "s"),
    }  # fmt: skip


def stepped(case: Case, device: str, recipes: Sequence[str] = TIMED) -> Mapping[str, Values]:
    """Milliseconds of a step by method, all in turn; of one that fails its status."""
    watch, plan, model = watch_of(device), PLANS[device], case.model(device)
    spans: dict[str, Span] = {}
    results: dict[str, Values] = {}
    wanted = [name for name in STEPS if name == OWN or name.removeprefix(INT4) in recipes]
    # Graphs read the weights that they were captured with: each sort has a model.
    for name in sorted(wanted, key=lambda one: one.startswith(INT4)):
        if name.startswith(INT4) and not hasattr(model, "in_int4"):
            model = _in_int4(case.model(device))
        results[name] = attempt(partial(_begin, watch, plan, case, model, name, spans))
    if spans:
        times = interleaved(watch, spans, plan)
        for name in spans:
            results[name] = {**results[name], **summary(times[name]).values()}
        first = next(iter(spans))
        results[first] = {**results[first], **repeated(times, first)}
    return results


def _in_int4(model: Any) -> Any:
    from ao_lab import Int4WeightOnlyConfig, quantize_

    quantize_(model, Int4WeightOnlyConfig())
    model.in_int4 = True
    return model


def _begin(watch: Watch, plan: Plan, case: Case, model: Any, name: str, spans: dict[str, Span]) -> Values:
    """Capture the step of a method over a filled cache, which its graph goes on reading."""
    recipe = name.removeprefix(INT4)
    use_kv_cache_(model, None if recipe == OWN else recipe)
    cache = filled_cache(model, case, None if recipe == OWN else recipe)
    token = torch.full((case.batch, 1), 3, device=model.device)

    def step() -> Tensor:
        with torch.no_grad():
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        return token

    spans[name] = prepare(watch, [step], plan)
    taken = next(layer for layer in cache.layers)
    return {"bytes of the cache": (case.layers * _nbytes(taken), "B")}


def _nbytes(layer: Any) -> int:
    states = [layer.keys, layer.values]
    tensors = [t for one in states for t in ([one] if isinstance(one, Tensor) else one.store.tensors())]
    return sum(t.nbytes for t in tensors)


def filled_cache(model: Any, case: Case, recipe: str | None) -> Any:
    """A cache with a context of random tokens; recipe None: transformers' static one."""
    from transformers import StaticCache

    room = case.context + SPARE
    cache = (
        StaticCache(config=model.config, max_cache_len=room)
        if recipe is None
        else KVCache(model, RECIPES[recipe], room)
    )
    for start in range(0, case.context, AT_ONCE):
        shape = (case.batch, case.kv_heads, min(AT_ONCE, case.context - start), case.hidden // case.heads)
        for layer in range(case.layers):
            k, v = (torch.randn(shape, device=model.device, dtype=torch.bfloat16) for _ in range(2))
            cache.update(k, v, layer)
    return cache


__all__ = [
    "GENERATE",
    "GENERATED",
    "INT4",
    "OWN",
    "STEP",
    "STEPPED",
    "STEPS",
    "Case",
    "filled_cache",
    "generated",
    "stepped",
]
