"""A frozen model's `generate()`, a CUDA graph a token, against the same compiled program launched by the host; times beside
torch.compile's own graphs.

    PYTHONPATH=. python tests/gpu/validate.py generate_captured [--only "int4 weights"] [--seconds 60]

Checks, of a Llama of two layers by cache and weights: tokens and logits, bit for bit, of one sequence and of four (padded), of
a longer prompt (another cache of the same size, and a longer one), of a cache of the caller's twice, of sampling, after
`torch.compiler.reset()`; that steps were replayed, and how many were not. Times: milliseconds of a token of eight layers of
Llama-3.1-8B behind 131,072 tokens, replayed and by torch.compile's graphs. About 100 s on an H200.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import ao_lab
from ao_lab.compile.captured_forward import CapturedForward, FrozenCalls
from experiments.kv_cache import generation as long
from experiments.models.llama import Wrong
from tests.gpu.harness.subject import Asked, Check, Row, Subject, same_bits

#: Cache and whether weights are in int4, in the order of what matters; None: transformers' own cache.
CASES = (("int4", True), ("bfloat16", False), ("fp8", False), (None, False), ("int4", False))
#: Tokens of a prompt, new ones of one that is longer than both together, and room in a cache of the caller's.
PROMPT, NEW, ROOM = 37, 24, 128
TINY = long.Case(
    "2 layers", 1, 64, layers=2, hidden=512, intermediate=1024, vocabulary=1024, heads=4, kv_heads=2
)
LONG = replace(long.ANSWERED["cuda"], layers=8)
TIMED = ("int4 weights, int4", "bfloat16", "fp8")


def model_of(recipe: str | None, in_int4: bool, device: str, recorder: Any = None) -> Any:
    """A frozen one. recorder: in place of CUDA graphs, which also lets it compile on a CPU."""
    torch.manual_seed(0)
    model = TINY.model(device).requires_grad_(False)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    if in_int4:
        ao_lab.quantize_(model, ao_lab.Int4WeightOnlyConfig())
    ao_lab.prepare_for_generate_(model, frozen=True, kv_cache=recipe)
    if recorder is not None:
        model.get_compiled_call = FrozenCalls(model, recorder)
        model.generation_config.compile_config._compile_all_devices = True
    return model


class Uncaptured:
    """`get_compiled_call` that gives the compiled forward of a FrozenCalls itself."""

    def __init__(self, calls: FrozenCalls) -> None:
        self.calls = calls

    def __call__(self, compile_config: Any) -> Callable[..., Any]:
        """As the model's, or Wrong where it is not captured."""
        return forward_of(self.calls, compile_config).call


def forward_of(calls: Any, compile_config: Any) -> CapturedForward:
    """What a model replays; Wrong where nothing is."""
    found = calls(compile_config)
    if not isinstance(found, CapturedForward):
        raise Wrong(f"generate() is not captured but has {found}")
    return found


def answer(
    model: Any, batch: int = 1, length: int = PROMPT, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and logits (new, batch, vocabulary), of a prompt that is padded behind the first sequence."""
    ids = torch.arange(batch * length, device=model.device).reshape(batch, length) * 31 % 1000 + 3
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0
    given = {"max_new_tokens": PROMPT + NEW - length if length < PROMPT + NEW else NEW, "do_sample": False}
    torch.manual_seed(1)
    made = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **{**given, **more}
    )
    return made.sequences, torch.stack(made.logits)


def own_cache(model: Any, recipe: str | None) -> dict[str, Any]:
    """Arguments of a call with a cache of the caller's."""
    cache = ao_lab.KVCache(model, recipe or "bfloat16", ROOM)
    return {"past_key_values": cache, "cache_implementation": None}


def both(
    model: Any, calls: Any, label: str, make: Callable[[], dict[str, Any]] = dict, **more: Any
) -> Iterator[str]:
    """What differs of a call's answers, captured first, then by the same program launched; also how many were replayed."""
    config = model.generation_config.compile_config
    model.get_compiled_call = calls
    got = answer(model, **make(), **more)
    forward = forward_of(calls, config)
    step = next(reversed(forward.steps.values()), None)
    if step is None or step.replay is None:
        yield f"{label}: nothing was recorded, after {step and step.runs} runs"
    model.get_compiled_call = Uncaptured(calls)
    wanted = answer(model, **make(), **more)
    model.get_compiled_call = calls
    for name, one, other in zip(("tokens", "logits"), got, wanted, strict=True):
        if not same_bits(one, other):
            yield f"{label}: {int((one != other).sum())} of {one.numel()} {name} differ"


def wrong_of(recipe: str | None, in_int4: bool, device: str, recorder: Any = None) -> Iterator[str]:
    """One model: all calls, one after the other."""
    torch.compiler.reset()
    model = model_of(recipe, in_int4, device, recorder)
    calls = model.get_compiled_call
    if not isinstance(calls, FrozenCalls):
        raise Wrong(f"prepare_for_generate_ captures nothing: {calls}")
    yield from both(model, calls, "one sequence")
    yield from both(model, calls, "again")
    yield from both(model, calls, "a longer prompt, as much room", length=PROMPT + 8)
    yield from both(model, calls, "sampled", do_sample=True)
    if recipe is not None:
        own = own_cache(model, recipe)
        for turn in ("first", "second"):
            yield from both(model, calls, f"a cache of the caller's, {turn}", lambda: reset(own))
    yield from both(model, calls, "four sequences", batch=4)
    yield from both(model, calls, "a longer prompt, more room", length=PROMPT + NEW + 9)


def reset(own: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with an empty cache."""
    own["past_key_values"].reset()
    return own


def after_reset(device: str, recorder: Any = None) -> Iterator[str]:
    """Other values of weights are seen at once, since they are read; another layer after `torch.compiler.reset()`."""
    torch.compiler.reset()
    model = model_of("bfloat16", False, device, recorder)
    calls = model.get_compiled_call
    yield from both(model, calls, "before")
    for parameter in model.model.layers[0].parameters():
        parameter.mul_(0.5)
    yield from both(model, calls, "weights with other values")
    model.model.norm = torch.nn.Identity()
    torch.compiler.reset()
    yield from both(model, calls, "another layer")
    # The prompt's logits are not compiled; those behind it are of the same token.
    wanted, got = answer(model, disable_compile=True)[1][1], answer(model)[1][1]
    if (got - wanted).abs().max() > 0.1 * wanted.abs().max():
        yield "a layer that was replaced is not seen after torch.compiler.reset()"


@torch.no_grad()
def listed(check: Callable[..., Iterator[str]], *given: Any) -> list[str]:
    """All that is wrong."""
    return list(check(*given))


def checks(asked: Asked) -> Iterator[Check]:
    """By cache and weights."""
    for recipe, in_int4 in CASES:
        label = f"{'int4 weights, ' * in_int4}{recipe or 'transformers'} cache"
        yield label, partial(listed, wrong_of, recipe, in_int4, asked.device)
    yield "torch.compiler.reset()", partial(listed, after_reset, asked.device)


@torch.no_grad()
def times(asked: Asked) -> Iterator[Row]:
    """Milliseconds of a token by who replays."""
    models: dict[bool, Any] = {}
    for method in TIMED:
        for captured in (True, False):
            torch.compiler.reset()
            ms, first = token_ms(method, captured, asked.device, models)
            name = "one graph" if captured else "torch.compile's graphs"
            yield {"layers": LONG.layers, "method": method, "by": name, "ms": ms, "first call s": first}


def token_ms(method: str, captured: bool, device: str, models: dict[bool, Any]) -> tuple[float, float]:
    """The median token of two answers behind one that compiles, and seconds of that one."""
    prompt = torch.randint(3, LONG.vocabulary, (1, LONG.context + 1), device=device)
    own = long.sharing(long._model_of(LONG, device, method, models))
    cache = long._cache_of(own, LONG, method)
    ao_lab.prepare_for_generate_(own, frozen=True)
    if not captured:
        del own.get_compiled_call

    def options() -> dict[str, Any]:
        for layer in cache.layers:
            layer.cumulative_length.fill_(LONG.context)
        return {"past_key_values": cache, "cache_implementation": None}

    arm = long.Arm(own, options)
    values = arm.compile(prompt, LONG)
    found = [one for _ in range(2) for one in arm.steps(prompt, LONG.new)[LONG.first :]]
    return statistics.median(found) * 1e3, float(values[long.FIRST][0])


SUBJECTS = (
    Subject("generate_captured", "generate() of a frozen model, a CUDA graph a token", checks, times),
)
