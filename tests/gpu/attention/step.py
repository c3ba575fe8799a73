"""On a GPU: which kernels one step of a model over a long context consists of, and how long each takes, by method; before that,
whether `GreedyDecoding` chooses the same tokens captured as launch by launch, and what several weights in one launch give.

    PYTHONPATH=. python tests/gpu/attention/step.py [--layers 4] [--context 131072] [--out FOLDER] [--parts bits times]
        [--apart] [--methods "bfloat16" "bfloat16, compiled" "int4 weights, int4, compiled"]

Methods are those of `ao-lab reproduce kv_cache --only step`, captured as there, of a model of Llama-3.1-8B's shapes with few
layers, since all are alike. Parts, in order:

* bits: products by several weights in one launch, and silu of one times another, beside launches of
  their own; the largest logit.
* launches: how long these take, in turn.
* tokens: of a model of two layers, for two prompts one after the other, captured in a CUDA graph and not, compiled and not; by
  `generate()`, too, which multiplies and adds in other orders, so that the share of its tokens that differ is no error.
* times: of steps, all in turn; with --apart of compiled ones also as they are with a launch for each weight and one search
  for the largest logit.
* profile: a line for each kernel of a replayed step: how often, microseconds in all; of all together their sum, the length of
  the union of their intervals, and what the step takes by events without the profiler.

Rows in FOLDER/step.csv (else $OUT).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

import fast
from ao_lab import greedy_decoding
from ao_lab.compile import fused_linears
from ao_lab.greedy_decoding import GreedyDecoding, most_likely
from ao_lab.kv_cache.cache import use_kv_cache_
from ao_lab.measure.turns import in_turn, interleaved, summary, watch_of
from experiments.kv_cache.generation import COMPILED, PLANS, STEPPED, STEPS, Case, Steps
from experiments.ladder.trace import busy, traced
from fast import dispatch
from fast.gemm import choose
from fast.kernels.sm90_w4a16_gemv.host import form_of, sm90_w4a16_gemv
from fast.kernels.sm90_w4a16_gemv.several import variant_of
from fast.matmul.preshuffled.linear import linear_small, preshuffled
from fast.matmul.preshuffled.pair import linear_small_pair, linear_small_swiglu
from fast.scale_factors import ArrangedWeight
from fast.scale_factors import form_of as stored_form
from reference import Quantized
from tests.gpu.harness.lines import run_parts, say
from tests.gpu.harness.timing import measured

#: Steps of a trace, and of what is timed without one.
TRACED, TIMED = 3, 10
METHODS = ("bfloat16", "bfloat16, compiled", "int4 weights, int4", "int4 weights, int4, compiled")
#: Parts, in order.
PARTS = ("bits", "launches", "tokens", "times", "profile")
SCHEME = "int4_g128_asymmetric"
#: Behind the names of compiled steps that are launched apart.
APART = ", launched apart"
#: Rows of inputs whose bits are compared, and how often one result is made again.
ROWS, REPEATS = (1, 2, 8), 20
#: Sets of weights in turn, which exceed the second-level cache together.
SETS = 6
#: Letters of a kernel's name that a line has.
LETTERS = 60
#: Recipes whose tokens are compared; sequences, tokens of a prompt and new ones.
RECIPES = ("bfloat16", "fp8", "int4")
PROMPT, NEW = (2, 300), 100
#: Arguments of `generate()`, which is not compiled here.
GENERATE = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "disable_compile": True,
}


def weights(case: Case, device: str) -> list[Quantized]:
    """Queries, keys, values, a gate and what it gates of a layer."""
    keys = case.hidden // case.heads * case.kv_heads
    rows = (case.hidden, keys, keys, case.intermediate, case.intermediate)
    made = (torch.randn(n, case.hidden, device=device, dtype=torch.bfloat16) for n in rows)
    return [preshuffled(fast.quantize(w, SCHEME, packed=True)) for w in made]


def several(x: torch.Tensor, ws: list[Quantized]) -> list[torch.Tensor]:
    """Products by weights in one launch."""
    stored = [part for w in ws for part in (w.codes, w.scale, w.zero)]
    made: list[torch.Tensor] = torch.ops.ao_lab.linear_small_several(
        x, stored, [w.shape[0] for w in ws], ws[0].shape[1], ws[0].scheme.key
    )
    return made


def each(x: torch.Tensor, ws: list[Quantized]) -> list[Any]:
    """A launch for each weight, with the variant that they have together; on a CPU the reference."""
    if not x.is_cuda:
        return [linear_small(x, w) for w in ws]
    shapes = [(int(w.shape[0]), int(w.shape[1])) for w in ws]
    held = [
        ArrangedWeight(w.codes, w.scale, w.zero, shape, *stored_form(w.scheme, shape[1]))  # type: ignore[arg-type]
        for w, shape in zip(ws, shapes, strict=True)
    ]
    form = form_of(held[0], x.dtype, x.dtype)._replace(weights=len(ws))
    variant = variant_of(form, len(x), tuple(n for n, _ in shapes), shapes[0][1])
    return [sm90_w4a16_gemv(x, w, variant=variant) for w in held]


def bits(case: Case, device: str) -> None:
    """Of products, of the largest logit, compiled or not."""
    *three, gate, up = weights(case, device)
    for dtype in (torch.bfloat16, torch.float16):
        for rows in ROWS:
            x, label = torch.randn(rows, case.hidden, device=device, dtype=dtype), f"{rows} rows, {dtype}"
            wanted = each(x, three)
            unlike = sum(
                int((one != other).sum())
                for _ in range(REPEATS)
                for one, other in zip(several(x, three), wanted, strict=True)
            )
            say("bits", f"queries, keys and values, {label}", unlike, "differ")
            first = int((wanted[0] != linear_small(x, three[0])).sum())
            say("bits", f"queries by themselves, {label}", first, "differ")
            gated = fast.swiglu(linear_small(x, gate), linear_small(x, up))
            made = [linear_small_swiglu(x, gate, up) for _ in range(REPEATS)]
            say(
                "bits",
                f"silu of one times another, {label}",
                sum(int((y != gated).sum()) for y in made),
                "differ",
            )
    compiled = torch.compile(most_likely, dynamic=False) if device == "cuda" else most_likely
    logits = torch.randint(-3, 4, (8, 1, case.vocabulary), device=device).bfloat16()
    logits[1, 0, 77] = logits[1, 0, 99] = logits[2] = torch.nan
    for name, function in (("compiled", compiled), ("launched", most_likely)):
        say("bits", f"largest logit, {name}", int((function(logits) != logits.argmax(-1)).sum()), "differ")


def launches(case: Case, device: str) -> None:
    """Microseconds of products with one row, in one launch and apart."""
    held, x = (
        [weights(case, device) for _ in range(SETS)],
        torch.randn(1, case.hidden, device=device).bfloat16(),
    )
    ways: dict[str, Any] = {
        "queries, keys, values": lambda ws: several(x, ws[:3]),
        "queries, keys, values, apart": lambda ws: (linear_small(x, ws[0]), linear_small_pair(x, *ws[1:3])),
        "swiglu": lambda ws: linear_small_swiglu(x, *ws[3:]),
        "swiglu, apart": lambda ws: fast.swiglu(linear_small(x, ws[3]), linear_small(x, ws[4])),
    }
    if device == "cuda":
        found = measured({n: [partial(way, ws) for ws in held] for n, way in ways.items()}, 15)
        for name, time in found["us"].items():
            low, high = found["spread"][name]
            say("launches", name, time, "us", low=low, high=high)
        for name, failure in found.get("failed", {}).items():
            say("launches", f"FAILED: {name}: {failure}", float("nan"), "", ok=False)
    else:
        say("launches", "calls", sum(way(ws) is not None for way in ways.values() for ws in held), "")


@contextmanager
def anew(*changes: Any) -> Iterator[None]:
    """With changes that caches of compilers and of calls do not know of."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dispatch.CALLS.clear()
    with ExitStack() as stack:
        for change in (
            *changes,
            inductor.patch(fx_graph_cache=False),
            functorch.patch(enable_autograd_cache=False),
        ):
            stack.enter_context(change)
        yield
    dispatch.CALLS.clear()


def launched_apart() -> Any:
    """A launch for each weight and one search of the largest logit."""
    return anew(
        mock.patch.object(fused_linears, "fuse_several", return_value=None),
        mock.patch.object(greedy_decoding, "step_options", fused_linears.compile_options),
        mock.patch.object(choose, "in_one_launch", return_value=False),
        mock.patch.object(greedy_decoding, "most_likely", lambda logits: logits.argmax(-1)),
    )


def tokens(case: Case, device: str, recipe: str) -> None:
    """Those of a captured step and of one that is not, compiled or not; the share that differ from those of `generate()`."""
    torch.manual_seed(0)
    model = replace(case, layers=2).model(device)
    prompts = [torch.randint(3, case.vocabulary, PROMPT, device=device) for _ in range(2)]
    graphs = (False, True) if device == "cuda" else (False,)
    for compiled in graphs:
        options = {"max_length": sum(PROMPT[1:]) + NEW, "kv_cache": recipe, "compiled": compiled}
        made = [GreedyDecoding(model, captured=captured, **options) for captured in graphs]
        found = [[one.generate(prompt, NEW) for prompt in prompts] for one in made]
        same = all(torch.equal(x, y) for x, y in zip(found[0], found[-1], strict=True))
        say(
            "tokens",
            f"{recipe}{', compiled' * compiled}: captured as launch by launch",
            float(same),
            "",
            ok=same,
        )
        use_kv_cache_(model, recipe)
        theirs = model.generate(prompts[0], attention_mask=torch.ones_like(prompts[0]), **GENERATE)
        say(
            "tokens",
            f"{recipe}{', compiled' * compiled}: unlike generate()",
            float((theirs != found[0][0]).float().mean()),
            "",
        )


def begin(steps: Steps, name: str) -> None:
    """Capture a method's step, and say how long it takes."""
    method = name.removesuffix(APART)
    with nullcontext() if method == name else launched_apart():
        values = steps.begin(method)
    steps.spans[name] = steps.spans.pop(method)
    if "first call" in values:
        say(name, "compile and capture", values["first call"][0], "s")
    replay = steps.spans[name].graph
    seconds = steps.watch.seconds([replay] * TIMED)
    say(name, f"a step of {steps.case.layers} layers", statistics.median(seconds) * 1e6, "us")


def in_turns(steps: Steps) -> None:
    """All steps that were captured, timed in turn."""
    for name, found in interleaved(steps.watch, steps.spans, steps.plan).items():
        time, unit = summary(found).values("us")["time"]
        say(name, f"a step of {steps.case.layers} layers, in turn", float(time), unit)


def profile(steps: Steps, name: str) -> None:
    """Kernels of a replayed step, the longest first."""
    kernels, _ = traced(in_turn([steps.spans[name].graph] * TRACED), steps.device)
    times = defaultdict(list)
    for one in kernels:
        times[one.name].append(one.end - one.begin)
    say(name, "kernels of a step", len(kernels) / TRACED, "")
    say(name, "sum of kernels", sum(map(sum, times.values())) / TRACED, "us")
    say(name, "union of kernels", busy(kernels) / TRACED, "us")
    for kernel, found in sorted(times.items(), key=lambda one: -sum(one[1])):
        count = len(found) / TRACED
        say(
            name,
            kernel[:LETTERS],
            sum(found) / TRACED,
            "us",
            count=round(count, 2),
            each=round(statistics.median(found), 2),
        )


def main() -> int:
    """Times of all methods first: every launch takes longer once a profiler has run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=STEPS)
    parser.add_argument(
        "--device", default="cuda", choices=sorted(STEPPED), help="cpu: small layers, to try the program"
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--apart", action="store_true", help="compiled steps with a launch for each weight, too"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    case = STEPPED[asked.device]
    case = replace(case, layers=asked.layers, context=asked.context or case.context)
    steps = Steps(watch_of(asked.device), PLANS[asked.device], case, asked.device)
    compiled = [name for name in asked.methods if asked.apart and name.endswith(COMPILED)]
    methods = [*(name + APART for name in compiled), *asked.methods]
    all_parts: dict[str, dict[str, Any]] = {
        "bits": {"bits": partial(bits, case, asked.device)},
        "launches": {"launches": partial(launches, case, asked.device)},
        "tokens": {f"tokens {name}": partial(tokens, case, asked.device, name) for name in RECIPES},
        "times": {f"begin {name}": partial(begin, steps, name) for name in methods}
        | {"in turn": partial(in_turns, steps)},
        "profile": {f"profile {name}": partial(profile, steps, name) for name in methods},
    }
    parts = {name: part for one in PARTS if one in asked.parts for name, part in all_parts[one].items()}
    return run_parts(parts, parts, "step.csv", asked.out)


if __name__ == "__main__":
    sys.exit(main())
