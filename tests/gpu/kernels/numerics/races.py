"""The same input a hundred times, into memory that holds another byte each time: every output identical, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import reference
from reference import SCHEMES
from tests.gpu.harness.inputs import NUMPY, REPRESENTATIVE, normals
from tests.gpu.harness.poison import fill_freed
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, tensors

REPETITIONS = 100
SHAPE = (1024, 1024)
#: Functions of quantized tensors are repeated for these.
STORED = ("mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_128x128", "int4_g32_asymmetric", "nf4")
FUSED = (
    "mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_rowwise", "fp8_rowwise_e5m2", "fp8_tensorwise", "fp8_1x128", "fp8_128x128",
    "int8_rowwise",
)  # fmt: skip


def jobs(settings: Settings) -> list[Job]:
    """Family "races"."""
    names = REPRESENTATIVE[:: 1 if settings.fraction > 0.2 else 5]
    made = [Job("races", f"quantize {name}", "quantize", quantize_race, (name,), 4.0) for name in names]
    made += [Job("races", f"stored {name}", "dequantize", stored_race, (name,), 4.0) for name in STORED]
    made += [Job("races", f"fused {name}", "quantize_both", fused_race, (name,), 4.0) for name in FUSED]
    return [*made, Job("races", "codes", "encode", code_race, (), 4.0)]


def repeat(run: Run, function: str, label: str, *args: Any, **keywords: Any) -> None:
    """One call compared with the reference, and all its repetitions with the first of them, on the device."""
    if not hasattr(run.fast, function):
        return
    placed, options = run.put(args), {key: run.put(value) for key, value in keywords.items()}
    call = lambda: getattr(run.fast, function)(*placed, **options)  # noqa: E731
    first = run.guarded(call)
    if not run.compare(function, label, first, run.expect(function, *args, **keywords), x=args[0]):
        return
    times = run.settings.few(REPETITIONS, 5)
    seen = [repetition(run, call, first, step) for step in range(times)]
    wrong = [f"repetition {step}: {text}" for step, text in enumerate(seen) if text]
    run.record(function, f"{label} x {times}", times, len(wrong), wrong[:3])


def repetition(run: Run, call: Callable[[], Any], first: Any, step: int) -> str:
    """What differs from the first result, or nothing. Freed memory is filled too, for outputs that C++ allocates."""
    run.calls += 1
    fill_freed([item.nbytes for item in tensors(first)], run.device, 17 * step % 256)
    got = run.guarded(call)
    if isinstance(got, Failure):
        return f"{got.kind}: {got.text}"
    before, now = tensors(first), tensors(got)
    bad = [int((_bytes(a) != _bytes(b)).sum()) for a, b in zip(before, now, strict=True)]
    return f"{bad} bytes of its arrays differ" if any(bad) else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def quantize_race(run: Run, name: str) -> None:
    """Quantizing, its scales, and fake quantization with the gradient of given scales."""
    shape = SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x = normals(shape, "bfloat16")
    x[3, 5], x[-1, -1] = np.nan, np.inf
    repeat(run, "quantize", "rows", x, name)
    repeat(run, "quantize", "columns", x, name, axis=0)
    repeat(run, "fake_quantize", "rows", x, name)
    scales = run.expect("choose_scales", normals(shape, seed=1).astype(NUMPY["bfloat16"]), name)
    repeat(run, "fake_quantize_vjp", "given scales", x, x, name, scales=scales)


def stored_race(run: Run, name: str) -> None:
    """Dequantization, packed and not, and float16 input whose rows end within a tile."""
    shape = SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x = normals(shape, seed=2)
    repeat(run, "dequantize", "float32", run.expect("quantize", x, name))
    repeat(run, "dequantize", "bfloat16", run.expect("quantize", x, name), "bfloat16")
    repeat(run, "quantize", "packed", x, name, packed=True)
    repeat(run, "dequantize", "packed", run.expect("quantize", x, name, packed=True))
    odd = normals((1536, 96) if SCHEMES[name].scale.partial else (768, 96), "float16", seed=3)
    repeat(run, "quantize", "float16", odd, name)


def fused_race(run: Run, name: str) -> None:
    """Both copies, normalization and SwiGLU."""
    shape = SHAPE if run.settings.fraction > 0.2 else (64, 1024)
    x, up = normals(shape, "bfloat16", seed=4), normals(shape, "bfloat16", seed=5)
    weight = normals(shape[-1:], "bfloat16", seed=6)
    repeat(run, "quantize_both", "matrix", x, name)
    odd = x[: shape[0] - 32, : shape[1] - 32] if SCHEMES[name].scale.partial else x
    repeat(run, "quantize_both", "float16", np.ascontiguousarray(odd).astype(np.float16), name)
    turned = run.put(x).t()
    wanted = run.expect("quantize", np.ascontiguousarray(x.T), name)
    for step in range(run.settings.few(REPETITIONS, 5)):
        got = run.guarded(lambda: run.fast.quantize(turned, name))
        if not run.compare("quantize", f"transpose {step}", got, wanted):
            return
    repeat(run, "rms_norm_quantize", "with residual", x, weight, name, residual=up)
    repeat(run, "swiglu_quantize", "product", x, up, name)


def code_race(run: Run) -> None:
    """Functions of codes, and stochastic rounding."""
    x = normals((512, 1024), seed=7)
    codes = np.random.default_rng(0).integers(0, 256, x.shape).astype(np.uint8)
    words = reference.random_bits(x.shape, seed=1)
    for fmt in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn", "int3", "nf4", "bfloat16"):
        repeat(run, "encode", fmt, x, fmt)
        repeat(run, "decode", fmt, codes, fmt)
        repeat(run, "pack", fmt, codes, fmt)
        repeat(run, "unpack", fmt, reference.pack(codes, fmt), fmt, codes.shape)
    repeat(run, "encode", "stochastic", x, "float8_e5m2", rounding="stochastic", random_bits=words)
