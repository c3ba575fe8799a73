"""quantize_both, rms_norm_quantize, layer_norm_quantize and swiglu_quantize.

The norms and swiglu themselves: silu of every pattern, the order of sums, rows of every length, views.

silu is a table of correctly rounded results, and the kernel computes it with
an approximate reciprocal: only trying all 65,536 inputs of a dtype on the device shows that it is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ao_lab.testing.samples import fill
from tests.gpu.harness.inputs import (
    DTYPES,
    NUMPY,
    REPRESENTATIVE,
    Array,
    all_patterns,
    default_schemes,
    normals,
    random_inputs,
)
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, host

BOTH_SHAPES = ((256, 512), (128, 96), (96, 256), (1, 32), (32, 1), (0, 32), (48, 80), (130, 70), (257, 33))
NORM_SHAPES = ((64, 256), (3, 96), (1, 32), (2, 5, 160), (17, 4096), (5, 8192 + 32), (2, 65536 + 160), (4, 100),
               (0, 32), (3, 0), (256,), (33, 1))  # fmt: skip
EPSILONS = (1e-6, 1e-5, 0.0, 1.0, 2.0**-140, 1e30)


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*fused_jobs(settings), *producer_jobs(settings)]


def fused_jobs(settings: Settings) -> list[Job]:
    """Families "both", "rms_norm", "layer_norm" and "swiglu"."""
    names = REPRESENTATIVE[:: 1 if settings.fraction > 0.2 else 5]
    made = [Job("both", n, "quantize_both", both_case, (n, i), 4.0) for i, n in enumerate(names)]
    made += [Job("rms_norm", n, "rms_norm_quantize", norm_case, (n, i), 4.0) for i, n in enumerate(names)]
    made += [
        Job("layer_norm", n, "layer_norm_quantize", layer_norm_case, (n, i), 4.0) for i, n in enumerate(names)
    ]
    made += [Job("swiglu", n, "swiglu_quantize", swiglu_case, (n, i), 4.0) for i, n in enumerate(names)]
    every = [name for name in default_schemes() if name not in REPRESENTATIVE][
        :: 1 if settings.fraction > 0.2 else 9
    ]
    return made + [Job("both", f"{n} all", "quantize_both", plain_case, (n,), 1.0) for n in every]


def both_case(run: Run, name: str, index: int) -> None:
    """Matrices of many shapes and dtypes, packed too, with given scales, and transposed input."""
    if run.missing("quantize_both"):
        return
    for number, shape in enumerate(BOTH_SHAPES):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        x = normals(shape, dtype, seed=number)
        pair = run.same("quantize_both", f"{dtype} {shape}", x, name)
        run.same("quantize_both", f"{dtype} {shape} packed", x, name, packed=True)
        if not isinstance(pair, Failure):
            scales = (pair[0].scales, pair[1].scales)
            run.same("quantize_both", f"{dtype} {shape} given", x, name, scales=scales)
    for dtype in DTYPES:
        for label, x in random_inputs(dtype, 256, seed=index):
            run.same("quantize_both", f"{dtype} {label}", x, name)
    base = normals((128, 256), "bfloat16", seed=1)
    long = run.put(np.concatenate([base.reshape(-1), base[0]]))
    for start in (1, 2, 8):
        part = long[start : start + base.size].view(128, 256)
        got, wanted = run.guarded(lambda v=part: run.fast.quantize_both(v, name)), host(part)
        run.compare("quantize_both", f"{start} elements off", got, run.expect("quantize_both", wanted, name))
    got = run.guarded(lambda: run.fast.quantize_both(run.put(base).t(), name))
    run.compare(
        "quantize_both", "transposed", got, run.expect("quantize_both", np.ascontiguousarray(base.T), name)
    )


def plain_case(run: Run, name: str) -> None:
    """One scheme that the other cases do not cover, all three functions."""
    x, up = normals((256, 512), "bfloat16", seed=1), normals((256, 512), "bfloat16", seed=2)
    weight = normals((512,), "bfloat16", seed=3)
    if not run.missing("quantize_both"):
        run.same("quantize_both", "bfloat16", x, name)
    if not run.missing("rms_norm_quantize"):
        run.same("rms_norm_quantize", "bfloat16", x, weight, name, residual=up)
    if not run.missing("layer_norm_quantize"):
        run.same("layer_norm_quantize", "bfloat16", x, weight, name, bias=up[0])
    if not run.missing("swiglu_quantize"):
        run.same("swiglu_quantize", "bfloat16", x, up, name)


def norm_inputs(shape: tuple[int, ...], dtype: str, seed: int) -> Iterator[tuple[str, Array, Array, Array]]:
    """(label, x, weight, residual): ordinary, overflowing squares, tiny, zeros, NaN and infinity, random bits."""
    weight, residual = normals(shape[-1:], dtype, seed + 1), normals(shape, dtype, seed + 2)
    x = normals(shape, dtype, seed)
    yield "normals", x, weight, residual
    kinds = ("largest", "subnormals", "zeros", "wide", "bits")
    for kind in kinds if shape in NORM_SHAPES[:4] else kinds[seed % 5 :][:1]:
        yield kind, fill(kind, shape, dtype=dtype, seed=seed), weight, residual
    if x.size:
        x = x.copy()
        x.reshape(-1)[0], x.reshape(-1)[-1] = np.nan, -np.inf
        yield "NaN and infinity", x, weight, residual


def norm_case(run: Run, name: str, index: int) -> None:
    """Every shape; dtype and eps change with it; with and without a residual, packed too."""
    if run.missing("rms_norm_quantize"):
        return
    for number, shape in enumerate(NORM_SHAPES):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        for label, x, weight, residual in norm_inputs(shape, dtype, number):
            eps = EPSILONS[(number + len(label)) % len(EPSILONS)]
            text = f"{dtype} {shape} {label} eps {eps}"
            run.same("rms_norm_quantize", text, x, weight, name, eps=eps)
            run.same("rms_norm_quantize", f"{text} residual", x, weight, name, eps=eps, residual=residual)
        run.same(
            "rms_norm_quantize", f"{dtype} {shape} packed", x, weight, name, residual=residual, packed=True
        )
    default = normals((64, 256), "bfloat16")
    run.same("rms_norm_quantize", "default eps", default, normals((256,), "bfloat16", 1), name)
    strided_norm(run, name)


def strided_norm(run: Run, name: str) -> None:
    """x, weight and residual that are views."""
    x, residual, weight = normals((256, 128)), normals((128, 512), seed=1), normals((512,), seed=2)
    views = run.put(x).t(), run.put(weight)[::2], run.put(residual)[:, 1:257]
    call = lambda: run.fast.rms_norm_quantize(views[0], views[1], name, residual=views[2])  # noqa: E731
    copies: tuple[Any, ...] = (np.ascontiguousarray(x.T), weight[::2].copy())
    wanted = run.expect("rms_norm_quantize", *copies, name, residual=residual[:, 1:257].copy())
    run.compare("rms_norm_quantize", "views", run.guarded(call), wanted)


def layer_norm_case(run: Run, name: str, index: int) -> None:
    """Every shape; dtype and eps change with it; with and without a bias, packed too; equal values; views."""
    if run.missing("layer_norm_quantize"):
        return
    for number, shape in enumerate(NORM_SHAPES):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        bias = normals(shape[-1:], dtype, number + 2)
        for label, x, weight, _ in norm_inputs(shape, dtype, number):
            eps = EPSILONS[(number + len(label)) % len(EPSILONS)]
            text = f"{dtype} {shape} {label} eps {eps}"
            run.same("layer_norm_quantize", text, x, weight, name, eps=eps)
            run.same("layer_norm_quantize", f"{text} bias", x, weight, name, eps=eps, bias=bias)
        same = np.ones(shape, weight.dtype)
        run.same("layer_norm_quantize", f"{dtype} {shape} equal values", same, weight, name, packed=True)
    x, weight = normals((256, 128)), normals((128 * 4,), seed=2)
    call = lambda: run.fast.layer_norm_quantize(run.put(x).t(), run.put(weight)[::2], name)  # noqa: E731
    wanted = run.expect("layer_norm_quantize", np.ascontiguousarray(x.T), weight[::2].copy(), name)
    run.compare("layer_norm_quantize", "views", run.guarded(call), wanted)


def swiglu_case(run: Run, name: str, index: int) -> None:
    """All patterns of gate against random ones of up, and the reverse; shapes; views."""
    if run.missing("swiglu_quantize"):
        return
    for dtype in ("bfloat16", "float16"):
        patterns = all_patterns(dtype)
        for label, other in random_inputs(dtype, 256, seed=index):
            run.same("swiglu_quantize", f"{dtype} gates, {label}", patterns["sorted"], other, name)
        run.same("swiglu_quantize", f"{dtype} ups", other, patterns["shuffled"], name, packed=True)
        one = np.ones((256, 256), other.dtype)
        run.same("swiglu_quantize", f"{dtype} silu alone", patterns["both signs"], one, name)
        run.same("swiglu_quantize", f"{dtype} finite", patterns["finite"], patterns["finite shuffled"], name)
    for number, shape in enumerate(NORM_SHAPES):
        gate, up = normals(shape, "bfloat16", number), normals(shape, "bfloat16", number + 1)
        run.same("swiglu_quantize", f"{shape}", gate, up, name)
    base = normals((128, 512), "bfloat16")
    half = run.put(base)
    got = run.guarded(lambda: run.fast.swiglu_quantize(half[:, :256], half[:, 256:], name))
    wanted = run.expect("swiglu_quantize", base[:, :256].copy(), base[:, 256:].copy(), name)
    run.compare("swiglu_quantize", "halves of one matrix", got, wanted)


HALVES = ("bfloat16", "float16")
#: In registers with and without filling, in parts, one element, more rows than a tile, none.
PRODUCER_NORM_SHAPES = (
    (64, 256), (7, 4096), (5, 14336), (3, 16384), (3, 5120), (2, 5, 160), (4, 100), (1, 32), (33, 1), (513, 33),
    (2, 16385), (2, 65536 + 160), (1, 1 << 20), (256,), (0, 32), (3, 0),
)  # fmt: skip
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


def producer_jobs(settings: Settings) -> list[Job]:
    """Families "silu", "rms_norm alone" and "swiglu alone"."""
    made = [Job("silu", dtype, "swiglu", silu_case, (dtype,), 2.0) for dtype in HALVES]
    made += [Job("swiglu alone", dtype, "swiglu", gate_case, (dtype,), 2.0) for dtype in HALVES]
    return made + [
        Job("rms_norm alone", dtype, "rms_norm", producer_norm_case, (dtype,), 3.0) for dtype in DTYPES
    ]


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


def producer_norm_case(run: Run, dtype: str) -> None:
    """Every shape, kind of numbers and eps, with and without a residual; sums whose order shows."""
    if run.missing("rms_norm"):
        return
    for number, shape in enumerate(PRODUCER_NORM_SHAPES):
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
