"""Times of `linear_sparse` that say most about the model of its choice: a few variants of each shape, nothing beside them.

Of a shape the model's first choice, the best with other tiles, and the best of its own tiles in other clusters. A result is
compared with the dense product before it is timed; rows are written after every shape, so that a run that is killed leaves
what it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.select import MULTIPROCESSORS, RATES, candidates, cycles_of, terms
from fast.kernels.sm90_sparse24_gemm.variants import Variant
from tests.gpu.sparsity.products.inputs import Case, case
from tests.gpu.sparsity.products.timing import COLD, Method, prepare, times
from tests.gpu.sparsity.wgmma.model_fit import BITS

#: Tokens, then features and K: in the order in which they say most.
TOKENS = (16, 128, 2048, 8192)
WEIGHTS = ((8192, 8192), (14336, 4096), (4096, 14336))
SHAPES = tuple((m, n, k) for n, k in WEIGHTS for m in TOKENS)
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
#: Largest difference of a result, relative to its norm: one rounding to bfloat16 and sums that are cut.
LIMIT = 1e-2
COMPARED = 256
#: Seconds of a shape's timing.
EACH = 0.4
Say = Callable[[str], None]
Shape = tuple[int, int, int]


def chosen(shape: Shape, name: str) -> list[Variant]:
    """At most three variants, the model's choice first."""
    m, n, k = shape
    bits = BITS[name]
    length = k * bits // 8
    order = sorted(
        candidates(m, bits, False),
        key=lambda v: cycles_of(terms(v, m, n, length, bits, MULTIPROCESSORS), RATES),
    )
    best = order[0]
    others = (
        next((v for v in order if v[:3] != best[:3]), None),
        next(
            (v for v in order if v[:3] == best[:3] and (v.pair, v.splits) != (best.pair, best.splits)), None
        ),
    )
    return [best, *(v for v in others if v is not None)]


def jobs(names: Sequence[str]) -> Iterator[tuple[Variant, str]]:
    """What is timed of all shapes, with the names of dtypes."""
    yield from ((variant, name) for shape in SHAPES for name in names for variant in chosen(shape, name))


def measured(say: Say, left: Callable[[], float], path: Path, names: Sequence[str]) -> bool:
    """Time all shapes that there is time for; whether every result was right."""
    rows: list[dict[str, Any]] = []
    right = True
    for shape in SHAPES:
        for name in names:
            if left() < 2:
                say(f"no time for {shape} {name} and what follows")
                return right
            try:
                for row in table(say, shape, name):
                    right &= row["right"]
                    rows.append(row)
            except Exception as error:  # noqa: BLE001  others go on
                say(f"{shape} {name}: {type(error).__name__}: {str(error)[:200]}")
                torch.cuda.synchronize()
            path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=0))
            torch.cuda.empty_cache()
    return right


def table(say: Say, shape: Shape, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a shape: what the model says of a variant, and microseconds."""
    m, n, k = shape
    kind = DTYPES[name]
    size = kind.itemsize * (m * k + n * k // 2) + m * n * 2
    count = max(2, min(8, COLD // size + 1))
    cases = [case(m, n, k, (kind, kind), whole=False, dense=not place) for place in range(count)]
    found: list[tuple[Variant, Method, bool]] = []
    for variant in chosen(shape, name):
        say(f"{m}x{n}x{k} {name} {variant.name}")
        made = method(cases, variant, scaled=name == "fp8")
        error = error_of(cases[0], made.call(0), scaled=name == "fp8")
        if not error <= LIMIT:
            say(f"    WRONG by {error:.1e} of its size")
        else:
            prepare(made, count)
        found.append((variant, made, error <= LIMIT))
    took = times([made for _, made, _ in found], count, EACH)
    for variant, made, is_right in found:
        row = described(shape, name, variant)
        if made.name in took:
            row |= dict(zip(("us", "low", "high"), took[made.name], strict=True))
            say(
                f"    {variant.name:22s} {row['us']:9.2f} us [{row['low']:.2f}, {row['high']:.2f}], model "
                f"{row['predicted']:9.2f} {made.how} {made.error}"
            )
        yield row | {"right": is_right, "how": made.how, "error": made.error, "buffers": count}


def described(shape: Shape, name: str, variant: Variant) -> dict[str, Any]:
    """A variant and what the model says of it."""
    m, n, k = shape
    parts = terms(variant, m, n, k * BITS[name] // 8, BITS[name], MULTIPROCESSORS)
    cycles = cycles_of(parts, RATES)
    return {
        "shape": shape, "dtype": name, "name": variant.name, "variant": variant._asdict(), "terms": parts._asdict(),
        "cycles": cycles, "predicted": cycles / RATES.clock / 1e3,
    }  # fmt: skip


def method(cases: Sequence[Case], variant: Variant, *, scaled: bool) -> Method:
    """A variant's calls."""

    def operands(one: Case) -> tuple[Any, ...]:
        scales = (one.x_scale, one.scale) if scaled else (None, None)
        return (one.x, one.values, one.arranged, None, *scales)

    call = host.product("bfloat16", True, operands(cases[0]), variant)
    return Method(variant.name, lambda i: call(*operands(cases[i])))


def error_of(one: Case, y: Any, *, scaled: bool) -> float:
    """The difference of the first rows from the product in float32, over its norm."""
    if y is None:
        return float("inf")
    exact = one.x[:COMPARED].float() @ one.dense.float().t()
    if scaled:
        exact = exact * one.x_scale[:COMPARED] * one.scale.t()
    return float((y[:COMPARED].float() - exact).norm() / exact.norm())


__all__ = ["BITS", "SHAPES", "chosen", "described", "jobs", "measured"]
