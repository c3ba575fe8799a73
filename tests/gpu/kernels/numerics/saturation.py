"""`fast.quantize.saturation`: values with a mask of the blocks that saturate, and gradients masked by them in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import reference
from fast.quantize import saturation
from reference import SCHEMES
from reference.arrays.torch_bridge import to_torch
from tests.gpu.harness.inputs import Array, normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings
from tests.gpu.kernels.numerics.scale_gradients import gradients

DTYPES = ("float32", "bfloat16", "float16")
#: (scheme, fields of its scale, shape, axis): layers of models, and rows and blocks that fill no tile.
PLACES: tuple[tuple[str, dict[str, Any], tuple[int, ...], int], ...] = (
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


def jobs(settings: Settings) -> list[Job]:
    """Family "saturation"."""
    step = 1 if settings.fraction > 0.2 else 2
    return [
        Job(
            "saturation",
            " ".join(map(str, place)),
            "saturation.fake_quantize_with_mask",
            place_case,
            place,
            3.0,
        )
        for place in PLACES[::step]
    ]


def place_case(run: Run, name: str, fields: dict[str, Any], shape: tuple[int, ...], axis: int) -> None:
    """Ordinary numbers, and those as far below zero as above, whose ends round beyond the codes."""
    record = SCHEMES[name]
    scheme = replace(record, name=f"{name} {fields}", scale=replace(record.scale, **fields))
    for dtype in DTYPES:
        x = normals(shape, dtype, seed=len(shape))
        signs = np.where(np.arange(x.size).reshape(shape) % 2 == 0, 1, -1)
        for label, values in (("normals", x), ("pairs", (signs * np.abs(x).max()).astype(x.dtype))):
            # Twice: the second call is a remembered one.
            for turn in ("first", "again"):
                compare(run, f"{dtype} {label} {turn}", np.array(values), scheme, axis)


def compare(run: Run, label: str, x: Array, scheme: Any, axis: int) -> None:
    """Values, the mask of blocks of which an element saturates, and gradients zero there and elsewhere untouched."""
    placed = run.put(x)
    made = run.guarded(lambda: saturation.fake_quantize_with_mask(placed, scheme, axis))
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
        got = run.guarded(lambda mine=mine: saturation.mask_gradient(mine, placed, made[1], scheme, axis))
        run.compare("saturation.mask_gradient", f"{label} {text}", got, wanted, x=x)
