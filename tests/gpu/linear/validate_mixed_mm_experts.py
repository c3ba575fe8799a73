"""On a Hopper GPU: `sm90_w4a16_gemm_of_experts` exact on integers, each row within its bound, the same bits twenty times; its
times.

    PYTHONPATH=. python tests/gpu/linear/validate_mixed_mm_experts.py [--bits 40] [--times 60] [--schemes int4_g128]
        [--tokens 256 2048]

Eight experts, two rows of each of some tokens among them at random, and divisions with experts that have none. Times are of
CUDA graphs in turn: torch's bfloat16 product, every variant, `grouped_linear_small`, and the dense weights for the call. Prints
as it goes, writes $OUT/mixed_mm_experts.json, whose times the rule's tests read (`reports/data`); exits with 1 on any
difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.kernels.linear_small import grouped, host
from fast.kernels.linear_small.dense import arranged_dense
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm.experts import ExpertsProduct, candidates, sm90_w4a16_gemm_of_experts
from fast.kernels.sm90_w4a16_gemm.host import NAME, weight_of
from fast.kernels.sm90_w4a16_gemm.variants import sources
from fast.launch.nvrtc import cached_cubin
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.mixed.bits import randomly_scaled
from tests.gpu.linear.mixed.compared import weight_named
from tests.gpu.linear.small import weights

BEGIN = time.monotonic()
EXPERTS, REPEATS, ROUNDS = 8, 20, 5
SHAPES = ((14336, 4096), (4096, 14336))
SCHEMES = (
    "int4_g128", "fp8_rowwise", "int8_rowwise", "int4_g128_asymmetric", "int4_g32", "mxfp4", "nvfp4", "mxfp8_e4m3",
)  # fmt: skip
TOKENS = (64, 128, 256, 512, 2048, 8192)
#: Rows of each expert; features and columns of its weight.
CASES: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = (
    ((100, 0, 257, 3, 64, 129, 0, 500), (384, 512)),
    ((1, 2000, 0, 31), (1024, 1024)),
    ((700,) * 6, (2048, 896)),
    ((3, 0, 17, 90, 0, 0, 1, 64) * 32, (256, 512)),
)


def say(text: str) -> None:
    """With the seconds that have passed."""
    print(f"[{time.monotonic() - BEGIN:6.1f}] {text}", flush=True)


def compiled(job: Any) -> None:
    """Into the cache on the disk."""
    one, weight, dtype = job
    cached_cubin(*sources(one, weight, dtype, dtype), name=NAME)


def compile_all(schemes: Any) -> None:
    """Every variant, on all cores; nothing of a GPU is touched."""
    jobs = [
        (one, weight_named(name), dtype)
        for name in schemes for one in candidates(weight_named(name)) for dtype in ("bfloat16", "float16")
    ]  # fmt: skip
    with get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(compiled, jobs, chunksize=1)
    say(f"compiled {len(jobs)} variants")


def product(x: torch.Tensor, w: ArrangedWeight, ends: torch.Tensor, one: Any) -> torch.Tensor:
    """The result in memory that held NaN, behind and in front of rows of NaN that must stay, as rows of no expert must."""
    call, total = ExpertsProduct(x, w, one), int(ends[-1])
    kept = torch.full((len(x) + 2, w.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    call.allocate = lambda shape, strides, dtype: kept[1:-1]
    y = call(x, w.words, w.scale, w.zero, ends)
    assert y is not None
    if not (kept[0].isnan().all() and kept[1 + total :].isnan().all()):
        raise ValueError("elements beyond the experts' rows were written")
    return y[:total].clone()


def by_expert(x: torch.Tensor, ends: torch.Tensor, dense: list[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    bounds = [0, *ends.tolist()]
    parts = zip(bounds, bounds[1:], dense, strict=False)
    return torch.cat([x[a:b].double() @ w.double().t() for a, b, w in parts])


def wrong_of(name: str, counts: tuple[int, ...], shape: tuple[int, int], dtype: torch.dtype) -> Iterator[str]:
    """What differs, of every variant and of the rule's."""
    made = [weights.drawn(name, shape, seed) for seed in range(len(counts))]
    experts = grouped.stacked([host.arrange(w) for w, _ in made])  # type: ignore[misc]
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    x = torch.randint(-1, 2, (sum(counts) + 5, shape[1]), device="cuda").to(dtype)
    wanted = by_expert(x, ends, [dense for _, dense in made]).float().to(dtype)
    one_by_one = [randomly_scaled(host.arrange(w)) for w, _ in made]  # type: ignore[arg-type]
    some, draws = grouped.stacked(one_by_one), torch.randn_like(x)
    dense = [arranged_dense(one, dtype).double() for one in one_by_one]  # type: ignore[union-attr]
    truth = by_expert(draws, ends, dense)
    size = by_expert(draws.abs(), ends, [one.abs() for one in dense])
    unit = torch.finfo(dtype).eps / 2
    allowed = truth.abs() * unit + size * (shape[1] * 2.0**-23) * (1 + unit) + torch.finfo(dtype).tiny
    for one in (None, *candidates(weight_named(name))):
        label = f"{name} {shape} {counts} {dtype} {one.name if one else 'rule'}"
        bad = sum(not torch.equal(product(x, experts, ends, one), wanted) for _ in range(REPEATS))
        if bad:
            yield f"{label}: integers differ {bad} times of {REPEATS}"
        found = [product(draws, some, ends, one) for _ in range(3)]
        far = int((~((found[0].double() - truth).abs() <= allowed)).sum())
        if far or not all(torch.equal(found[0], again) for again in found):
            yield f"{label}: {far} outside of the bound, or other bits another time"


def counts_of(tokens: int) -> torch.Tensor:
    """Rows of each expert, two experts of each token."""
    draw = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    return torch.bincount(draw.topk(2, 1).indices.flatten(), minlength=EXPERTS)


def by_dense(
    x: torch.Tensor, each: list[ArrangedWeight], ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """All weights dense for the call."""
    dense = torch.stack([arranged_dense(one, dtype) for one in each])  # type: ignore[misc]
    return torch._grouped_mm(x, dense.transpose(1, 2), ends)


def timed(
    x: torch.Tensor, each: list[ArrangedWeight], dense: torch.Tensor, ends: torch.Tensor
) -> dict[str, float]:
    """Microseconds."""
    experts, weight = grouped.stacked(each), weight_of(each[0])
    graphs = {
        "bf16": captured([lambda: torch._grouped_mm(x, dense.transpose(1, 2), ends)]),
        "rule": captured([lambda: sm90_w4a16_gemm_of_experts(x, experts, ends)]),
        "dense": captured([partial(by_dense, x, each, ends, x.dtype)]),
    }
    if len(x) <= 128 * EXPERTS:
        graphs["linear_small"] = captured([lambda: grouped.grouped_linear_small(x, experts, ends)])
    for one in candidates(weight):
        call = ExpertsProduct(x, experts, one)
        graphs[one.name] = captured([partial(call, x, experts.words, experts.scale, experts.zero, ends)])
    return in_turn(graphs, ROUNDS)


def measure(options: Any, found: list[dict[str, Any]]) -> None:
    """Times of all, until there is no time left."""
    end = time.monotonic() + options.times
    for shape in SHAPES:
        dense = torch.randn(EXPERTS, *shape, device="cuda", dtype=torch.bfloat16) / 64
        for name in options.schemes:
            each = [weights.filled_weight(name, shape) for _ in range(EXPERTS)]
            for tokens in options.tokens:
                if time.monotonic() > end:
                    say(f"not timed: {name} {shape} {tokens} tokens")
                    continue
                x = torch.randn(2 * tokens, shape[1], device="cuda", dtype=torch.bfloat16)
                counts = counts_of(tokens)
                times = timed(x, each, dense, counts.cumsum(0).to(torch.int32).cuda())
                about = {"scheme": name, "shape": shape, "tokens": tokens, "rows": counts.tolist()}
                found.append({**about, "times": {key: round(value, 1) for key, value in times.items()}})
                told = "  ".join(f"{key} {value:.1f}" for key, value in times.items())
                say(f"{name} {shape} {tokens:4} tokens: {told}  x{times['bf16'] / times['rule']:.2f}")


def main() -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=float, default=40.0)
    parser.add_argument("--times", type=float, default=60.0)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args()
    compile_all(options.schemes)
    end, wrong, found = time.monotonic() + options.bits, list[str](), list[dict[str, Any]]()
    for at, name in enumerate(options.schemes if options.bits else ()):
        for number, (counts, shape) in enumerate(CASES):
            dtype = (torch.bfloat16, torch.float16)[(at + number) % 2]
            if time.monotonic() > end:
                say(f"not compared: {name} {counts}")
                continue
            bad = list(wrong_of(name, counts, shape, dtype))
            say("\n    ".join([f"{name} {counts} {dtype}: {len(bad)} wrong", *bad[:8]]))
            wrong += bad
    if options.times:
        measure(options, found)
    if "OUT" in os.environ:
        about = {"device": torch.cuda.get_device_name(), "wrong": wrong, "rows": found}
        Path(os.environ["OUT"], "mixed_mm_experts.json").write_text(json.dumps(about, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
