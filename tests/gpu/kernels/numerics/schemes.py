"""Every scheme and every input dtype; all patterns of 16 bits; packed codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ao_lab.testing.samples import fill
from reference import FORMATS, SCHEMES, Quantized, Scales, Scheme
from tests.gpu.harness.inputs import DTYPES, NUMPY, Array, all_patterns, house, normals, scheme_inputs
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings

PACKED_SHAPES = ((64, 256), (3, 7, 96), (5, 160), (256, 2), (0, 32), (32, 0), ())


def jobs(settings: Settings) -> list[Job]:
    """Families "schemes", "patterns" and "packed"."""
    every = [name for index, name in enumerate(SCHEMES) if settings.fraction > 0.2 or index % 9 == 0]
    # One dtype after the other: the kernels that do not depend on it are compiled by then.
    made = [
        Job("schemes", f"{name} {dtype}", "quantize", scheme_case, (name, dtype), weight=9.0 - rank)
        for rank, dtype in enumerate(DTYPES)
        for name in every
    ]
    made += [
        Job("patterns", f"{name} {dtype}", "quantize", pattern_case, (name, dtype))
        for name in house()
        if name in every
        for dtype in ("bfloat16", "float16")
    ]
    small = [name for name in every if SCHEMES[name].format.bits < 8]
    return made + [
        Job("packed", name, "quantize", packed_case, (name, i)) for i, name in enumerate([*small, "mxint8"])
    ]


def scheme_case(run: Run, name: str, dtype: str) -> None:
    """All functions of one scheme on all inputs of one dtype."""
    scheme = SCHEMES[name]
    for label, x in scheme_inputs(scheme, dtype, run.settings.fraction):
        q = run.same("quantize", label, x, name)
        if isinstance(q, Failure):
            continue
        # By definition: what `quantize` keeps, and what storage gives (tests/reference/quantize/test_fake_quantize.py
        # holds them to it).
        run.same("choose_scales", label, x, name, expected=q.scales)
        values = {to: run.expect("dequantize", q, to) for to in DTYPES}
        for to, expected in values.items():
            run.same("dequantize", f"{label} to {to}", q, to, expected=expected)
        run.same("fake_quantize", label, x, name, expected=values[dtype])
        gradients(run, label, x, scheme)


def gradients(run: Run, label: str, x: Array, scheme: Scheme) -> None:
    """fake_quantize_vjp with computed scales, and with given ones under which elements saturate."""
    x = x[: min(len(x), 64)]
    g = fill("normals", x.shape, dtype=x.dtype.name, seed=3)
    g.reshape(-1)[::97] = np.nan
    g.reshape(-1)[5::89] = -np.inf
    run.same("fake_quantize_vjp", label, g, x, scheme)
    with np.errstate(all="ignore"):
        smaller = (x.astype(np.float32) / 2).astype(x.dtype)
    given = run.expect("choose_scales", smaller, scheme)
    if isinstance(given, Scales):
        run.same("fake_quantize_vjp", f"{label} given scales", g, x, scheme, scales=given)


def pattern_case(run: Run, name: str, dtype: str) -> None:
    """All 65,536 patterns in several orders."""
    for label, x in all_patterns(dtype).items():
        run.same("quantize", label, x, name)


def packed_case(run: Run, name: str, index: int) -> None:
    """quantize(packed=True) and dequantize of it, along the last and the first axis."""
    dtype = DTYPES[index % len(DTYPES)]
    for shape in PACKED_SHAPES:
        x = np.asarray(normals(shape, dtype, seed=index))
        for axis in (-1, 0):
            label = f"{dtype} {shape} axis {axis}"
            q = run.same("quantize", label, x, name, axis=axis, packed=True)
            if isinstance(q, Quantized):
                run.same("dequantize", f"{label} packed", q)
                run.same("dequantize", f"{label} packed to {dtype}", q, dtype)


def pack_shapes(fmt: str) -> list[tuple[int, ...]]:
    """Lengths that end within a byte, on a byte, within and beyond any tile."""
    long = 4099 if FORMATS[fmt].bits < 8 else 33
    made = [(), (0,), (1,), (7,), (8,), (3, 5), (4, 64), (2, 3, 33), (3, long), (0, 32), (3, 0), (64, 256)]
    # One stream of words: whole groups, and with codes that fill none.
    return made + [(64, 4096), (3, 160), (1, 2048 + 32), (7, 4100), (1, 8301)] * (FORMATS[fmt].bits < 8)


def converted(x: Array, dtype: str) -> Any:
    """x in another dtype, without warnings about infinities."""
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])
