"""On a GPU: `sm90_w4a16_gemv` exact on integers, every code, its bound, the same bits twenty times; then its times.

    PYTHONPATH=. python tests/gpu/linear/validate_linear_skinny.py [--times 60] [--schemes nf4 nvfp4 mxfp8_e4m3 mxfp4]
        [--rows 1 16] [--json FILE] [--no-bits]

Exactness is of every scheme, or of those that are named, of every variant that is timed, poisoned outputs between guards. Times
are of CUDA graphs in turn, over weights that exceed the L2 cache, beside bfloat16 and `linear_small`; the rule's variant is
first. Kernels are compiled on all cores before. Prints as it goes, writes the rows; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fast.kernels.linear_small import host
from fast.kernels.sm90_w4a16_gemv.host import sm90_w4a16_gemv
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.skinny import bits
from tests.gpu.linear.skinny.candidates import compile_all, compile_peers, dtypes, form_named, variants
from tests.gpu.linear.small import times as speed
from tests.gpu.linear.small import weights

NEW = ("nf4", "nvfp4", "mxfp8_e4m3", "mxfp4")
SCHEMES = (
    *NEW, "int4_g128", "int4_g128_asymmetric", "int8_rowwise", "int4_g32", "fp8_rowwise", "int8_g128",
)  # fmt: skip
BITS = (*SCHEMES, "int4_g64", "int4_g32_asymmetric", "int8_rowwise_asymmetric", "fp8_tensorwise")
SHAPES, ROWS = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)), (1, 2, 4, 8, 16)


def compare(found: dict[str, Any], schemes: list[str]) -> None:
    """All of `bits`."""
    wanted = bits.tasks(schemes, [one for one in (*NEW, "int4_g128", "int8_rowwise") if one in schemes])
    compile_all((form_named(scheme, dtype), count, shape) for scheme, shape, count, dtype in wanted)
    wide = [
        (form_named(scheme, dtype)._replace(out="float32"), 16, bits.SMALL)
        for scheme in schemes
        for dtype in dtypes(scheme)
    ]
    compile_all(wide)
    checks = [(bits.wrong_bits, task) for task in wanted]
    checks += [(bits.wrong_codes, (scheme, dtype)) for scheme in schemes for dtype in dtypes(scheme)]
    checks += [(bits.beyond_bound, (scheme,)) for scheme in schemes]
    for check, task in checks:
        wrong = list(check(*task))
        found["wrong"] += wrong
        if wrong:
            print("\n    ".join([f"WRONG {check.__name__} {task}", *wrong[:3]]), flush=True)
    print(f"{len(checks)} checks, {len(found['wrong'])} wrong", flush=True)


def time_row(
    scheme: str, shape: tuple[int, int], count: int, held: list[Any], dense: list[Any]
) -> dict[str, Any]:
    """Microseconds of variants and peers."""
    x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
    form = form_named(scheme, torch.bfloat16)
    tiling = host.tiling_of(*shape, held[0].element, held[0].group, count)
    calls: dict[str, list[Any]] = {
        "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in dense],
        "linear_small": [lambda w=w, t=tiling: host.linear_small(x, w, tiling=t) for w in held],
    }
    for variant in variants(form, count, shape):
        calls[",".join(map(str, variant))] = [
            lambda w=w, v=variant: sm90_w4a16_gemv(x, w, variant=v) for w in held
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


def time_all(found: dict[str, Any], options: argparse.Namespace) -> None:
    """What the seconds allow, shape by shape, so that all schemes have rows of the first ones."""
    wanted = product(options.schemes, options.rows, SHAPES)
    compile_all((form_named(scheme, torch.bfloat16), count, shape) for scheme, count, shape in wanted)
    end = time.monotonic() + options.times
    for shape, scheme in product(SHAPES, options.schemes):
        if time.monotonic() > end:
            print(f"{scheme} {shape}: not reached", flush=True)
            continue
        size = weights.filled_weight(scheme, shape).nbytes
        held = speed.several(lambda s=scheme, n=shape: weights.filled_weight(s, n), size)
        dense = speed.several(
            lambda n=shape: torch.randn(n, device="cuda", dtype=torch.bfloat16), 2.0 * shape[0] * shape[1]
        )
        found["times"] += [time_row(scheme, shape, count, held, dense) for count in options.rows]
        save(found, options.json)


def save(found: dict[str, Any], path: str | None) -> None:
    """Rows so far."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1))


def main() -> int:
    """Compare, then time what the seconds allow."""
    out = os.environ.get("OUT")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=float, default=60.0)
    parser.add_argument("--schemes", nargs="*")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--json", default=f"{out}/linear_skinny.json" if out else None)
    parser.add_argument("--no-bits", action="store_true")
    options = parser.parse_args()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        peers = compile_peers(pool, options.schemes or SCHEMES, SHAPES, options.rows)
        found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "wrong": [], "times": []}
        if not options.no_bits:
            compare(found, list(options.schemes or BITS))
            save(found, options.json)
        began = time.monotonic()
        wait(peers)
        print(f"waited {time.monotonic() - began:.1f} s for the tiles of linear_small", flush=True)
    options.schemes = options.schemes or SCHEMES
    time_all(found, options)
    save(found, options.json)
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
