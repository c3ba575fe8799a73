"""Gradients of given scales: every scheme, every shape of tiles, sums of many parts; and that kernels made them.

`fast.quantize.fake_quantize`: values with a mask of the blocks that saturate, and gradients masked by them in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import reference
from fast.quantize import fake_quantize
from reference import SCHEMES, Scales, Scheme
from reference.arrays.bridges import to_torch
from reference.formats.encode import MODES
from tests.gpu.harness.inputs import DTYPES, REPRESENTATIVE, Array, normals, random_inputs
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings

# Scales from outside, sensible and not; stochastic rounding and other modes; records of the user's own.

PROVIDED_ROUNDED = ("mxfp8_e4m3", "mxfp4", "mxint8", "nvfp4", "int8_rowwise", "fp8_1x128", "fp8_tensorwise_e5m2",
           "int4_g32_asymmetric", "torchao.mxfp4_ceil", "te.nvfp4")  # fmt: skip
#: float32 patterns that a scale should not have: zeros, subnormals, negative numbers, infinities, NaNs.
STRANGE = (0x0, 0x80000000, 0x1, 0x007FFFFF, 0x00800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001,
           0x7F7FFFFF, 0x7F800001)  # fmt: skip
#: (base, fields of the scheme, fields of its scale): what is not valid together is left out.
CUSTOM: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("mxfp8_e4m3", {}, {"block": 48}),
    ("mxfp8_e4m3", {}, {"block": (16, 32)}),
    ("mxfp4", {}, {"block": 16, "partial": True}),
    ("mxfp4", {}, {"block": -1}),
    ("mxfp4", {}, {"block": "tensor"}),
    ("mxfp6_e2m3", {}, {"block": "flat:64", "partial": True}),
    ("mxfp8_e4m3", {}, {"rule": "ceil"}),
    ("mxfp8_e4m3", {}, {"rule": "even"}),
    ("mxfp8_e5m2", {}, {"rule": "rceil_log2"}),
    ("mxfp8_e4m3", {"element": "float8_e4m3fnuz"}, {"target": 240.0}),
    ("fp8_1x128", {}, {"block": 48}),
    ("fp8_1x128", {}, {"block": (16, 32)}),
    ("fp8_1x128", {}, {"block": (1, 100)}),
    ("fp8_1x128", {}, {"target": 224.0}),
    ("fp8_1x128", {"overflow": "nan"}, {"target": 600.0}),
    ("fp8_1x128", {"overflow": "nonfinite"}, {"target": 600.0}),
    ("fp8_1x128_e5m2", {"overflow": "inf"}, {"target": 70000.0}),
    ("fp8_rowwise", {"apply": "divide"}, {}),
    ("fp8_rowwise", {"apply": "encode"}, {"stored": "encode", "floor": None}),
    ("fp8_rowwise", {}, {"rule": "ratio_pow2"}),
    ("fp8_rowwise", {}, {"rule": "ratio_pow2_log2"}),
    ("fp8_rowwise", {"nan": "nan"}, {}),
    ("fp8_rowwise", {"nan": "element"}, {}),
    ("fp8_rowwise", {"nan": "ieee"}, {}),
    ("fp8_rowwise", {"dequantize": "target"}, {}),
    ("fp8_rowwise", {"negative_zero": False}, {}),
    ("fp8_rowwise", {"element": "bfloat16"}, {"target": 1.0}),
    ("fp8_rowwise", {"arithmetic": "input"}, {"compute": "input"}),
    ("fp8_rowwise", {}, {"storage": "bfloat16", "floor": None}),
    ("nvfp4", {}, {"block": (16, 16)}),
    ("nf4", {"codes_from": "stored"}, {}),
    ("nf4", {"element": "int4"}, {"target": 7.0}),
    ("nf4", {"dequantize": "target"}, {"block": "flat:48", "compute": "input"}),
    ("nf4", {"nan": "ieee"}, {"floor": None}),
    ("nvfp4", {"outer_order": "reciprocal_first"}, {}),
    ("int4_g32", {}, {"block": 48}),
    ("int4_g32", {"element": "int7"}, {"target": 63.0}),
    ("int4_g32", {}, {"statistic": "minmax_split"}),
    ("int4_g32_asymmetric", {}, {"statistic": "minmax"}),
    ("int4_g32_asymmetric", {}, {"block": (16, 32)}),
)


def provided_jobs(settings: Settings) -> list[Job]:
    """Families "given", "rounding" and "custom"."""
    step = 1 if settings.fraction > 0.2 else 4
    made = [
        Job("given", n, "quantize", given_case, (n, i), 4.0) for i, n in enumerate(REPRESENTATIVE[::step])
    ]
    made += [
        Job("rounding", f"{name} {mode}", "quantize", rounding_case, (name, mode), 2.0)
        for name in PROVIDED_ROUNDED[::step]
        for mode in MODES
    ]
    return made + [
        Job("custom", label(i), "quantize", custom_case, (i,), 2.0) for i in range(0, len(CUSTOM), step)
    ]


def given_case(run: Run, name: str, index: int) -> None:
    """One scheme with scales of many kinds, through every function that takes them."""
    dtype = DTYPES[index % len(DTYPES)]
    x = normals((64, 256), dtype, seed=index)
    x[3, 7], x[9, 11], x[20:22] = np.nan, np.inf, 0
    own = run.expect("choose_scales", x, name)
    for kind, scales in variants(run, own, x, name):
        with_scales(run, f"{dtype} {kind}", x, name, scales)
    if own.outer is None and own.zero is None:
        run.same("quantize", f"{dtype} bare", x, name, scales=own.scale)
        run.same("fake_quantize", f"{dtype} bare", x, name, scales=own.scale)


def variants(run: Run, own: Scales, x: Array, name: str) -> Iterator[tuple[str, Scales]]:
    """The tensor's own scales, those of a half, strange and random ones; an outer level alone."""
    yield "own", own
    half = (x.astype(np.float32) / 2).astype(x.dtype)
    yield "of x / 2", run.expect("choose_scales", half, name)
    rng = np.random.default_rng(1)
    for kind in ("zero", "strange", "random"):
        for part in ("scale", "outer", "zero"):
            value = getattr(own, part)
            if value is not None:
                yield f"{kind} {part}", replace(own, **{part: altered(value, kind, rng)})
    record = SCHEMES[name].outer
    if record is not None and record.statistic == "absmax_elements":
        for bits in (int(np.asarray(own.outer).view(np.uint32)), 0x3F800000, *STRANGE):
            yield f"outer 0x{bits:08x} alone", Scales(outer=np.array(bits, np.uint32).view(np.float32))


def altered(value: Any, kind: str, rng: np.random.Generator) -> Array:
    """Zeros, patterns that no rule makes, or random bits, in the shape and dtype of a stored scale."""
    value = np.asarray(value)
    if kind == "zero":
        return np.zeros_like(value)
    unsigned = f"u{value.dtype.itemsize}"
    bits = rng.integers(0, 1 << (8 * value.dtype.itemsize), value.shape, dtype=unsigned)
    if kind == "strange" and value.dtype == np.float32:
        mixed = np.where(
            rng.random(value.shape) < 0.7, rng.choice(STRANGE, value.shape), value.view(unsigned)
        )
        bits = mixed.astype(unsigned)
    return np.asarray(bits).view(value.dtype).reshape(value.shape)


def with_scales(run: Run, text: str, x: Array, scheme: Any, scales: Any) -> None:
    """quantize, dequantize, fake_quantize and its gradients with given scales."""
    q = run.same("quantize", text, x, scheme, scales=scales)
    if isinstance(q, Failure):
        return
    for to in DTYPES:
        run.same("dequantize", f"{text} to {to}", q, to)
    run.same("fake_quantize", text, x, scheme, scales=scales)
    g = normals(x.shape, x.dtype.name, seed=8)
    run.same("fake_quantize_vjp", text, g, x, scheme, scales=scales)


def rounding_case(run: Run, name: str, mode: str) -> None:
    """A default scheme with another rounding mode; random words where it is stochastic, none where it is refused."""
    scheme = replace(SCHEMES[name], name=f"{name}_{mode}", rounding=mode)
    for dtype in DTYPES:
        for kind, x in random_inputs(dtype, 64, seed=2):
            text, words = f"{dtype} {kind}", reference.random_bits(x.shape, seed=11, stream=1)
            run.same("quantize", text, x, scheme, random_bits=words if mode == "stochastic" else None)
            run.same("quantize", f"{text} axis 0", x, scheme, axis=0,
                     random_bits=words if mode == "stochastic" else None)  # fmt: skip
            run.same("fake_quantize", text, x, scheme)
    run.same("quantize", "without words", x, scheme)
    run.same("quantize", "words of a wrong shape", x, scheme, random_bits=words[1:])


def custom(index: int) -> Scheme | None:
    """A record of the user's own, or None where its fields contradict each other."""
    base, fields, scale = CUSTOM[index]
    record = SCHEMES[base]
    try:
        return replace(record, name=label(index), scale=replace(record.scale, **scale), **fields)
    except ValueError:
        return None


def label(index: int) -> str:
    """What a record changes."""
    base, fields, scale = CUSTOM[index]
    return " ".join([base, *(f"{key}={value}" for key, value in (fields | scale).items())])


def custom_case(run: Run, index: int) -> None:
    """A custom record on shapes that its blocks divide and one that they do not."""
    scheme = custom(index)
    if scheme is None:
        return
    for number, shape in enumerate(((96, 192), (32, 960), (2, 48, 96), (33, 250))):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        x = normals(shape, dtype, seed=number)
        x[0, 1], x[-1, 2] = np.nan, -np.inf
        for text, values in (
            ("", x),
            ("finite ", np.nan_to_num(x.astype(np.float32), nan=1, posinf=2, neginf=-3)),
        ):
            values = values.astype(x.dtype)
            q = run.same("quantize", f"{text}{dtype} {shape}", values, scheme)
            if not isinstance(q, Failure):
                with_scales(run, f"{text}{dtype} {shape} own scales", values, scheme, q.scales)


GRADIENT_DTYPES = ("float32", "bfloat16")
#: (scheme, fields of its scale, shape, axis): whole, cut and short blocks, longer than their axis, in parts, in parts of parts.
PLACES: tuple[tuple[str, dict[str, Any], tuple[int, ...], int], ...] = (
    ("fp8_rowwise", {}, (3, 4096), -1),
    ("fp8_rowwise", {}, (3, 16384), -1),
    ("fp8_rowwise", {}, (3, 40001), -1),
    ("fp8_rowwise", {}, (5000, 130), 0),
    ("int8_rowwise_asymmetric", {}, (2, 9001), -1),
    ("int8_rowwise_asymmetric", {}, (700, 33), 0),
    ("int8_tensorwise", {}, (300, 1001), -1),
    ("fp8_rowwise", {}, (140001, 3), 0),
    ("fp8_tensorwise_e5m2", {}, (), -1),
    ("fp8_1x128", {}, (33, 200), -1),
    ("fp8_1x128", {}, (200, 33), 0),
    ("fp8_1x128", {}, (64, 33), 0),
    ("fp8_1x128", {"block": 300}, (77, 33), 0),
    ("fp8_1x128", {"block": 16384}, (2, 20001), -1),
    ("fp8_1x128", {"block": "flat:48"}, (7, 31), -1),
    ("fp8_128x128", {}, (256, 384), -1),
    ("fp8_128x128", {}, (300, 200), -1),
    ("fp8_128x128", {}, (300, 200), 0),
    ("int4_g32_asymmetric", {"block": (16, 32), "partial": True}, (2, 33, 70), 1),
    ("mxfp4", {}, (96, 33), 0),
    ("te.nvfp4_16x16", {}, (32, 48), 0),
    ("nf4", {}, (3, 41), -1),
)
ROUNDED = ("mxfp4", "int8_rowwise", "nvfp4", "int4_g32_asymmetric")


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*gradient_jobs(settings), *saturation_jobs(settings), *provided_jobs(settings)]


def gradient_jobs(settings: Settings) -> list[Job]:
    """Family "slopes"."""
    step = 1 if settings.fraction > 0.2 else 6
    names = [*SCHEMES][::step]
    made = [
        Job("slopes", name, "fake_quantize_vjp", scheme_case, (name, i), 3.0) for i, name in enumerate(names)
    ]
    made += [
        Job("slopes", " ".join(map(str, place)), "fake_quantize_vjp", place_case, place, 6.0)
        for place in PLACES[::step]
    ]
    return made + [
        Job("slopes", f"{name} words", "fake_quantize_vjp", words_case, (name,), 2.0)
        for name in ROUNDED[::step]
    ]


def scheme_case(run: Run, name: str, index: int) -> None:
    """One scheme, both dtypes; along the first axis too where it is representative."""
    scheme = SCHEMES[name]
    for dtype in GRADIENT_DTYPES:
        for axis in (-1, 0) if name in REPRESENTATIVE else (-1,):
            compare(run, f"{dtype} axis {axis}", numbers((256, 256), dtype, index), scheme, axis)


def place_case(run: Run, name: str, fields: dict[str, Any], shape: tuple[int, ...], axis: int) -> None:
    """One shape of blocks."""
    record = SCHEMES[name]
    scheme = replace(record, name=f"{name} {fields}", scale=replace(record.scale, **fields))
    for dtype in GRADIENT_DTYPES:
        compare(run, f"{dtype} {shape} axis {axis}", numbers(shape, dtype, len(shape)), scheme, axis)


def words_case(run: Run, name: str) -> None:
    """Stochastic rounding: the words of the forward pass decide what saturated."""
    scheme = replace(SCHEMES[name], name=f"{name} stochastic", rounding="stochastic")
    words = reference.random_bits((64, 256), seed=11, stream=1)
    for dtype in GRADIENT_DTYPES:
        compare(run, f"{dtype} words", numbers((64, 256), dtype, 1), scheme, -1, random_bits=words)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Normal numbers, with a NaN, infinities and zeros in the first blocks."""
    x = np.array(normals(shape, dtype, seed=seed))
    flat = x.reshape(-1)
    if flat.size > 400:
        flat[3], flat[300], flat[-1], flat[40:80] = np.nan, np.inf, -np.inf, 0
    return x


def compare(run: Run, label: str, x: Array, scheme: Scheme, axis: int, **keywords: Any) -> None:
    """Scales of x / 2, under which elements saturate, also with zeros; an outer scale alone; scales from x."""
    half = np.nan_to_num(x.astype(np.float32) / 2, posinf=0, neginf=0).astype(x.dtype)
    given = run.expect("choose_scales", half, scheme, axis=axis)
    if not isinstance(given, Scales):
        return
    rare = np.array(given.scale)
    rare.reshape(-1)[::5] = 0
    kinds = {"half": given, "some zero": replace(given, scale=rare), "computed": None}
    if scheme.outer is not None and scheme.outer.statistic == "absmax_elements":
        kinds["outer"], kinds["negative outer"] = Scales(outer=given.outer), Scales(outer=-given.outer)
    for kind, scales in kinds.items():
        for text, g in gradients(x):
            same(run, f"{label} {kind} {text}", g, x, scheme, axis=axis, scales=scales, **keywords)


def gradients(x: Array) -> list[tuple[str, Array]]:
    """What arrives at y: normal numbers, NaN and infinities among them, zeros of one sign."""
    g = np.array(normals(x.shape, x.dtype.name, seed=8))
    special = g.copy()
    special.reshape(-1)[5::889], special.reshape(-1)[::997] = -np.inf, np.nan
    return [("normals", g), ("special", special), ("zeros", np.array(np.zeros_like(g) * -1))]


def same(run: Run, label: str, g: Array, x: Array, scheme: Scheme, **keywords: Any) -> None:
    """Compare one call; on a GPU it is a failure that the reference answered it."""
    run.same("fake_quantize_vjp", label, g, x, scheme, **keywords)
    if run.device.type == "cuda" and run.checks[-1].handed_on:
        run.record("fake_quantize_vjp", label, 0, 1, ["the reference answered: no kernel was tested"])


MASK_DTYPES = ("float32", "bfloat16", "float16")
#: (scheme, fields of its scale, shape, axis): layers of models, and rows and blocks that fill no tile.
SATURATION_PLACES: tuple[tuple[str, dict[str, Any], tuple[int, ...], int], ...] = (
    ("int8_rowwise_asymmetric", {}, (64, 4096), -1),
    ("int8_rowwise_asymmetric", {}, (40, 14336), -1),
    ("int8_rowwise_asymmetric", {}, (7, 9001), -1),
    ("int8_rowwise_asymmetric", {}, (700, 33), 0),
    ("int4_g32_asymmetric", {}, (128, 4096), -1),
    ("int4_g32_asymmetric", {}, (96, 33), 0),
    ("int4_g32_asymmetric", {"partial": True}, (3, 45), -1),
    ("int4_g128_asymmetric", {}, (64, 14336), -1),
    ("int8_g64_asymmetric", {}, (32, 1024), -1),
)


def saturation_jobs(settings: Settings) -> list[Job]:
    """Family "saturation"."""
    step = 1 if settings.fraction > 0.2 else 2
    return [
        Job(
            "saturation",
            " ".join(map(str, place)),
            "saturation.fake_quantize_with_mask",
            saturation_place_case,
            place,
            3.0,
        )
        for place in SATURATION_PLACES[::step]
    ]


def saturation_place_case(
    run: Run, name: str, fields: dict[str, Any], shape: tuple[int, ...], axis: int
) -> None:
    """Ordinary numbers, and those as far below zero as above, whose ends round beyond the codes."""
    record = SCHEMES[name]
    scheme = replace(record, name=f"{name} {fields}", scale=replace(record.scale, **fields))
    for dtype in MASK_DTYPES:
        x = normals(shape, dtype, seed=len(shape))
        signs = np.where(np.arange(x.size).reshape(shape) % 2 == 0, 1, -1)
        for label, values in (("normals", x), ("pairs", (signs * np.abs(x).max()).astype(x.dtype))):
            # Twice: the second call is a remembered one.
            for turn in ("first", "again"):
                saturation_compare(run, f"{dtype} {label} {turn}", np.array(values), scheme, axis)


def saturation_compare(run: Run, label: str, x: Array, scheme: Any, axis: int) -> None:
    """Values, the mask of blocks of which an element saturates, and gradients zero there and elsewhere untouched."""
    placed = run.put(x)
    made = run.guarded(lambda: fake_quantize.fake_quantize_with_mask(placed, scheme, axis))
    if isinstance(made, Failure):
        run.compare("saturation.fake_quantize_with_mask", label, made, None)
        return
    if run.device.type == "cuda" and made[1] is None:
        run.record(
            "saturation.fake_quantize_with_mask", label, 0, 1, ["no mask was made: no kernel was tested"]
        )
        return
    run.compare(
        "saturation.fake_quantize_with_mask",
        label,
        made[0],
        run.expect("fake_quantize", x, scheme, axis=axis),
        x=x,
    )
    host = to_torch(x)
    lost = reference.fake_quantize_vjp(torch.ones_like(host), host, scheme, axis=axis)[0] == 0
    for text, g in gradients(x):
        wanted = np.where(lost.numpy(), np.zeros_like(g), g)
        if made[1] is None:
            wanted = run.expect("fake_quantize_vjp", g, x, scheme, axis=axis)[0]
        mine = run.put(g)
        got = run.guarded(lambda mine=mine: fake_quantize.mask_gradient(mine, placed, made[1], scheme, axis))
        run.compare("saturation.mask_gradient", f"{label} {text}", got, wanted, x=x)
