"""transformers' `generate()` on shapes of Llama-3.1-8B: milliseconds a token, compiled as it does by itself, and not compiled.

    PYTHONPATH=. python tests/gpu/validate_generate.py [--layers 8 --batch 1 16 --budget 200 --prepared]
    PYTHONPATH=. python tests/gpu/validate_generate.py --device cpu --divide 32 --layers 1 --new 8 --calls 1

Random weights, each configuration a copy of one bfloat16 model; nothing is switched on but a static cache, with which
transformers compiles the model (mode "reduce-overhead"). --prepared adds "int4wo-prepared" and "int4wo-frozen": int4wo after
`ao_lab.prepare_for_generate_`, with frozen=False and True. A token's time is that between two steps of its loop, the median
over the last three quarters of each call's steps: the prompt is left out, sampling (argmax) is in. Ratios are to bfloat16 of
the same batch and mode in the same run. No profiler runs here: once one has, every later launch of the process takes the host
longer (`profile_generate.py` says where time goes).
Rows that do not fit into --budget seconds are left out and said to be. Each row is printed when it is there; if OUT is set,
all are in $OUT/generate.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import ao_lab

CONFIGS = {
    "bf16": None,
    "int4wo": lambda: ao_lab.Int4WeightOnlyConfig(group_size=128),
    "int8wo": lambda: ao_lab.Int8WeightOnlyConfig(),
    "fp8wo": lambda: ao_lab.Float8WeightOnlyConfig(),
    "fp8dq": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
}
PREPARED = {"-prepared": False, "-frozen": True}
PROMPT, HIDDEN, INNER, HEADS, KEYS, WORDS = 32, 4096, 14336, 32, 8, 128256


class Clock(transformers.StoppingCriteria):
    """When each step of a generation has ended; stops none."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **rest: Any) -> torch.Tensor:
        """Before it transformers has waited for the token of the step before."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def model_of(args: argparse.Namespace) -> Any:
    """A Llama of these shapes with normal weights, in bfloat16, made where it stays."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN // args.divide,
        intermediate_size=INNER // args.divide,
        num_attention_heads=HEADS // min(args.divide, 8),
        num_key_value_heads=KEYS // min(args.divide, 8),
        vocab_size=WORDS // args.divide,
        num_hidden_layers=args.layers,
        max_position_embeddings=2048,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
    return model


def generation(
    model: Any, batch: int, compiled: bool, args: argparse.Namespace, *watches: transformers.StoppingCriteria
) -> list[float]:
    """Seconds of the steps of one call of `generate()`, the first quarter left out. watches: called after each step, too."""
    prompt = torch.arange(batch * PROMPT, device=args.device).reshape(batch, PROMPT) % 97 + 3
    clock = Clock()
    options: dict[str, Any] = {"disable_compile": not compiled}
    if compiled and args.device == "cpu":
        options["compile_config"] = copy.copy(
            model.generation_config.compile_config or transformers.CompileConfig()
        )
        options["compile_config"]._compile_all_devices = True
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache_implementation="static",
        max_new_tokens=args.new,
        min_new_tokens=args.new,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([clock, *watches]),
        **options,
    )
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][
        args.new // 4 :
    ]


def configured(base: Any, name: str) -> Any:
    """A copy of the model in a configuration."""
    config, dash, how = name.partition("-")
    model, make = copy.deepcopy(base), CONFIGS[config]
    if make is not None:
        ao_lab.quantize_(model, make())
    if dash:
        print(ao_lab.prepare_for_generate_(model, frozen=PREPARED[dash + how]), flush=True)
    return model


def measured(model: Any, name: str, batch: int, compiled: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    started = time.perf_counter()
    torch.compiler.reset()
    for _ in range(2 if compiled else 1):  # compiles; records the graph
        generation(model, batch, compiled, args)
    warm = time.perf_counter() - started
    steps = [step for _ in range(args.calls) for step in generation(model, batch, compiled, args)]
    token = statistics.median(steps)
    return {
        "config": name,
        "batch": batch,
        "compiled": compiled,
        "ms": token * 1e3,
        "tokens_per_second": batch / token,
        "warm_up_s": warm,
        "seconds": time.perf_counter() - started,
    }


def report(row: dict[str, Any], rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print a row beside bfloat16's of the same batch and mode, and write all of them."""
    alike = [one for one in rows if (one["batch"], one["compiled"]) == (row["batch"], row["compiled"])]
    base = next((one["ms"] for one in alike if one["config"] == "bf16"), None)
    row["over_bf16"] = None if base is None else base / row["ms"]
    rows.append(row)
    times = "" if row["over_bf16"] is None else f"{row['over_bf16']:.3f} x bf16"
    mode = "compiled" if row["compiled"] else "eager"
    print(
        f"{row['config']:8} batch {row['batch']:3} {mode:8} {row['ms']:8.3f} ms a token, "
        f"{row['tokens_per_second']:8.1f} tokens/s, warm-up {row['warm_up_s']:5.1f} s  {times}",
        flush=True,
    )
    if os.environ.get("OUT"):
        card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {
            "device": card,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "layers": args.layers,
        }
        Path(os.environ["OUT"], "generate.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


def main() -> int:
    """Rows in order of what is asked first: compiled at the first batch, not compiled, then the other batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--divide", type=int, default=1, help="widths and vocabulary, for a stand-in")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--configs", nargs="+", default=["bf16", "int4wo", "int8wo", "fp8wo", "fp8dq"])
    parser.add_argument("--prepared", action="store_true", help="int4wo with our options, too")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--budget", type=float, default=200.0)
    args = parser.parse_args()
    if args.prepared:
        at = args.configs.index("int4wo") + 1 if "int4wo" in args.configs else 0
        args.configs[at:at] = ["int4wo" + how for how in PREPARED]
    began, rows, longest = time.perf_counter(), [], 0.0
    base = model_of(args)
    models: dict[str, Any] = {}
    for batch in args.batch:
        for compiled in (True, False):
            for name in args.configs:
                if "-" in name and not compiled:  # eager, it is the same
                    continue
                left = args.budget - (time.perf_counter() - began)
                if left < (longest if compiled else longest / 4):
                    print(f"{name} batch {batch}: left out, {left:.0f} s are left", flush=True)
                    continue
                if name not in models:
                    models[name] = configured(base, name)
                row = measured(models[name], name, batch, compiled, args)
                longest = max(longest, row["seconds"])
                report(row, rows, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
