"""Compare the tensor core model of `reference.matmul.tensor_core_model` with the device, and look for the variant that
fits best.

    PYTHONPATH=. python tests/gpu/validate_hopper.py [--device cpu] [--seconds 150]

Every backend (torch._scaled_mm with one scale or a scale per row, with and without fast accumulation, as 128 x 128 and as the
corner of 2048 x 2048, where no split of K is expected) multiplies the same e4m3 codes. Model variants are compared with it
bit for bit: the two of the reference on the whole 128 x 128 corner, all others on 32 x 32. Probes with answers worked out by
hand come first. The table goes to the terminal, what the reference's own models reach to reports/gpu/validations.csv, and, if
OUT is set, everything to $OUT/hopper.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from experiments.harness.revision import commit
from experiments.runs.validations import record, validation
from reference.formats.formats import FORMATS
from reference.matmul.exact import round_result
from reference.matmul.tensor_core_model import HOPPER_FP8, HOPPER_FP8_PROMOTED, TensorCore, tensor_core_matmul

SMALL, LARGE, CROP = 128, 2048, 32
LENGTHS = (32, 64, 128, 256, 512, 4096)
VALUES = FORMATS["float8_e4m3fn"].values
FINITE = np.flatnonzero(np.isfinite(VALUES)).astype(np.uint8)
OWN = ("model", "model promoted 128")
REFUSED = (RuntimeError, ValueError, TypeError, NotImplementedError)
Variant = tuple[TensorCore, tuple[int, int]]


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def encode(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, -448, 448).astype(np.float32)  # torch before 2.13 casts larger values to NaN
    return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def distributions(k: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, codes of a (LARGE, K), codes of b transposed (LARGE, K))."""
    shape = (2, LARGE, k)
    normal = rng.standard_normal(shape, dtype=np.float32)
    yield "normal", *encode(normal)
    yield "bits", *FINITE[rng.integers(0, len(FINITE), shape)]
    yield "wide", *encode(normal * np.exp2(rng.integers(-8, 8, shape, dtype=np.int8)).astype(np.float32))
    yield "subnormal", *encode(np.where(rng.random(shape) < 0.1, normal * 64, normal * 2.0**-7))
    yield "integers", *encode(rng.integers(-2, 3, shape))


def scaled_mm(a: torch.Tensor, b: torch.Tensor, rowwise: bool, fast: bool) -> tuple[torch.Tensor, str]:
    """a (M, K) times b (N, K) transposed; the output is float32 where that is supported."""
    if rowwise:
        scales = torch.ones(a.shape[0], 1, device=a.device), torch.ones(1, b.shape[0], device=a.device)
    else:
        scales = torch.ones((), device=a.device), torch.ones((), device=a.device)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        try:
            out = torch._scaled_mm(a, b.t(), scales[0], scales[1], out_dtype=dtype, use_fast_accum=fast)
            return out.float().cpu(), name
        except REFUSED as error:
            if name == "bfloat16":
                raise RuntimeError(f"_scaled_mm refuses float32 and bfloat16 outputs: {error}") from error
    raise RuntimeError("unreachable: bfloat16 either returned or raised")


BACKENDS = {
    f"{'rowwise' if rowwise else 'tensorwise'}-{'fast' if fast else 'slow'}-{size}": (rowwise, fast, size)
    for rowwise in (False, True)
    for fast in (True, False)
    for size in (SMALL, LARGE)
}


def device_results(
    a: np.ndarray, b: np.ndarray, device: str, failures: dict[str, str]
) -> dict[str, tuple[np.ndarray, str]]:
    """backend -> (SMALL x SMALL corner as float64, output type)."""
    results = {}
    for name, (rowwise, fast, size) in BACKENDS.items():
        x, y = (
            torch.from_numpy(codes[:size].copy()).view(torch.float8_e4m3fn).to(device) for codes in (a, b)
        )
        try:
            out, dtype = scaled_mm(x, y, rowwise, fast)
            results[name] = out[:SMALL, :SMALL].double().numpy(), dtype
        except REFUSED as error:
            failures[name] = str(error).splitlines()[0][:200]
    return results


def variants(k: int) -> dict[str, Variant]:
    """Hypotheses by name; "model" and "model promoted 128" are the reference's."""
    sub, flat = (-6, -6), (-1022, -1022)
    made: dict[str, Variant] = {"model": (HOPPER_FP8, sub), "model promoted 128": (HOPPER_FP8_PROMOTED, sub)}
    for promote in (None, 128):
        tag = "" if promote is None else " promoted 128"
        base = replace(HOPPER_FP8, promote=promote)
        for frac in (12, 13, 14):
            for step in (16, 32, 64, 128):
                for exponent in ("sum", "normalized"):
                    core = replace(
                        base, frac_bits=frac, mantissa_bits=frac, k_step=step, product_exponent=exponent
                    )
                    made[f"frac {frac} step {step} {exponent}{tag}"] = core, sub
        made[f"subnormals normalized{tag}"] = base, flat
        for rounding in ("down", "nearest_even"):
            made[f"align {rounding}{tag}"] = replace(base, align=rounding), sub
            made[f"deliver {rounding}{tag}"] = replace(base, deliver=rounding), sub
            made[f"align and deliver {rounding}{tag}"] = replace(base, align=rounding, deliver=rounding), sub
        for frac, mantissa in (
            (13, 12),
            (13, 14),
            (13, 23),
            (14, 13),
            (12, 13),
            (23, 23),
            (24, 23),
            (25, 23),
        ):
            made[f"frac {frac} mantissa {mantissa}{tag}"] = (
                replace(base, frac_bits=frac, mantissa_bits=mantissa),
                sub,
            )
    for promote in (32, 64, 256, 512, k // 2, k // 4, k // 8, k // 16):
        if promote >= 32:
            made[f"model promoted {promote}"] = replace(HOPPER_FP8, promote=promote), sub
    return made


def modelled(a: np.ndarray, b: np.ndarray, variant: Variant) -> np.ndarray:
    core, emin = variant
    return tensor_core_matmul(
        VALUES[a].astype(np.float64), VALUES[b].astype(np.float64).T, core=core, emin=emin
    )


def hexed(x: float) -> str:
    return f"{np.float32(x).view(np.uint32):08x}"


def compare(name: str, model: np.ndarray, got: tuple[np.ndarray, str]) -> dict[str, object]:
    """Counts of equal bits (zeros of either sign are equal) and the first mismatches."""
    want = round_result(model, got[1])
    seen = got[0][: want.shape[0], : want.shape[1]]
    different = np.argwhere(~((want == seen) | (np.isnan(want) & np.isnan(seen))))
    first = [
        {"at": [int(i), int(j)], "model": hexed(want[i, j]), "device": hexed(seen[i, j])}
        for i, j in different[: 4 if name in OWN else 0]
    ]
    return {
        "variant": name,
        "equal": int(want.size - len(different)),
        "total": int(want.size),
        "mismatches": first,
    }


def probes() -> list[tuple[str, list[tuple[float, float]], float]]:
    """(what it tells, pairs along K, answer of the model)."""
    t, pad = 2.0**-7, [(0.0, 0.0)] * 31
    return [
        ("2**-13 next to 1 is kept", [(1, 1), (t, 2.0**-6)], 1 + 2**-13),
        ("2**-14 next to 1 is cut, 31 times", [(1, 1)] + [(t, t)] * 31, 1.0),
        ("negative terms are cut toward zero", [(1, 1)] + [(-t, t)] * 31, 1.0),
        ("and next to -1", [(-1, 1)] + [(t, t)] * 31, -1.0),
        ("the sum is delivered with 13 bits", [(1, 1)] * 3 + [(t, 2.0**-6)], 3.0),
        ("1.75 * 1.75 has exponent 0", [(1.75, 1.75), (t, 2.0**-6), (-1.5, 1.5)], 0.8125 + 2**-13),
        ("a subnormal operand counts with 2**-6", [(2.0**-9, 448), (2.0**-6, 2.0**-6)], 0.875),
        ("the unit next to it is 2**-11", [(2.0**-9, 448), (2.0**-6, 2.0**-5)], 0.875 + 2**-11),
        ("an accumulator of 2 cuts 2**-13", [(2, 1), *pad, *[(t, 2.0**-6)] * 32], 2.0),
        ("an accumulator of 1 keeps 2**-13", [(1, 1), *pad, *[(t, 2.0**-6)] * 32], 1 + 2**-8),
        ("index 31 is in the step of index 0", [(2, 1), (-2, 1), *[(0, 0)] * 29, (t, 2.0**-6)], 0.0),
        ("index 32 is in the next step", [(2, 1), (-2, 1), *[(0, 0)] * 30, (t, 2.0**-6)], 2.0**-13),
        ("terms of one step do not depend on order", [(t, 2.0**-6), (1, 1), *[(0.0, 0.0)] * 15, (t, 2.0**-6)], 1 + 2**-12),
    ]  # fmt: skip


def run_probes(device: str, failures: dict[str, str]) -> list[dict[str, object]]:
    """Probe i is row i of a and row i of b (transposed): its answer is on the diagonal."""
    cases = probes()
    a, b = np.zeros((2, LARGE, 64), np.float32)
    for i, (_, pairs, _) in enumerate(cases):
        a[i, : len(pairs)], b[i, : len(pairs)] = np.array(pairs, np.float32).T
    codes = encode(a), encode(b)
    results = device_results(*codes, device, failures)
    own = modelled(codes[0][: len(cases)], codes[1][: len(cases)], (HOPPER_FP8, (-6, -6)))
    rows = []
    for i, (what, _, answer) in enumerate(cases):
        seen = {name: hexed(out[i, i]) for name, (out, _) in results.items()}
        fits = [
            name
            for name, (out, dtype) in results.items()
            if out[i, i] == round_result(np.array(answer), dtype)
        ]
        rows.append(
            {"probe": what, "answer": hexed(answer), "model": hexed(own[i, i]), "device": seen, "fits": fits}
        )
        bits = ", ".join(sorted(set(seen.values())))
        say(
            f"probe: {what:42s} model {hexed(own[i, i])} fits {len(fits)} of {len(seen)} backends, seen {bits}"
        )
    return rows


def sweep(device: str, seconds: float, failures: dict[str, str]) -> list[dict[str, object]]:
    """Every length and distribution against every backend; hypotheses are dropped when time runs out."""
    rows, began = [], time.perf_counter()
    rng = np.random.default_rng(0)
    for k in LENGTHS:
        for distribution, a, b in distributions(k, rng):
            results = device_results(a, b, device, failures)
            left = time.perf_counter() - began < seconds
            chosen = variants(k) if left else dict(list(variants(k).items())[:2])
            sizes = {name: SMALL if name in OWN else CROP for name in chosen}
            with ThreadPoolExecutor(8) as pool:
                models = pool.map(
                    lambda n, x=a, y=b, s=sizes, c=chosen: modelled(x[: s[n]], y[: s[n]], c[n]), chosen
                )
                computed = dict(zip(chosen, models, strict=True))
            for backend, got in results.items():
                for name, model in computed.items():
                    row = compare(name, model, got)
                    rows.append(
                        {"backend": backend, "output": got[1], "k": k, "distribution": distribution, **row}
                    )
        say(f"K = {k} done after {time.perf_counter() - began:.0f} s")
    return rows


def summarize(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Per backend: the variants that fit best, and the better of the reference's two models by length and distribution."""
    summary = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        ranking = ranked(mine)
        say(f"\n{backend} ({mine[0]['output']} out)")
        for entry in ranking[:4]:
            say(
                f"  {entry['variant']:40s} mean {entry['mean']:.6f} worst {entry['worst']:.6f} cells {entry['cells']}"
            )
        better = next(entry["variant"] for entry in ranking if entry["variant"] in OWN)
        show_cells(str(better), [row for row in mine if row["variant"] == better])
        summary.append({"backend": backend, "ranking": ranking})
    return summary


def ranked(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Variants by mean fraction of equal bits; those that were tried on few cells (splits of K) count what they have."""
    ranking = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        shares = [row["equal"] / row["total"] for row in rows if row["variant"] == name]
        ranking.append(
            {"variant": name, "mean": sum(shares) / len(shares), "worst": min(shares), "cells": len(shares)}
        )
    return sorted(ranking, key=lambda entry: -entry["mean"])


def show_cells(name: str, rows: list[dict[str, object]]) -> None:
    say(f"  {name}: equal of {rows[0]['total']} by distribution, and the first mismatch")
    for k in dict.fromkeys(row["k"] for row in rows):
        cells = [row for row in rows if row["k"] == k]
        counts = " ".join(f"{row['distribution']} {row['equal']}" for row in cells)
        wrong = next((m for row in cells for m in row["mismatches"]), None)
        say(
            f"    K {k:5d}: {counts}"
            + (f"  {wrong['at']} model {wrong['model']} device {wrong['device']}" if wrong else "")
        )


def record_own(rows: list[dict[str, object]]) -> None:
    """What the reference's own models reach, as a line of ``reports/gpu/validations.csv``: of each backend, length and
    distribution the better of the two, as a backend promotes its sums or does not."""
    best: dict[tuple[object, ...], tuple[int, int]] = {}
    for row in rows:
        if row["variant"] in OWN:
            name = row["backend"], row["k"], row["distribution"]
            best[name] = max(best.get(name, (0, 0)), (row["equal"], row["total"]))
    compared = sum(total for _, total in best.values())
    different = compared - sum(equal for equal, _ in best.values())
    failed = sum(equal < total for equal, total in best.values())
    record([validation("matmul, accumulation hopper_fp8", len(best), compared, different, failed)])


def main() -> None:
    commit()  # of the code that is tested, whatever happens to the tree meanwhile
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=120, help="after this, only the reference's own model is compared"
    )
    options = parser.parse_args()
    named = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    say(f"torch {torch.__version__}, {named}")
    failures: dict[str, str] = {}
    found = run_probes(options.device, failures)
    rows = sweep(options.device, options.seconds, failures)
    summary = summarize(rows)
    for name, why in failures.items():
        say(f"refused: {name}: {why}")
    if "OUT" in os.environ:
        report = {"torch": torch.__version__, "device": named, "model": asdict(HOPPER_FP8), "failures": failures,
                  "probes": found, "summary": summary, "rows": rows}  # fmt: skip
        Path(os.environ["OUT"], "hopper.json").write_text(json.dumps(report))
    if options.device == "cuda":
        record_own(rows)


if __name__ == "__main__":
    main()
