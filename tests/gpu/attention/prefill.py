"""On a GPU: attention in 8 bits, against the reference and against torch's, with a sweep of tiles.

    PYTHONPATH=. python tests/gpu/attention/prefill.py [--part bits sweep quantization variants] [--sizes 1x8192 1x32768]
        [--recipes int8 int8_block fp8] [--forms FORM ...] [--width 128] [--seconds 60] [--out FOLDER]

bits: codes and scales of queries, keys and values equal to the reference's, attention within
`quantized_attention_error_bound` and the same in 20 repetitions: widths, grouped queries, windows, masks, other lengths; by
Triton's kernels and by the forms of those in CUDA C++. sweep: tiles of the matmuls alone, 32 query heads over 8 key heads,
causal, --sizes (sequences x tokens): microseconds and TFLOP/s
(2 T (T + 1) width a head for both matmuls). --forms: of bits and of variants these alone. A line a check or time, and rows in
FOLDER/prefill_attention.csv (else $OUT). Times beside torch's are experiment `prefill_attention`: `ao-lab reproduce
prefill_attention --scale full --only speed`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab.measure.turns import Call, CudaWatch, Plan, Watch, interleaved, prepare, summary
from experiments.kv_cache.decode_attention import Heads, Size
from experiments.prefill_attention.speed import operations, states
from fast.kernels.attention import prefill, sm90
from fast.kernels.attention.quantize_heads import Heads as Codes
from fast.kernels.attention.quantize_heads import quantize_heads
from reference.attention import quantized as specified
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    quantize_operands,
    quantized_attention_error_bound,
)
from tests.gpu.attention.prefill_variants import ABLATIONS, VARIANTS, quantization, variants
from tests.gpu.harness.lines import differs, say, write_rows

HEADS, KV_HEADS = 32, 8
#: Recipe, width, queries, keys, options.
CASES: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("int8", 64, 200, 200, {"causal": True}), ("int8", 128, 256, 300, {"causal": True}),
    ("int8_block", 128, 300, 300, {"causal": True}), ("fp8", 128, 130, 260, {}), ("int8", 96, 130, 200, {"causal": True}),
    ("int8_block", 256, 130, 130, {"causal": True}), ("int8", 128, 300, 300, {"causal": True, "window": 70}),
    ("int8_block", 64, 140, 400, {"causal": True, "offset": 10}), ("fp8", 64, 140, 150, {"mask": True}),
]  # fmt: skip
#: Tiles that are tried: queries, keys, warps, stages.
TILES = [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3),
         (64, 64, 4, 4)]  # fmt: skip
#: Forms of the kernels in CUDA C++ whose bits are compared.
FORMS = {
    "sm90": sm90.Variant(), "sm90, two units": sm90.Variant(units=2), "sm90, heads": sm90.Variant(heads=True),
    "sm90, served": sm90.SERVED,
}  # fmt: skip
#: Stages of the kernel in CUDA C++ (128 channels), which is what serves where it is not told otherwise.
STAGES = (4, 2, 3, 5)
REPEATS = 20
#: Of a plan.
ROUNDS = Plan(rounds=40, warmup=1, span=1e-9, seconds=1.0)


def bits(recipes: list[str], names: list[str] | None = None) -> None:
    """Codes, and errors over their bound. names: of forms."""
    for recipe, width, queries, keys, given in CASES:
        if recipe not in recipes:
            continue
        torch.manual_seed(0)
        options = dict(given)
        q, k, v = states(Size(1, keys), Heads(4, 2, width), "cuda")
        q = q[:, :, :queries]
        if "mask" in options:
            options["mask"] = torch.rand((1, 1, queries, keys), device="cuda") > 0.2
        served = (
            sm90.refusal(q, v, ATTENTION_RECIPES[recipe], options.get("window"), options.get("mask")) is None
        )
        plans = {**(FORMS if served else {}), "triton": prefill.plan_of(128) if served else None}
        for kernel, plan in plans.items():
            if names is not None and kernel not in names:
                continue
            worst, ratio, equal, same = _checked(recipe, q, k, v, options, plan)
            what = f"{kernel} {recipe} D{width} {queries} of {keys} {','.join(given)}"
            say("bits", what, worst, "of the bound", norm=ratio, ok=worst <= 1, codes=equal, repeatable=same)


def _checked(
    recipe: str, q: Any, k: Any, v: Any, options: dict[str, Any], plan: Any
) -> tuple[float, float, bool, bool]:
    """The error over its bound, and over the result; whether codes are the reference's; whether all repetitions are equal."""
    record, width, (queries, keys) = ATTENTION_RECIPES[recipe], q.shape[-1], (q.shape[2], k.shape[2])
    call = lambda: prefill.attention(q, k, v, record, scale=width**-0.5, plan=plan, **options)  # noqa: E731
    y = call()
    same = all(torch.equal(y, call()) for _ in range(REPEATS))
    # What nobody sees does not count.
    last = keys if options.get("offset") is None else queries + options["offset"]
    made = prefill.operands(q, k[:, :, :last], v[:, :, :last], record, None, plan)
    host, mean = [x.cpu() for x in (q, k, v)], None if made.mean is None else made.mean.cpu()
    expected = quantize_operands(host[0], *(x[:, :, :last] for x in host[1:]), recipe, mean=mean)
    equal = _equal(expected, made, width)
    if "mask" in options:
        options = {**options, "mask": options["mask"].cpu().numpy()}
    exact = np.asarray(
        specified.quantized_attention(*host, recipe, mean=mean, out_dtype="float64", **options)
    )
    bound = quantized_attention_error_bound(*host, recipe, mean=mean, **options)
    error = np.abs(y.double().cpu().numpy() - exact)
    worst = float(np.nan_to_num(error / np.where(bound > 0, bound, 2.0**-149), nan=np.inf).max())
    return worst, round(float(np.linalg.norm(error) / np.linalg.norm(exact)), 6), equal, same


def _equal(expected: specified.Operands, made: Codes, width: int) -> bool:
    """Whether codes and scales are those of the reference, values' at the places of their tokens."""
    found = []
    for one, codes, scale in ((expected.q, made.q, made.q_scale), (expected.k, made.k, made.k_scale)):
        if codes is not None:
            found.append(np.array_equal(one.codes, codes[:, :, : one.codes.shape[2], :width].cpu()))
            found.append(np.array_equal(one.scale[..., 0], scale[:, :, : one.scale.shape[2]].cpu()))
    place = torch.arange(made.v.shape[3], device=made.v.device)
    token = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    values = torch.empty_like(made.v)
    values[..., token] = made.v
    _, _, tokens, channels = expected.v.codes.shape
    found.append(np.array_equal(expected.v.codes, values[:, :, :channels, :tokens].mT.cpu()))
    found.append(np.array_equal(expected.v.scale[:, :, 0], made.v_scale[:, :, :channels].cpu()))
    return all(found)


def rate(size: Size, width: int, us: float) -> float:
    """TFLOP/s of a causal call."""
    return round(operations(size, Heads(HEADS, KV_HEADS, width)) / us / 1e6, 1)


def sweep(recipes: list[str], size: Size, width: int, deadline: float) -> None:
    """Tiles of the matmuls alone."""
    torch.manual_seed(0)
    watch, (q, k, v) = CudaWatch(), states(size, Heads(HEADS, KV_HEADS, width), "cuda")
    heads = {name: quantize_heads(q, k, v, ATTENTION_RECIPES[name]) for name in recipes}
    tried = [sm90.Variant(one) for one in STAGES] if width == sm90.WIDTH else []
    for plan, recipe in itertools.product([*tried, *(prefill.Plan(*tile) for tile in TILES)], recipes):
        what = f"{recipe} B{size.batch} {size.tokens} {plan}"
        if time.monotonic() > deadline:
            say("sweep", f"{what} not reached", 0, "")
            continue

        def call(heads=heads[recipe], record=ATTENTION_RECIPES[recipe], plan=plan):
            return prefill.attended(
                heads, q, v, record, width**-0.5, True, None, None, None, size.tokens, plan
            )

        try:
            us = timed(watch, call)
        except (OutOfResources, RuntimeError) as error:
            print("sweep", recipe, plan, str(error)[:80], flush=True)
            continue
        say("sweep", what, us, "us", TFLOPs=rate(size, width, us))


def timed(watch: Watch, call: Call) -> float:
    """Median microseconds of a call by rounds of at most a second, five at least however long one lasts."""
    spans = {"": prepare(watch, [call], ROUNDS)}
    return summary(interleaved(watch, spans, ROUNDS, graph=False)[""]).median * 1e6


def main() -> int:
    """The parts that were asked for; 1 where anything is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "sweep"])
    parser.add_argument(
        "--recipes", nargs="+", default=list(ATTENTION_RECIPES), choices=list(ATTENTION_RECIPES)
    )
    parser.add_argument("--forms", nargs="+", choices=[*FORMS, "triton", *VARIANTS, *ABLATIONS])
    parser.add_argument("--sizes", nargs="+", default=["1x8192"], help="sequences x tokens")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the sweep")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    sizes = [Size.of(one) for one in asked.sizes]
    try:
        if "bits" in asked.part:
            bits(asked.recipes, asked.forms)
        if "sweep" in asked.part:
            for size in sizes:
                sweep(asked.recipes, size, asked.width, time.monotonic() + asked.seconds / len(sizes))
        if "quantization" in asked.part:
            quantization(sizes)
        if "variants" in asked.part:
            variants(sizes, asked.seconds, asked.forms)
    finally:
        write_rows("prefill_attention.csv", asked.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
