"""What a token of a whole model takes, by recipe of the cache: transformers' compiled `generate()`, and a loop of one's own.

**generate()** (`GENERATE`): with transformers' own static cache, and with ours by `use_kv_cache_`, as users call it: compiled
as transformers compiles by default, with attention "sdpa" where it is transformers'. Each method has a model, all of the same
weights; after calls that compile they answer in turn. A token's time is the median of an answer's steps behind its first ones,
by the host's clock, since transformers waits for every token. **Over a long context** (`LONG`) it is given a cache that is
filled already; methods with `PREPARED` behind their name are compiled as `prepare_for_generate_` has it. **A step** (`STEP`):
the model's own forward over a long context, on a GPU replayed from a CUDA graph, all methods in turn; those with `COMPILED`
behind their name are a step of `ao_lab.GreedyDecoding`, which torch compiles and which
reads no mask. Filled caches hold random tokens, since no time depends on them. Weights are random, at the shapes of
Llama-3.1-8B, bfloat16 unless the method says int4. Stand-in: on a CPU a tiny model, which nobody compiles.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ao_lab.compile.generation import prepare_for_generate_
from ao_lab.compile.joined_linears import join_weights_
from ao_lab.greedy_decoding import GreedyDecoding
from ao_lab.install.versions import cache_argument
from ao_lab.kv_cache.cache import KVCache, use_kv_cache_
from ao_lab.kv_cache.recipe import RECIPES
from ao_lab.measure.memory import by_transformers
from ao_lab.measure.turns import Plan, Span, Watch, interleaved, prepare, summary, watch_of
from experiments.harness.bench import repeated
from experiments.harness.measuring import Deadline, Values, attempt, bar, status
from experiments.kv_cache.decode_attention import AT_ONCE

GENERATE, LONG, STEP, DATA = "generate", "generate_long", "step", "random-weights"
TIME, FIRST = "time", "first call"
OWN = "transformers' cache"
#: A recipe's name behind weights in int4.
INT4 = "int4 weights, "
#: Behind the name of a method whose step is that of `GreedyDecoding`.
COMPILED = ", compiled"
#: The same of one whose `generate()` `prepare_for_generate_` has prepared.
PREPARED = ", prepared"
#: Room behind the context: steps before and in what is timed, of all methods that share a cache.
SPARE = 128
#: Answers of each method, in turn, after two that compile.
ANSWERS = 5
#: Compiled programs of one function at once: those of all methods, which torch forgets beyond its own limit.
PROGRAMS = 64
COMPILED_PROGRAMS = "programs compiled"


@dataclass(frozen=True)
class Case:
    """A Llama model, sequences, and tokens of a context; of `generate()` tokens of an answer, and of them the first ones, whose
    time is not counted."""

    name: str
    batch: int
    context: int
    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    new: int = 72
    first: int = 8
    note: str = ""

    @property
    def setting(self) -> str:
        """As rows have it."""
        return f"{self.name}, {self.batch} x {self.context}{self.note}"

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


#: What a setting says where no prompt is read.
FILLED = ", cache filled before"
_TINY = {"layers": 2, "hidden": 128, "intermediate": 256, "vocabulary": 512, "heads": 2, "kv_heads": 1}
GENERATED = {
    "cuda": Case("8 layers of Llama-3.1-8B", 16, 8192),
    "cpu": Case("2 small layers", 2, 16, **_TINY, new=6, first=2),
}
ANSWERED = {
    "cuda": Case("Llama-3.1-8B", 1, 131072, layers=32, new=24, note=FILLED),
    "cpu": Case("2 small layers", 1, 192, **_TINY, new=6, first=2, note=FILLED),
}
STEPPED = {
    "cuda": Case("Llama-3.1-8B", 1, 131072, layers=32),
    "cpu": Case("2 small layers", 1, 192, **_TINY),
}
#: Compiled steps of a GPU: on a CPU there is nothing to be gained.
COMPILED_STEPS = ("bfloat16", "fp8", *(INT4 + name for name in ("int4", "int4_tokens")))
#: Of a step: over transformers' own cache (first: what is not captured runs by the attention that was set last, and ours reads
#: every cache), compiled, with bfloat16 weights, with int4 weights.
STEPS = (
    OWN,
    *(name + COMPILED for name in COMPILED_STEPS),
    "bfloat16",
    "fp8",
    "int8",
    "int4",
    "int4_tokens",
    *(INT4 + name for name in ("bfloat16", "int4", "int4_tokens")),
)
#: The same of `generate()` over a filled cache, prepared or as transformers compiles by default, whose own cache is last: it
#: takes the longest.
ANSWERS_OF = (
    *(name + PREPARED for name in ("bfloat16", INT4 + "int4", "fp8")),
    "bfloat16",
    "fp8",
    *(INT4 + name for name in ("int4", "int4_tokens")),
    OWN,
)
PLANS = {"cuda": Plan(rounds=10, warmup=1, span=1e-9), "cpu": Plan(rounds=2, warmup=1, span=1e-9)}


@dataclass
class Arm:
    """A method of `generate()`: its model, and what each call gets besides the prompt."""

    model: Any
    options: Callable[[], Mapping[str, Any]]
    #: Milliseconds a token of each answer.
    times: list[float] = field(default_factory=list)

    def steps(self, prompt: Tensor, new: int) -> list[float]:
        """Seconds of each step of an answer but the first."""
        from transformers import StoppingCriteriaList

        marks: list[float] = []
        never = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)

        def clock(input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
            # transformers has waited for the token of the step before.
            marks.append(time.perf_counter())
            return never

        by_transformers(
            self.model, prompt, new, stopping_criteria=StoppingCriteriaList([clock]), **self.options()
        )
        return [after - before for before, after in pairwise(marks)]

    def answer(self, prompt: Tensor, case: Case) -> Values:
        """Remember the median step of an answer; no values."""
        self.times.append(statistics.median(self.steps(prompt, case.new)[case.first :]) * 1e3)
        return {}

    def compile(self, prompt: Tensor, case: Case) -> Values:
        """Two answers, of which transformers compiles the first, and records CUDA graphs in both."""
        programs, started = _programs(), time.perf_counter()
        self.steps(prompt, case.new)
        first = time.perf_counter() - started
        self.steps(prompt, case.new)
        return {FIRST: (first, "s"), COMPILED_PROGRAMS: (_programs() - programs, "")}

    def values(self) -> Values:
        """Over all answers."""
        return {
            TIME: (statistics.median(self.times), "ms"), f"{TIME}, least": (min(self.times), "ms"),
            f"{TIME}, most": (max(self.times), "ms"), "answers": (len(self.times), ""),
        }  # fmt: skip


def _programs() -> int:
    """How many programs torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def sharing(model: Any) -> Any:
    """A copy of a model with the same parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})


#: Makes the arm of a method.
Make = Callable[[str], Arm]


def recipe_of_method(name: str) -> str | None:
    """What a method stores its cache by; None for transformers' own."""
    return None if name == OWN else name.removeprefix(INT4).removesuffix(COMPILED).removesuffix(PREPARED)


def methods_of(part: str, recipes: Sequence[str], compiled: bool = True) -> list[str]:
    """The methods of GENERATE, LONG or STEP that have one of these recipes, and transformers' own cache. compiled: those that
    are compiled otherwise than by default, too."""
    if part == GENERATE:
        return [OWN, *recipes]
    every = ANSWERS_OF if part == LONG else STEPS
    names = [one for one in every if compiled or not one.endswith((COMPILED, PREPARED))]
    return [name for name in names if name == OWN or recipe_of_method(name) in recipes]


def generated(case: Case, device: str, names: Sequence[str], deadline: Deadline) -> Mapping[str, Values]:
    """Milliseconds a token of `generate()` by method, answers in turn; of one that fails or that the deadline does not reach
    its status."""
    prompt = torch.randint(3, case.vocabulary, (case.batch, case.context), device=device)
    model: list[Any] = []

    def make(name: str) -> Arm:
        model[:] = model or [case.model(device)]
        own = sharing(model[0])
        use_kv_cache_(own, None if name == OWN else name)
        return Arm(own, lambda: {"cache_implementation": "static"} if name == OWN else {})

    return _answers(case, prompt, names, make, deadline)


def answered(case: Case, device: str, names: Sequence[str], deadline: Deadline) -> Mapping[str, Values]:
    """The same over caches that are filled already, one a method."""
    # Of the prompt the last token alone is read.
    prompt = torch.randint(3, case.vocabulary, (case.batch, case.context + 1), device=device)
    models: dict[bool, Any] = {}

    def make(name: str) -> Arm:
        own = sharing(_model_of(case, device, name, models))
        cache = _cache_of(own, case, name)

        if name.endswith(PREPARED):
            prepare_for_generate_(own, frozen=True)

        def options() -> Mapping[str, Any]:
            for layer in cache.layers:
                layer.cumulative_length.fill_(case.context)
            # One cache is given, none is to be made.
            return {cache_argument(own): cache, "cache_implementation": None}

        return Arm(own, options)

    return _answers(case, prompt, names, make, deadline)


def _answers(
    case: Case, prompt: Tensor, names: Sequence[str], make: Make, deadline: Deadline
) -> Mapping[str, Values]:
    """Compile all methods, then let each answer in turn, as often as the deadline allows, at least once."""
    arms: dict[str, Arm] = {}
    results: dict[str, Values] = {}
    torch._dynamo.reset()
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=PROGRAMS),
            bar("generate()", len(names) + ANSWERS) as step,
        ):
            for name in names:
                results[name] = _begun(case, prompt, name, make, arms, deadline)
                step(name)
            for number in range(ANSWERS):
                _in_turn(case, prompt, arms, results, deadline if number else Deadline(None))
                step("answers")
    finally:
        torch._dynamo.reset()
    return {
        name: {**results[name], **arms[name].values()} if name in arms else results[name] for name in names
    }


def _begun(
    case: Case, prompt: Tensor, name: str, make: Make, arms: dict[str, Arm], deadline: Deadline
) -> Values:  # fmt: skip
    """Compile a method, which is among the arms then."""

    def begin() -> Values:
        arm = make(name)
        values = arm.compile(prompt, case)
        arms[name] = arm
        return values

    reason = deadline.reason()
    return status(reason) if reason else attempt(begin)


def _in_turn(
    case: Case, prompt: Tensor, arms: dict[str, Arm], results: dict[str, Values], deadline: Deadline
) -> None:  # fmt: skip
    """An answer of each arm; one that fails is none any more."""
    if deadline.left() <= 0:
        return
    for name, arm in list(arms.items()):
        values = attempt(partial(arm.answer, prompt, case))
        if "status: ok" not in values:
            results[name] = values
            del arms[name]


@dataclass
class Steps:
    """What methods of a step share: models by whether weights are in int4, filled caches by recipe, and captured steps."""

    watch: Watch
    plan: Plan
    case: Case
    device: str
    models: dict[bool, Any] = field(default_factory=dict)
    caches: dict[str | None, Any] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)

    def begin(self, name: str) -> Values:
        """Capture the step of a method over a filled cache, which its graph goes on reading."""
        model = _model_of(self.case, self.device, name, self.models)
        cache, started = self.filled(model, recipe_of_method(name)), time.perf_counter()
        call = self.compiled(model, name) if name.endswith(COMPILED) else plain_step(model, cache, self.case)
        self.spans[name] = prepare(self.watch, [call], self.plan)
        values: Values = {"bytes of the cache": (self.case.layers * _nbytes(cache.layers[0]), "B")}
        return values | ({FIRST: (time.perf_counter() - started, "s")} if name.endswith(COMPILED) else {})

    def filled(self, model: Any, recipe: str | None) -> Any:
        """The cache of a recipe, which models of all weights read in turn."""
        use_kv_cache_(model, recipe)
        if recipe not in self.caches:
            self.caches[recipe] = filled_cache(model, self.case, recipe)
        return self.caches[recipe]

    def compiled(self, model: Any, name: str) -> Callable[[], None]:
        """A step of `GreedyDecoding` behind the context."""
        torch._dynamo.reset()
        room = self.case.context + SPARE
        decoding = GreedyDecoding(
            model,
            max_length=room,
            kv_cache=RECIPES[recipe_of_method(name) or ""],
            compiled=True,
            captured=False,
        )
        decoding.tokens = torch.full((self.case.batch, room), 3, device=model.device)
        decoding.length.fill_(self.case.context + 1)
        decoding.cache = self.filled(model, recipe_of_method(name))
        return decoding.run


def plain_step(model: Any, cache: Any, case: Case) -> Callable[[], Tensor]:
    """A call of the model, layer by layer."""
    token = torch.full((case.batch, 1), 3, device=model.device)
    held = {cache_argument(model): cache}

    def step() -> Tensor:
        with torch.no_grad():
            out = model(token, **held, use_cache=True, logits_to_keep=1)
            token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        return token

    return step


def stepped(case: Case, device: str, names: Sequence[str], deadline: Deadline) -> Mapping[str, Values]:
    """Milliseconds of a step by method, all in turn; of one that fails or that the deadline does not reach its status."""
    steps = Steps(watch_of(device), PLANS[device], case, device)
    results: dict[str, Values] = {}
    with bar("a step", len(names)) as shown:
        for name in names:
            reason = deadline.reason()
            results[name] = status(reason) if reason else attempt(partial(steps.begin, name))
            shown(name)
    if steps.spans:
        failed = attempt(partial(_time, steps.watch, steps.plan, steps.spans, results))
        if "status: ok" not in failed:
            results |= dict.fromkeys(steps.spans, failed)
    return results


def _time(watch: Watch, plan: Plan, spans: dict[str, Span], results: dict[str, Values]) -> Values:
    """Time what was captured, and add it to the results."""
    times = interleaved(watch, spans, plan)
    for name in spans:
        results[name] = {**results[name], **summary(times[name]).values()}
    first = next(iter(spans))
    results[first] = {**results[first], **repeated(times, first)}
    return {}


def _model_of(case: Case, device: str, name: str, models: dict[bool, Any]) -> Any:
    """The model of a method; graphs read the weights that they were captured with: each sort has one."""
    in_int4 = name.startswith(INT4)
    if in_int4 not in models:
        model = case.model(device)
        models[in_int4] = _in_int4(model) if in_int4 else model
        # What `GreedyDecoding` would do, before graphs of other methods read the weights where they are.
        join_weights_(models[in_int4])
    return models[in_int4]


def _in_int4(model: Any) -> Any:
    from ao_lab import Int4WeightOnlyConfig, quantize_

    quantize_(model, Int4WeightOnlyConfig())
    return model


def _cache_of(model: Any, case: Case, name: str) -> Any:
    """The filled cache of a method, which the model's attention is set to read."""
    recipe = recipe_of_method(name)
    use_kv_cache_(model, recipe)
    return filled_cache(model, case, recipe)


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
    "ANSWERED",
    "COMPILED",
    "GENERATE",
    "GENERATED",
    "INT4",
    "LONG",
    "OWN",
    "PREPARED",
    "STEP",
    "STEPPED",
    "STEPS",
    "Case",
    "answered",
    "filled_cache",
    "generated",
    "methods_of",
    "stepped",
]
