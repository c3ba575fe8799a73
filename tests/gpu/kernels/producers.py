"""rms_norm and swiglu themselves: silu of every pattern, the order of sums, rows of every length, views.

What is quantized after them is in `kernel_fused`. silu is a table of correctly rounded results, and the kernel computes it with
an approximate reciprocal: only trying all 65,536 inputs of a dtype on the device shows that it is the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.harness.inputs import DTYPES, NUMPY, Array, normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings
from tests.gpu.kernels.fused import EPSILONS, norm_inputs

HALVES = ("bfloat16", "float16")
#: In registers with and without filling, in parts, one element, more rows than a tile, none.
NORM_SHAPES = ((64, 256), (7, 4096), (5, 14336), (3, 16384), (3, 5120), (2, 5, 160), (4, 100), (1, 32), (33, 1), (513, 33),
               (2, 16385), (2, 65536 + 160), (1, 1 << 20), (256,), (0, 32), (3, 0))  # fmt: skip
GATE_SHAPES = (
    (64, 256),
    (3, 512),
    (7, 2048),
    (3, 4096),
    (5, 14336),
    (7, 4097),
    (3, 5, 96),
    (1, 1),
    (),
    (0, 32),
    (12345,),
)


def jobs(settings: Settings) -> list[Job]:
    """Families "silu", "rms_norm alone" and "swiglu alone"."""
    made = [Job("silu", dtype, "swiglu", silu_case, (dtype,), 2.0) for dtype in HALVES]
    made += [Job("swiglu alone", dtype, "swiglu", gate_case, (dtype,), 2.0) for dtype in HALVES]
    return made + [Job("rms_norm alone", dtype, "rms_norm", norm_case, (dtype,), 3.0) for dtype in DTYPES]


def silu_case(run: Run, dtype: str) -> None:
    """Every gate, with up 1 and -1, which show silu itself; with zeros, infinities, NaN and the ends of the range."""
    if run.missing("swiglu"):
        return
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(NUMPY[dtype]).reshape(256, 256)
    for up in (1.0, -1.0, 0.0, -0.0, np.inf, np.nan, 2.0**-14, 2.0**14, 65504.0):
        with np.errstate(all="ignore"):
            other = np.full((256, 256), up).astype(NUMPY[dtype])
        run.same("swiglu", f"{dtype} up {up}", patterns, other)
    for seed in range(run.settings.few(64, 4)):
        mixed = np.random.default_rng(seed).permutation(patterns.reshape(-1)).reshape(256, 256)
        run.same("swiglu", f"{dtype} pairs {seed}", patterns, mixed)


def gate_case(run: Run, dtype: str) -> None:
    """Shapes, halves of a matrix, columns, transposes, addresses that are not aligned."""
    if run.missing("swiglu"):
        return
    for number, shape in enumerate(GATE_SHAPES):
        run.same(
            "swiglu", f"{dtype} {shape}", normals(shape, dtype, number), normals(shape, dtype, number + 1)
        )
    for width in (512, 96, 2 * 14336):
        base = normals((65, width), dtype, 5)
        views(run, f"{dtype} halves of {width}", base, lambda m, n=width // 2: (m[:, :n], m[:, n:]))
    base = normals((64, 256), dtype, 6)
    views(run, f"{dtype} one off", base, lambda m: (m[:, 1:], m[:, :-1]))
    views(run, f"{dtype} transposed", base, lambda m: (m.T, m.T))
    views(run, f"{dtype} every other", base, lambda m: (m[:, ::2], m[:, :128]))
    views(
        run, f"{dtype} three axes", base.reshape(4, 16, 256), lambda m: (m[:2, ::2, 16:], m[2:, 1::2, :240])
    )


def views(run: Run, label: str, base: Array, parts: Callable[[Any], tuple[Any, Any]]) -> None:
    """Views of a tensor, against copies of the same views of the array."""
    placed = parts(run.put(base))
    got = run.guarded(lambda: run.fast.swiglu(*placed))
    run.compare("swiglu", label, got, run.expect("swiglu", *(part.copy() for part in parts(base))))


def norm_case(run: Run, dtype: str) -> None:
    """Every shape, kind of numbers and eps, with and without a residual; sums whose order shows."""
    if run.missing("rms_norm"):
        return
    for number, shape in enumerate(NORM_SHAPES):
        for label, x, weight, residual in norm_inputs(shape, dtype, number):
            eps = EPSILONS[(number + len(label)) % len(EPSILONS)]
            run.same("rms_norm", f"{dtype} {shape} {label} eps {eps}", x, weight, eps=eps)
            text = f"{dtype} {shape} {label} eps {eps} residual"
            run.same("rms_norm", text, x, weight, eps=eps, residual=residual)
    for length in (256, 4096, 14336, 40000):
        # Magnitudes over many powers of two: another order of the sum changes its last bits in most rows.
        rng = np.random.default_rng(length)
        shape = (run.settings.few(64, 8), length)
        x = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(NUMPY[dtype])
        run.same("rms_norm", f"{dtype} order of {length}", x, np.ones(length, NUMPY[dtype]), eps=0.0)
