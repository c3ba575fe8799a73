"""Several GPUs in one process: every call on each of them, while another one is current; nothing where there is one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.harness.inputs import normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings, host, outcome

SCHEMES = ("fp8_rowwise", "mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_tensorwise", "int4_g32_asymmetric", "nf4")
SHAPE = (128, 256)
ROUNDS = 3  # the first compiles, the others are remembered calls


def jobs(settings: Settings) -> list[Job]:
    """Family "devices"."""
    if settings.device != "cuda" or torch.cuda.device_count() < 2:
        return []
    return [Job("devices", name, "quantize", devices_case, (name,)) for name in SCHEMES]


def devices_case(run: Run, name: str) -> None:
    """Results lie on x's device and have the bits of the first device's, in any order of devices."""
    count = torch.cuda.device_count()
    x = run.put(normals(SHAPE, "bfloat16", seed=5))
    for function, call in calls(run.fast, name).items():
        wanted = host(outcome(lambda call=call: call(x)))
        for step in range(ROUNDS * count):
            with torch.cuda.device((step + 1) % count):
                there = x.to(f"cuda:{step % count}")
                got = outcome(lambda call=call, there=there: call(there))
            run.compare(function, f"round {step}", got, wanted)
            away = [t.device.index for t in torch.utils._pytree.tree_leaves(vars(got) if hasattr(got, "codes") else got)
                    if isinstance(t, torch.Tensor) and t.device != there.device]  # fmt: skip
            run.record(function, f"device of round {step}", 1, len(away), [f"results on {away}"])


def calls(fast: Any, name: str) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The functions that have kernels, on one tensor."""
    weight = torch.ones(SHAPE[1], dtype=torch.bfloat16)
    return {
        "quantize": lambda x: fast.quantize(x, name),
        "dequantize": lambda x: fast.dequantize(fast.quantize(x, name), "bfloat16"),
        "fake_quantize": lambda x: fast.fake_quantize(x, name),
        "fake_quantize_vjp": lambda x: fast.fake_quantize_vjp(x, x, name)[0],
        "quantize_both": lambda x: fast.quantize_both(x, name)[1],
        "rms_norm_quantize": lambda x: fast.rms_norm_quantize(x, weight.to(x.device), name)[0],
        "swiglu_quantize": lambda x: fast.swiglu_quantize(x, x, name),
    }
