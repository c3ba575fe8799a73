"""Gradients of given scales: every scheme, every shape of tiles, sums of many parts; and that kernels made them.

`fast.quantize.fake_quantize`: values with a mask of the blocks that saturate, and gradients masked by them in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import reference
from fast.quantize import fake_quantize
from reference import SCHEMES, Scales, Scheme
from reference.arrays.torch_bridge import to_torch
from tests.gpu.harness.inputs import REPRESENTATIVE, Array, normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings

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
    return [*gradient_jobs(settings), *saturation_jobs(settings)]


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


DTYPES = ("float32", "bfloat16", "float16")
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
    for dtype in DTYPES:
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
