"""On a GPU: `fp8_skinny` exact on integers, inputs as `quantize` rounds them, the same bits twenty times; then its times.

    PYTHONPATH=. python tests/gpu/linear/validate_fp8_skinny.py [--seconds 60] [--rows 1 2 8 16] [--shapes 0 1]

Of bfloat16 that is quantized on the way, where a variant takes so many rows, and of codes. Times are of CUDA graphs in turn,
over weights that exceed the L2 cache, beside bfloat16 and what quantizes first: `fast.quantize`, the product of codes in
Triton.
Writes $OUT/fp8_skinny.json; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from fast.kernels.fp8_skinny.host import SCHEME, fp8_skinny
from fast.kernels.fp8_skinny.select import choose
from fast.kernels.linear import w8a8_host
from fast.kernels.scaled_mm import host as scaled_mm_host
from reference import Quantized
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.harness.poison import poisoned
from tests.gpu.linear.small.times import rate, several

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (14336, 4096))
ROWS, REPEATS, ROUNDS = (1, 2, 4, 8, 16), 20, 9
E4M3 = torch.float8_e4m3fn


def exact_weight(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of small integers, and scales that are powers of two."""
    codes = torch.randint(-16, 17, shape, device="cuda").float().to(E4M3).view(torch.uint8)
    return codes, 2.0 ** torch.randint(-1, 2, (shape[0],), device="cuda")


def ways(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: Any = None) -> dict[str, Any]:
    """Calls of bfloat16 and of codes by the rule's variants, whether or not they gain; those that there are."""
    q = fast.quantize(x, SCHEME, axis=-1)
    values, own = (choose(len(x), *codes.shape, quantizes) for quantizes in (True, False))
    calls = {
        "on the way": values and (lambda: fp8_skinny(x, codes, scale, bias, variant=values)),
        "codes": own and (lambda: fp8_skinny(q.codes, codes, scale, bias, x_scale=q.scale, variant=own)),
    }
    return {name: call for name, call in calls.items() if call}


def wrong(shape: tuple[int, int], count: int) -> Iterator[str]:
    """Results of integers that are not exact, and other bits in another call."""
    codes, scale = exact_weight(shape)
    x = torch.randint(-2, 3, (count, shape[1]), device="cuda").bfloat16()
    x *= 2.0 ** torch.arange(count, device="cuda")[:, None] / 2**8
    bias = (torch.arange(shape[0], device="cuda") % 7 - 3).bfloat16()
    q = fast.quantize(x, SCHEME, axis=-1)
    sums = (q.codes.view(E4M3).double() @ codes.view(E4M3).double().t()).float()
    wanted = (sums * q.scale.view(-1, 1) * scale + bias.float()).bfloat16()
    for name, call in ways(x, codes, scale, bias).items():
        with poisoned(0xA5):
            got = call()
            torch.cuda.synchronize()
        if got is None or not torch.equal(got, wanted):
            off = -1 if got is None else int((got != wanted).sum())
            yield f"{shape} {count} rows, {name}: {off} of {wanted.numel()} differ"
        elif not all(torch.equal(call(), got) for _ in range(REPEATS)):
            yield f"{shape} {count} rows, {name}: other bits in another call"


def wrong_inputs() -> Iterator[str]:
    """Rows of all magnitudes, infinities and NaN, column by column, that are not what `quantize` makes of them."""
    n, k = 4096, 4096
    x = torch.randn(1, k, device="cuda").bfloat16()
    eye = torch.eye(n, k, device="cuda").to(E4M3).view(torch.uint8)
    for power in (-130, -126, -60, 0, 60, 119):
        for odd in (None, torch.inf, torch.nan):
            row = x * 2.0**power
            if odd is not None:
                row[0, 5] = odd
            q = fast.quantize(row, SCHEME, axis=-1)
            wanted = (q.codes.view(E4M3).float() * q.scale.view(-1, 1)).bfloat16()
            got = fp8_skinny(row, eye, torch.ones(n, device="cuda"), variant=choose(1, n, k, True))
            if got is None or not torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)):
                yield f"inputs of 2**{power} with {odd}: {-1 if got is None else int((got != wanted).sum())} differ"


def product_of(q: Quantized, w: Quantized) -> Any:
    """The product of codes in Triton."""
    if q.shape[0] == 1:
        return w8a8_host.linear_of_codes(q, w, None, torch.bfloat16, None)
    return scaled_mm_host.linear_of_codes(q, w, None, torch.bfloat16, False, None)


def timed(shape: tuple[int, int], counts: list[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of both ways and of others, printed."""
    held = several(
        lambda: fast.quantize(torch.randn(shape, device="cuda").bfloat16(), SCHEME, axis=-1),
        shape[0] * shape[1],
    )
    dense = several(
        lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16), 2.0 * shape[0] * shape[1]
    )
    for count in counts:
        x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
        q = fast.quantize(x, SCHEME, axis=-1)
        calls: dict[str, list[Callable[[], Any]]] = {
            name: [ways(x, w.codes, w.scale)[name] for w in held]
            for name in ways(x, held[0].codes, held[0].scale)
        }
        calls["quantize"] = [lambda x=x: fast.quantize(x, SCHEME, axis=-1)] * len(held)
        calls["Triton, codes"] = [lambda w=w, q=q: product_of(q, w) for w in held]
        calls["bf16"] = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense]
        us = in_turn({name: captured(each) for name, each in calls.items()}, ROUNDS)
        floor = shape[0] * shape[1] / rate()
        told = "  ".join(f"{name} {time:.2f}" for name, time in us.items())
        print(f"{shape} {count:2} rows: floor {floor:.2f}  {told}", flush=True)
        yield {"shape": shape, "rows": count, "floor": floor, "us": us}


def main() -> int:
    """Compare, then time what the seconds allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="their numbers")
    options = parser.parse_args()
    end, out = time.monotonic() + options.seconds, os.environ.get("OUT")
    shapes = [SHAPES[at] for at in options.shapes]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "times": []}
    found["wrong"] = [line for shape in shapes for count in options.rows for line in wrong(shape, count)]
    found["wrong"] += wrong_inputs()
    print("\n".join([*found["wrong"], f"{len(found['wrong'])} wrong"]), flush=True)
    for shape in shapes:
        if time.monotonic() > end:
            print(f"{shape}: not reached", flush=True)
            continue
        found["times"] += timed(shape, options.rows)
        if out:
            Path(out, "fp8_skinny.json").write_text(json.dumps(found, indent=1))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
