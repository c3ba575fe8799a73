"""`sm90_sparse24_gemm`: every tile with every cluster bit for bit on integers, within the bound on others, the same every time;
and times that say most about the model of its choice.

Timed are of a shape the model's first choice, the best with other tiles, and the best of its own tiles in other clusters; a
result is compared with the dense product before. Beside other libraries' products it is timed by the experiment `sparsity`.

As a program: fits that model to such rows, and says what its choice loses. No GPU is needed. Times of an H200 stand in
`reports/gpu/family_times.csv`.

    PYTHONPATH=. python tests/gpu/sparsity/gemm.py $OUT/sm90_sparse24_gemm.json

Prints the constants for
`fast.kernels.sm90_sparse24_gemm.host.Rates`, how far predictions are off, and for each shape what the
model takes of what was
timed, before and after.

Least squares on the logarithm of times, over the logarithms of the constants; each is held to its value of before as weakly as
one measurement (`PRIOR`), so that what no time says anything of stays where it was. The clock is not fitted: a factor of it is
one of all others. Levenberg's steps with differences for derivatives, from several beginnings: the model is a maximum of three,
whose valleys are many.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import reference
from fast.gemm import families
from fast.kernels.sm90_sparse24_gemm.host import (
    ELEMENTS,
    KERNEL,
    C,
    Problem,
    Rates,
    Terms,
    Variant,
    candidates,
    cycles_of,
    fitted,
    rates,
    terms,
)
from tests.gpu.harness.poison import check_guards, outputs
from tests.gpu.harness.products import sparse24_gemm
from tests.gpu.harness.subject import Asked, Check, Row, Subject, beyond, differs, in_threads
from tests.gpu.harness.timing import measured
from tests.gpu.sparsity.cases import Case, case, wanted

Shape = tuple[int, int, int]
Dtypes = tuple[str, str]
#: Of values and x, and every how many variants are compared; "promoted" sums are added up outside of the tensor core.
DTYPES: dict[str, tuple[Dtypes, bool, int]] = {
    "fp8": (("float8_e4m3fn",) * 2, False, 1), "bf16": (("bfloat16",) * 2, False, 1), "int8": (("int8",) * 2, False, 4),
    "fp16": (("float16",) * 2, False, 5), "fp8 promoted": (("float8_e4m3fn",) * 2, True, 3),
    "e4m3 x e5m2": (("float8_e4m3fn", "float8_e5m2"), False, 9), "e5m2 x e4m3": (("float8_e5m2", "float8_e4m3fn"), False, 9),
    "e5m2": (("float8_e5m2",) * 2, False, 9),
}  # fmt: skip
#: Odd and whole sizes: (tokens above a tile's, features, K in groups of 32 elements of 8 bits or 16 of 16).
COMPARED = ((-3, 72, 5), (0, 256, 32), (1, 331, 17), (70, 640, 64))
REPEATS, POISON = 20, 0xA5
RATES = rates()
#: Bits of an element, by the dtypes of rows.
BITS = {"fp8": 8, "bf16": 16}
#: Tokens, then features and K: in the order in which they say most.
TOKENS, WEIGHTS = (16, 128, 2048, 8192), ((8192, 8192), (14336, 4096), (4096, 14336))
SHAPES: tuple[Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS for m in TOKENS)
#: Largest difference of a timed result, relative to its norm: one rounding to bfloat16 and sums that are cut; rows compared.
LIMIT, FIRST = 1e-2, 256


def variants(bits: int, promote: bool) -> Iterator[Variant]:
    """Every tile with every cluster."""
    for tokens, groups, panels in C.tiles + C.wide:
        for pair, splits in C.clusters:
            whole = tokens // pair >= 8 and tokens // pair % 8 == 0
            if whole and not (tokens > 128 and (splits > 1 or promote)):
                yield fitted(tokens, groups, 1 if promote else panels, pair, splits, bits, promote=promote)


def kinds(dtypes: Dtypes) -> tuple[torch.dtype, torch.dtype]:
    """torch's."""
    return getattr(torch, dtypes[0]), getattr(torch, dtypes[1])


def result_dtypes(dtypes: Dtypes) -> tuple[torch.dtype, ...]:
    """Of the output that are compared."""
    return torch.bfloat16, torch.int32 if dtypes[0] == "int8" else torch.float32


def compile_all(jobs: Iterable[tuple[Variant, Dtypes, torch.dtype]]) -> None:
    """Into the cache of cubins."""
    tasks = [(one, Problem(ELEMENTS[dtypes], str(out).removeprefix("torch."))) for one, dtypes, out in jobs]
    in_threads(lambda task: KERNEL.cubin(*task), tasks)


def checks(asked: Asked) -> Iterator[Check]:
    """Small clusters first, so that a short run has seen something of each tile and dtype."""
    jobs = [
        (name, one, dtypes)
        for name, (dtypes, promote, step) in DTYPES.items()
        if not asked.schemes or name in asked.schemes
        for one in list(variants(ELEMENTS[dtypes].bits, promote))[:: 1 if asked.every else step]
    ]
    jobs.sort(key=lambda job: (job[1].cluster, job[1].pair, job[1].tokens))
    compile_all((one, dtypes, out) for _, one, dtypes in jobs for out in result_dtypes(dtypes))
    for name, one, dtypes in jobs:
        yield f"{one.name} {name}", partial(wrong_of, one, dtypes)


def run(variant: Variant, one: Case, out: torch.dtype, scaled: bool, arranged: bool = True) -> torch.Tensor:
    """The result of a variant; WroteBeyond where it wrote more than that."""
    extra = (one.bias, one.x_scale, one.scale) if scaled else (None, None, None)
    operands = (one.x, one.values, one.arranged if arranged else one.metadata, *extra)
    buffers: list[tuple[torch.Tensor, int]] = []
    allocate = outputs(POISON, buffers)
    made = sparse24_gemm(str(out).removeprefix("torch."), variant, *operands, allocate=allocate)
    torch.cuda.synchronize()
    check_guards(buffers, POISON)
    assert made is not None
    return made


def wrong_of(variant: Variant, dtypes: Dtypes) -> Iterator[str]:
    """On integers; then on random numbers, of which sums of int8 are exact and were seen."""
    bits = ELEMENTS[dtypes].bits
    for more, features, groups in COMPARED:
        tokens = max(1, variant.tokens + more)
        one = case(tokens, features, groups * (32 if bits == 8 else 16), kinds(dtypes), whole=True)
        for out in result_dtypes(dtypes):
            scaled = out != torch.int32
            label = f"{tokens} x {features} {out}"
            yield from differs(label, run(variant, one, out, scaled), wanted(one, out, scaled))
    if variant.pair <= 2 and dtypes[0] != "int8":
        yield from wrong_random(variant, dtypes)


def wrong_random(variant: Variant, dtypes: Dtypes) -> Iterator[str]:
    """Bits that differ between calls or orders of metadata, or errors beyond the bound."""
    one = case(96, 200, 2048, kinds(dtypes), whole=False)
    first = run(variant, one, torch.float32, True)
    for _ in range(REPEATS):
        yield from differs("another call", run(variant, one, torch.float32, True), first)
    yield from differs("canonical metadata", run(variant, one, torch.float32, True, arranged=False), first)
    given = [part.cpu() for part in (one.x, one.values, one.metadata, one.bias)]
    scales = {"x_scale": one.x_scale.cpu(), "scale": one.scale.cpu()}
    bound: Any = reference.linear_sparse_error_bound(*given, **scales, fast_sums=not variant.promote)
    sums = one.x.double().cpu() @ one.dense.double().cpu().T
    truth = sums * scales["x_scale"].double() * scales["scale"].double().T + given[3].double()
    yield from beyond("random numbers", first, truth, bound)


def chosen(shape: Shape, name: str) -> list[Variant]:
    """At most three variants, the model's choice first."""
    m, n, k = shape
    bits = BITS[name]
    length = k * bits // 8

    def modelled(one: Variant) -> float:
        return cycles_of(terms(one, m, n, length, bits), RATES)

    best, *order = sorted(candidates(m, bits, False), key=modelled)
    tiles = next((one for one in order if one[:3] != best[:3]), None)
    same = (
        one for one in order if one[:3] == best[:3] and (one.pair, one.splits) != (best.pair, best.splits)
    )
    return [best, *(one for one in (tiles, next(same, None)) if one is not None)]


def described(shape: Shape, name: str, variant: Variant) -> Row:
    """A variant and what the model says of it."""
    m, n, k = shape
    parts = terms(variant, m, n, k * BITS[name] // 8, BITS[name])
    cycles = cycles_of(parts, RATES)
    return {
        "shape": shape, "dtype": name, "name": variant.name, "variant": variant._asdict(), "terms": parts._asdict(),
        "predicted": cycles / RATES.clock / 1e3,
    }  # fmt: skip


def times(asked: Asked) -> Iterator[Row]:
    """A row for each variant of a shape: what the model says, and microseconds; `right`: whether its result is."""
    names = [name for name in asked.schemes or BITS if name in BITS]
    shapes = [shape for shape in asked.shapes or SHAPES if len(shape) == 3]
    compile_all(
        (one, DTYPES[name][0], torch.bfloat16)
        for shape in shapes
        for name in names
        for one in chosen(shape, name)
    )
    for m, n, k in shapes:
        for name in names:
            yield from table((m, n, k), name)


def table(shape: Shape, name: str) -> Iterator[Row]:
    """Of a shape and dtype, variants in turn."""
    m, n, k = shape
    dtypes = kinds(DTYPES[name][0])
    size = dtypes[0].itemsize * (m * k + n * k // 2) + m * n * 2
    cases = [
        case(m, n, k, dtypes, whole=False, dense=not at)
        for at in range(max(2, min(8, (1 << 28) // size + 1)))
    ]
    scaled, methods, right = name == "fp8", {}, {}
    for variant in chosen(shape, name):
        call = product_of(variant)
        calls = [partial(call, *operands(one, scaled)) for one in cases]
        right[variant.name] = error_of(cases[0], calls[0](), scaled=scaled) <= LIMIT
        methods |= {variant.name: calls} if right[variant.name] else {}
    found = measured(methods)
    for variant in chosen(shape, name):
        row = described(shape, name, variant) | {"right": right[variant.name]}
        yield row | ({"us": found["us"][variant.name]} if variant.name in found["us"] else {})


def operands(one: Case, scaled: bool) -> tuple[Any, ...]:
    """Of a call."""
    return (one.x, one.values, one.arranged, None, *((one.x_scale, one.scale) if scaled else (None, None)))


def product_of(variant: Variant) -> Any:
    """The function of a variant."""
    return partial(sparse24_gemm, "bfloat16", variant)


def error_of(one: Case, y: Any, *, scaled: bool) -> float:
    """The difference of the first rows from the product in float32, over its norm."""
    if y is None:
        return float("inf")
    exact = one.x[:FIRST].float() @ one.dense.float().t()
    if scaled:
        exact = exact * one.x_scale[:FIRST] * one.scale.t()
    return float((y[:FIRST].float() - exact).norm() / exact.norm())


SUBJECTS = (Subject(families.SM90_SPARSE24_GEMM.name, families.SM90_SPARSE24_GEMM.about, checks, times),)


#: The weight of a constant's deviation: a factor of e counts as a time that is off by so much (in logarithms).
PRIOR = 0.1
STEPS, DIFFERENCE = 60, 1e-4
#: Factors of the rates of caches and of the tensor core in the beginnings.
BEGINNINGS = (0.5, 1.0, 2.0)


class Choice(NamedTuple):
    """What the model takes of what was timed for a shape, and how its time lies over the quickest (1: none is quicker)."""

    shape: tuple[int, ...]
    dtype: str
    name: str
    best: str
    regret: float


def usable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were right and timed."""
    return [row for row in rows if row.get("us") and row.get("right", True)]


def described_now(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what the model says of their variants as it is now; files of before have what it said then."""

    def now(row: dict[str, Any]) -> Terms:
        (m, n, k), bits = row["shape"], BITS[row["dtype"]]
        return terms(Variant(**row["variant"]), m, n, k * bits // 8, bits)

    return [{**row, "terms": now(row)._asdict()} for row in rows]


def fit_fitted(rows: Sequence[dict[str, Any]], before: Rates = RATES) -> Rates:
    """The constants that fit best, for the clock of before; ValueError where fewer times than constants are there."""
    found = usable(rows)
    if len(found) < len(before) - 1:
        raise ValueError(
            f"{len(before) - 1} constants are fitted to at least as many times, got {len(found)}"
        )
    parts = [Terms(**row["terms"]) for row in found]
    measured = np.log([row["us"] for row in found])
    start = np.log(np.array(before[:-1]))
    results = [
        descended(parts, measured + np.log(before.clock), start, start + np.log([low, read, core, 1.0, 1.0]))
        for low, read, core in product(BEGINNINGS, BEGINNINGS, (1.0, 1.5))
    ]
    return Rates(*map(float, np.exp(min(results, key=lambda one: one[0])[1])), before.clock)


def descended(
    parts: Sequence[Terms], measured: np.ndarray, prior: np.ndarray, point: np.ndarray
) -> tuple[float, np.ndarray]:
    """(sum of squares, constants' logarithms) at the end of the steps from a point."""
    damping = 1e-2
    here = residuals(parts, measured, prior, point)
    for _ in range(STEPS):
        slopes = np.stack(
            [
                (residuals(parts, measured, prior, point + DIFFERENCE * axis) - here) / DIFFERENCE
                for axis in np.eye(len(point))
            ],
            1,
        )
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ here)
        there = residuals(parts, measured, prior, point + step)
        if there @ there < here @ here:
            point, here, damping = point + step, there, damping / 3
        else:
            damping *= 4
    return float(here @ here), point


def residuals(
    parts: Sequence[Terms], measured: np.ndarray, prior: np.ndarray, point: np.ndarray
) -> np.ndarray:
    """Differences of logarithms of times, then of constants."""
    rates = Rates(*np.exp(point), 1.0)
    predicted = np.log([microseconds(one, rates) for one in parts])
    return np.concatenate([predicted - measured, PRIOR * (point - prior)])


def microseconds(parts: Terms, rates: Rates) -> float:
    """The time of a product by the model."""
    return cycles_of(parts, rates) / rates.clock / 1e3


def spread(rows: Sequence[dict[str, Any]], rates: Rates) -> float:
    """The root mean square of differences of logarithms: about the share by which predictions are off."""
    found = usable(rows)
    off = [np.log(microseconds(Terms(**row["terms"]), rates) / row["us"]) for row in found]
    return float(np.sqrt(np.mean(np.square(off))))


def choices(rows: Sequence[dict[str, Any]], rates: Rates) -> list[Choice]:
    """Of each shape, among what was timed."""
    groups: dict[tuple[tuple[int, ...], str], list[dict[str, Any]]] = defaultdict(list)
    for row in usable(rows):
        groups[tuple(row["shape"]), row["dtype"]].append(row)
    found = []
    for (shape, dtype), mine in groups.items():
        taken = min(mine, key=lambda row: microseconds(Terms(**row["terms"]), rates))
        best = min(mine, key=lambda row: row["us"])
        found.append(Choice(shape, dtype, taken["name"], best["name"], taken["us"] / best["us"]))
    return found


def main(arguments: list[str]) -> int:
    """Read, fit, report."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    content = json.loads(Path(arguments[0]).read_text())
    rows = described_now(content.get("rows") or content["times"])
    found = fit_fitted(rows)
    print(f"{content['device']}: Rates({', '.join(f'{k}={v:.4g}' for k, v in found._asdict().items())})")
    for name, one in (("before", RATES), ("fitted", found)):
        report(name, rows, one)
    return 0


def report(name: str, rows: list[dict[str, object]], rates: Rates) -> None:
    """How far predictions are off, and every choice that is not the quickest."""
    made = choices(rows, rates)
    worst = max(one.regret for one in made)
    mean = sum(one.regret for one in made) / len(made)
    off = f"predictions off by {spread(rows, rates):.1%}"
    print(
        f"{name}: {off}, choices slower than the quickest by {mean - 1:.1%} in the mean, {worst - 1:.1%} at most"
    )
    for one in sorted(made, key=lambda one: -one.regret):
        if one.regret > 1:
            shape = "x".join(map(str, one.shape))
            print(f"    {shape} {one.dtype}: {one.name}, {one.regret:.3f} of {one.best}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
