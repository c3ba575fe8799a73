"""On a GPU: which kernels one step of a model over a long context consists of, and how long each takes, by method; before that,
whether `GreedyDecoding` chooses the same tokens captured as launch by launch.

    PYTHONPATH=. python tests/gpu/attention/step.py [--layers 4] [--context 131072] [--out FOLDER]
        [--methods "bfloat16" "bfloat16, compiled" "int4 weights, int4" "int4 weights, int4, compiled"]

Methods are those of `ao-lab reproduce kv_cache --only step`, captured as there, of a model of Llama-3.1-8B's shapes with few
layers, since all are alike. A line for each kernel of a replayed step: how often, microseconds in all; of all together their
sum, the length of the union of their intervals, and what the step takes by events without the profiler. Tokens: of a model of
two layers, for two prompts one after the other, captured in a CUDA graph and not, compiled and not; by `generate()`, too, which
multiplies and adds in other orders, so that the share of its tokens that differ is no error. Rows in FOLDER/step.csv (else
$OUT).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from ao_lab.greedy_decoding import GreedyDecoding
from ao_lab.kv_cache.cache import use_kv_cache_
from ao_lab.measure.turns import in_turn, watch_of
from experiments.kv_cache.generation import PLANS, STEPPED, STEPS, Case, Steps
from experiments.ladder.trace import busy, traced
from tests.gpu.harness.lines import run_parts, say

#: Steps of a trace, and of what is timed without one.
TRACED, TIMED = 3, 10
METHODS = ("bfloat16", "bfloat16, compiled", "int4 weights, int4", "int4 weights, int4, compiled")
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
    values = steps.begin(name)
    if "first call" in values:
        say(name, "compile and capture", values["first call"][0], "s")
    replay = steps.spans[name].graph
    seconds = steps.watch.seconds([replay] * TIMED)
    say(name, f"a step of {steps.case.layers} layers", statistics.median(seconds) * 1e6, "us")


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
    parser.add_argument("--no-tokens", action="store_true", help="leave out the comparison of tokens")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    case = STEPPED[asked.device]
    case = replace(case, layers=asked.layers, context=asked.context or case.context)
    steps = Steps(watch_of(asked.device), PLANS[asked.device], case, asked.device)
    parts = {
        f"tokens {name}": partial(tokens, case, asked.device, name) for name in RECIPES if not asked.no_tokens
    }
    parts |= {f"begin {name}": partial(begin, steps, name) for name in asked.methods}
    parts |= {f"profile {name}": partial(profile, steps, name) for name in asked.methods}
    return run_parts(parts, parts, "step.csv", asked.out)


if __name__ == "__main__":
    sys.exit(main())
