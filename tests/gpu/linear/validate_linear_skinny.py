"""On a GPU: `linear_skinny` exact on integers, within its bound on others, the same bits a hundred times; then its times.

    PYTHONPATH=. python tests/gpu/linear/validate_linear_skinny.py [--times 60] [--schemes int4_g128 int8_rowwise] [--rows 1 16]

Exactness is of every scheme, of every variant that is timed, poisoned outputs between guards. Times are of CUDA graphs in turn,
over weights that exceed the L2 cache, beside bfloat16 and `linear_small`; the rule's variant is first. Prints as it goes,
writes $OUT/linear_skinny.json; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab.config.recipe import named
from fast.kernels.linear_skinny.host import linear_skinny
from fast.kernels.linear_skinny.select import TILES, choose
from fast.kernels.linear_skinny.variants import STEP, Form, Variant, fitted, sources
from fast.kernels.linear_small import host
from fast.kernels.sparse_mm.nvrtc import cached_cubin
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.harness.poison import poisoned
from tests.gpu.linear.small import times as speed
from tests.gpu.linear.small import weights
from tests.support.linear_cases import inputs, outside, weight

SCHEMES = ("int4_g128", "int4_g128_asymmetric", "int8_rowwise", "int4_g32", "fp8_rowwise", "int8_g128")
BITS = (*SCHEMES, "int4_g64", "int4_g32_asymmetric", "int8_rowwise_asymmetric", "fp8_tensorwise")
SHAPES, ROWS, REPEATS = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)), (1, 2, 4, 8, 16), 100
DTYPES = (torch.bfloat16, torch.float16)


def form_of(w: host.ArrangedWeight, dtype: torch.dtype) -> Form:
    """Of a product in the inputs' dtype."""
    return Form(
        w.element, w.group, w.zero is not None, dtype == torch.float16, str(dtype).removeprefix("torch.")
    )


def variants(form: Form, count: int, shape: tuple[int, int]) -> list[Variant]:
    """The rule's first."""
    steps, tokens = shape[1] // STEP, next(size for size in TILES if count <= size)
    found: list[Variant | None] = [choose(form, count, *shape)]
    for blocks, phases, splits, at_once in product((1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2)):
        programs = shape[0] // 64 // blocks * splits
        if steps // splits >= 2 and 60 <= programs <= 600 and blocks * phases <= 4:
            one = fitted(form, (tokens, blocks, phases, splits), count, steps, at_once)
            if one is not None and one.stages >= 2:
                found.append(one)
    return [one for one in dict.fromkeys(found) if one is not None]


def compile_all(wanted: Iterable[tuple[Form, int, tuple[int, int]]]) -> None:
    """Variants into the cache of cubins, many at once: NVRTC lets other threads run."""
    began, todo = time.monotonic(), {(one, form) for form, *rest in wanted for one in variants(form, *rest)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: cached_cubin(*sources(*pair)), todo))
    print(f"compiled {len(todo)} variants in {time.monotonic() - began:.1f} s", flush=True)


def form_named(scheme: str, dtype: torch.dtype) -> Form:
    """Of a scheme's weights."""
    zero = scheme.endswith("asymmetric")
    return Form(*weights.KINDS[scheme], zero, dtype == torch.float16, str(dtype).removeprefix("torch."))


def wrong_bits(scheme: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> Iterator[str]:
    """Variants whose sums of integers are not exact, or not the same in a call of many."""
    w, values = weights.drawn(scheme, shape)
    arranged = host.arrange(w)
    x = torch.randint(-2, 3, (count, shape[1]), device="cuda").to(dtype)
    bias = (torch.arange(shape[0], device="cuda") % 7 - 3).to(dtype)
    expected = (x.double() @ values.t() + bias.double()).float().to(dtype)
    form = form_of(arranged, dtype)
    for variant in variants(form, count, shape):
        with poisoned(0xA5):
            got = linear_skinny(x, arranged, bias, variant=variant)
            torch.cuda.synchronize()
        if got is None or not torch.equal(got, expected):
            off = -1 if got is None else int((got != expected).sum())
            yield f"{scheme} {shape} {count} rows {dtype} {variant}: {off} of {expected.numel()} differ"
            continue
        again = [linear_skinny(x, arranged, bias, variant=variant) for _ in range(REPEATS)]
        if not all(torch.equal(one, got) for one in again):
            yield f"{scheme} {shape} {count} rows {variant}: other bits in another call"


def compare(found: dict[str, Any]) -> None:
    """All schemes; whole layers of two."""
    tasks = [
        (scheme, (256, 1024), count, dtype) for scheme in BITS for count, dtype in product((1, 5, 16), DTYPES)
    ]
    tasks += [
        (scheme, shape, count, torch.bfloat16)
        for scheme in SCHEMES[:3]
        for shape in SHAPES[:2]
        for count in (1, 16)
    ]
    compile_all((form_named(scheme, dtype), count, shape) for scheme, shape, count, dtype in tasks)
    for task in tasks:
        wrong = list(wrong_bits(*task))
        found["wrong"] += wrong
        if wrong:
            print("\n    ".join([f"WRONG {task}", *wrong[:3]]), flush=True)
    for scheme in BITS:
        w, x = weight(named(scheme), 256, 1024), inputs(3, 1024, torch.bfloat16)
        moved = host.arrange(speed.copied(w) if w.codes.is_cuda else to_gpu(w))
        form = form_of(moved, torch.bfloat16)
        got = linear_skinny(x.cuda(), moved, variant=choose(form, 3, *moved.shape))
        beyond = outside(got.cpu(), x, w, None)
        found["wrong"] += [f"{scheme}: {beyond} beyond the bound"] if beyond else []
    print(f"{len(tasks)} comparisons, {len(found['wrong'])} wrong", flush=True)


def to_gpu(w: Any) -> Any:
    """The weight's parts there."""
    from dataclasses import replace

    parts = {part: getattr(w, part) for part in ("codes", "scale", "zero")}
    return replace(w, **{name: None if part is None else part.cuda() for name, part in parts.items()})


def time_row(
    scheme: str, shape: tuple[int, int], count: int, held: list[Any], dense: list[Any]
) -> dict[str, Any]:
    """Microseconds of variants and peers."""
    x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
    form = form_of(held[0], torch.bfloat16)
    tiling = host.tiling_of(*shape, held[0].element, held[0].group, count)
    calls: dict[str, list[Any]] = {
        "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in dense],
        "linear_small": [lambda w=w, t=tiling: host.linear_small(x, w, tiling=t) for w in held],
    }
    for variant in variants(form, count, shape):
        calls[",".join(map(str, variant))] = [
            lambda w=w, v=variant: linear_skinny(x, w, variant=v) for w in held
        ]
    times = in_turn({name: captured(each) for name, each in calls.items()}, 9)
    own = {name: us for name, us in times.items() if name not in ("bf16", "linear_small")}
    best, floor = (
        min(own, key=own.__getitem__),
        (held[0].nbytes + x.nbytes + 2 * count * shape[0]) / speed.rate(),
    )
    rule = next(iter(own))
    print(
        f"{scheme} {shape} {count:2}: best {own[best]:6.2f} ({best}) rule {own[rule]:6.2f} ({rule}) floor {floor:5.2f}  "
        f"bf16 {times['bf16']:6.2f} x{times['bf16'] / own[best]:.2f}  linear_small {times['linear_small']:6.2f}",
        flush=True,
    )
    return {"scheme": scheme, "shape": shape, "rows": count, "floor": floor, "rule": rule, "us": times}


def main() -> int:
    """Compare, then time what the seconds allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=float, default=60.0)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--no-bits", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "wrong": [], "times": []}
    if not options.no_bits:
        compare(found)
    wanted = product(options.schemes, options.rows, SHAPES)
    compile_all((form_named(scheme, torch.bfloat16), count, shape) for scheme, count, shape in wanted)
    end = time.monotonic() + options.times
    for scheme, shape in product(options.schemes, SHAPES):
        if time.monotonic() > end:
            break
        size = weights.filled_weight(scheme, shape).nbytes
        held = speed.several(lambda s=scheme, n=shape: weights.filled_weight(s, n), size)
        dense = speed.several(
            lambda n=shape: torch.randn(n, device="cuda", dtype=torch.bfloat16), 2.0 * shape[0] * shape[1]
        )
        for count in options.rows:
            if time.monotonic() < end:
                found["times"].append(time_row(scheme, shape, count, held, dense))
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "linear_skinny.json").write_text(json.dumps(found, indent=1))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
