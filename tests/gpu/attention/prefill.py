"""On a GPU: attention in 8 bits, against the reference and against torch's, with a sweep of tiles.

    PYTHONPATH=. python tests/gpu/attention/prefill.py [--part bits times sweep] [--sizes 1x8192 1x16384 1x32768]
        [--recipes int8 int8_block fp8] [--width 128] [--seconds 60] [--out FOLDER]

bits: codes and scales of queries, keys and values equal to the reference's, attention within
`quantized_attention_error_bound` and the same in 20 repetitions: widths, grouped queries, windows, masks, other lengths. sweep:
tiles of the matmuls alone, at the first size; the quickest one of each recipe is used by what follows. times: 32 query heads
over 8 key heads, causal, --sizes (sequences x tokens), whole calls with the quantization, and its parts, in turn with torch's
backends over bfloat16, in CUDA graphs and eager: microseconds, TFLOP/s (2 T (T + 1) width a head for both matmuls), speed over
the best of torch's; cosine and norm ratio beside float32 for the last 64 queries. A line a check or time, and rows in
FOLDER/prefill_attention.csv (else $OUT).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.kernels.attention import prefill, sm90
from fast.kernels.attention.quantize_heads import quantize_heads
from reference.attention import quantized as specified
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    quantize_operands,
    quantized_attention_error_bound,
)
from tests.gpu.harness.lines import differs, say, write_rows
from tests.gpu.harness.timing import captured, elapsed

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
#: Stages of the kernel in CUDA C++ (128 channels), which is what serves where it is not told otherwise.
STAGES = (4, 2, 3, 5)
Plans = dict[str, prefill.Plan | sm90.Variant]
REPEATS = 20


def states(batch: int, queries: int, keys: int, width: int, heads: int = HEADS, kv: int = KV_HEADS):
    """q as a view of (B, T, heads, width), k with a mean that differs by channel, v."""
    q, k, v = (
        torch.randn((batch, tokens, count, width), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for tokens, count in ((queries, heads), (keys, kv), (keys, kv))
    )
    return q, k + 2 * torch.randn(width, device="cuda", dtype=torch.bfloat16), v


def bits(recipes: list[str]) -> None:
    """Codes, and errors over their bound."""
    for recipe, width, queries, keys, given in CASES:
        if recipe not in recipes:
            continue
        torch.manual_seed(0)
        options = dict(given)
        q, k, v = states(1, queries, keys, width, 4, 2)
        if "mask" in options:
            options["mask"] = torch.rand((1, 1, queries, keys), device="cuda") > 0.2
        served = (
            sm90.refusal(q, v, ATTENTION_RECIPES[recipe], options.get("window"), options.get("mask")) is None
        )
        made = [
            _checked(recipe, q, k, v, options, plan)
            for plan in ((None, prefill.plan_of(128)) if served else (None,))
        ]
        for kernel, (worst, ratio, equal, same) in zip(
            ("sm90", "triton") if served else ("triton",), made, strict=True
        ):
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
    made = quantize_heads(q, k[:, :, :last], v[:, :, :last], record)
    host, mean = [x.cpu() for x in (q, k, v)], None if made.mean is None else made.mean.cpu()
    expected = quantize_operands(host[0], *(x[:, :, :last] for x in host[1:]), recipe, mean=mean)
    equal = all(
        np.array_equal(one.codes, codes[:, :, : one.codes.shape[2], :width].cpu())
        for one, codes in ((expected.q, made.q), (expected.k, made.k))
    )
    if "mask" in options:
        options = {**options, "mask": options["mask"].cpu().numpy()}
    exact = np.asarray(
        specified.quantized_attention(*host, recipe, mean=mean, out_dtype="float64", **options)
    )
    bound = quantized_attention_error_bound(*host, recipe, mean=mean, **options)
    error = np.abs(y.double().cpu().numpy() - exact)
    worst = float(np.nan_to_num(error / np.where(bound > 0, bound, 2.0**-149), nan=np.inf).max())
    return worst, round(float(np.linalg.norm(error) / np.linalg.norm(exact)), 6), equal, same


def in_turn(calls: dict[str, Any], seconds: float) -> dict[str, float]:
    """Median microseconds of calls that take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    for call in calls.values():
        for _ in range(3):
            call()
    while time.monotonic() < end and min(len(one) for one in found.values()) < 100:
        for name, call in calls.items():
            found[name].append(elapsed(call))
    return {name: statistics.median(one) for name, one in found.items()}


def rate(batch: int, tokens: int, width: int, us: float) -> float:
    """TFLOP/s of a causal call."""
    return round(2 * batch * HEADS * tokens * (tokens + 1) * width / us / 1e6, 1)


def sweep(
    recipes: list[str], batch: int, tokens: int, width: int, deadline: float
) -> dict[str, prefill.Plan]:
    """Tiles of the matmuls alone; the quickest one of each recipe."""
    torch.manual_seed(0)
    q, k, v = states(batch, tokens, tokens, width)
    best: dict[str, tuple[float, prefill.Plan | sm90.Variant]] = {}
    tried = [sm90.Variant(one) for one in STAGES] if width == sm90.WIDTH else []
    for plan, recipe in itertools.product([*tried, *(prefill.Plan(*tile) for tile in TILES)], recipes):
        if time.monotonic() > deadline:
            break
        record = ATTENTION_RECIPES[recipe]
        heads = quantize_heads(q, k, v, record)

        def call(heads=heads, record=record, plan=plan):
            return prefill.attended(heads, q, v, record, width**-0.5, True, None, None, None, tokens, plan)

        try:
            us = in_turn({"": call}, 1.0)[""]
        except (OutOfResources, RuntimeError) as error:
            print("sweep", recipe, plan, str(error)[:80], flush=True)
            continue
        if recipe not in best or us < best[recipe][0]:
            best[recipe] = us, plan
        say("sweep", f"{recipe} B{batch} {tokens} {plan}", us, "us", TFLOPs=rate(batch, tokens, width, us))
    return {name: plan for name, (_, plan) in best.items()}


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """torch's backends that take these."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    made = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        backend = getattr(SDPBackend, name)
        keys, values = (
            (k, v) if "EFFICIENT" not in name else (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        )

        def call(backend=backend, keys=keys, values=values):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, keys, values, is_causal=True, enable_gqa=keys.shape[1] != q.shape[1]
                )

        try:
            call()
            made[name.split("_")[0].lower()] = call
        except RuntimeError as error:
            print("times", name, "refused:", str(error)[:80], flush=True)
    return made


def times(
    recipes: list[str], batch: int, tokens: int, width: int, plans: dict[str, prefill.Plan], seconds: float
) -> None:
    """Whole calls and their parts, in turn with torch's."""
    torch.manual_seed(0)
    q, k, v = states(batch, tokens, tokens, width)
    theirs = peers(q, k, v)
    calls = dict(theirs)
    for recipe in recipes:
        record, plan = ATTENTION_RECIPES[recipe], plans.get(recipe)
        heads = quantize_heads(q, k, v, record)
        calls[recipe] = lambda r=record, p=plan: prefill.attention(
            q, k, v, r, scale=width**-0.5, causal=True, plan=p
        )
        calls[f"{recipe}, quantization"] = lambda r=record: quantize_heads(q, k, v, r)
        calls[f"{recipe}, matmuls"] = lambda h=heads, r=record, p=plan: prefill.attended(
            h, q, v, r, width**-0.5, True, None, None, None, tokens, p
        )
    graphs = {name: captured([call])[0].replay for name, call in calls.items()}
    us = in_turn(graphs | {f"{name}, eager": calls[name] for name in (*theirs, *recipes)}, seconds)
    best = min((us[name] for name in theirs), default=float("nan"))
    for name, one in us.items():
        more: dict[str, object] = {
            "TFLOPs": rate(batch, tokens, width, one),
            "over_torch": round(best / one, 3),
        }
        if name in recipes:
            more |= accuracy(calls[name](), q, k, v)
        say("times", f"B{batch} {tokens} D{width} {name}", one, "us", **more)


def accuracy(y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, object]:
    """Cosine and norm ratio of the last 64 queries beside float32."""
    keys, values = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    tokens = q.shape[2]
    scores = q[:, :, -64:].float() @ keys.mT * q.shape[-1] ** -0.5
    place = torch.arange(tokens - 64, tokens, device=q.device)[:, None]
    scores.masked_fill_(torch.arange(tokens, device=q.device) > place, -torch.inf)
    exact, made = (torch.softmax(scores, -1) @ values).flatten(), y[:, :, -64:].float().flatten()
    cosine = float(torch.nn.functional.cosine_similarity(exact, made, 0))
    return {"cosine": round(cosine, 6), "norm": round(float((exact - made).norm() / exact.norm()), 5)}


def main() -> int:
    """The parts that were asked for; 1 where anything is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "sweep", "times"])
    parser.add_argument(
        "--recipes", nargs="+", default=list(ATTENTION_RECIPES), choices=list(ATTENTION_RECIPES)
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["1x8192", "1x16384", "1x32768"], help="sequences x tokens"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the sweep, and of all times together")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    asked = parser.parse_args()
    sizes = [(int(one.split("x")[0]), int(one.split("x")[1])) for one in asked.sizes]
    plans: Plans = {}
    try:
        if "bits" in asked.part:
            bits(asked.recipes)
        if "sweep" in asked.part:
            plans = sweep(asked.recipes, *sizes[0], asked.width, time.monotonic() + asked.seconds)
        if "times" in asked.part:
            for size in sizes:
                times(asked.recipes, *size, asked.width, plans, asked.seconds / len(sizes))
    finally:
        write_rows("prefill_attention.csv", asked.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
