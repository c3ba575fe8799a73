"""Layers whose weights pass for a GPU's, and what their calls launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

import ao_lab
from ao_lab import QuantizedTensor
from ao_lab.gemm import codes, select
from ao_lab.tensor import matmul_ops
from ao_lab.tensor.matmul_ops import PROGRAMS, PreparedProducts
from fast import dispatch
from fast.gemm import choose, families
from fast.kernels.sm90_s8_gemm import host as sm90_s8_gemm
from fast.kernels.sm90_s8_gemm.host import fitted
from fast.kernels.sm90_w4a16_gemm import host as sm90_w4a16_gemm
from fast.launch import cuda, driver
from fast.launch.launcher import Call
from tests.ao_lab.gemm.capability import set_capability
from tests.fast.kernels.compiling.recorded_launches import Recorded

WIDTH, ROWS = 512, 256
#: Arguments behind the tensor maps, by kernel.
LAYOUTS = {"sm90_w4a16_gemm": "=5Q11i4xQ", "sm90_s8_gemm": "=4Q7i4x"}
#: The end of a configuration's name whose weights are in that layout.
PRESHUFFLED = ", preshuffled"
CONFIGS = {
    "int4": lambda: ao_lab.Int4WeightOnlyConfig(group_size=128),
    "int8": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int8 by int8": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "static int8": lambda: ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02)),
    "float8 by float8": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
    "tensorwise": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
}
#: For many rows alone.
OTHERS = {
    "symmetric int4": lambda: ao_lab.SchemeConfig(scheme="int4_g128"),
    "mxfp4": lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn"),
    "static": lambda: ao_lab.Float8StaticActivationFloat8WeightConfig(act_quant_scale=0.02),
    "blocks": lambda: ao_lab.SchemeConfig(scheme="fp8_1x128", activation_scheme="fp8_1x128"),
    "rows by one scale": lambda: ao_lab.SchemeConfig(
        scheme="fp8_tensorwise", activation_scheme="fp8_rowwise"
    ),
}
#: Of which preshuffled weights alone are multiplied by kernels. NVFP4: inputs go through their scheme first.
DYNAMIC = {
    "nvfp4 by nvfp4": lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
    "int8 by int4": lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "float8 by int4": lambda: ao_lab.Float8DynamicActivationInt4WeightConfig(),
    "mxfp8 by int4": lambda: ao_lab.SchemeConfig(scheme="int4_g32", activation_scheme="mxfp8_e4m3"),
}


def pretend(monkeypatch: Any, launcher: Any) -> Recorded:
    """CPU tensors pass for a GPU's, of one of the launchers of `recorded_launches`; `calls` are those that were looked up."""
    monkeypatch.setattr(QuantizedTensor, "is_cuda", True)
    monkeypatch.setattr(matmul_ops, "on_gpu", lambda weight: True)
    set_capability(monkeypatch, (9, 0))
    for module in (select, codes):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    recorded: Any = Recorded(monkeypatch, launcher)
    recorded.calls = []
    monkeypatch.setattr(Call, "__call__", _noted(Call.__call__, recorded.calls))
    return recorded


def _noted(original: Any, calls: list[Any]) -> Any:
    def call(self: Any, *inputs: Any) -> Any:
        calls.append(self)
        return original(self, *inputs)

    return call


def pretend_hopper(monkeypatch: Any, recorded: Recorded) -> None:
    """Kernels in CUDA C++ launch, too: programs, addresses of tensor maps, then all values, in `straight`."""

    def launch(place: Any, layout: str, arguments: Any, nothing: None) -> int:
        maps = struct.unpack("=" + "q120x" * 3, ctypes.string_at(arguments[0], cuda.MAPS))
        values = struct.unpack(layout, ctypes.string_at(arguments[1], struct.calcsize(layout)))
        recorded.straight.append((place._obj.grid[0], *maps, *values))
        return 0

    monkeypatch.setattr(driver, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(cuda, "loaded", lambda kernel, *given: LAYOUTS[kernel.name])
    monkeypatch.setattr(cuda, "is_loadable", lambda *given: True)
    monkeypatch.setattr(cuda, "clusters_at_once", lambda *given: 60)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 7)
    for host in (sm90_w4a16_gemm, sm90_s8_gemm):
        for name, value in {
            "processors_of": lambda index: 132,
            "tensor_map": lambda address, *rest: struct.pack("=q120x", address),
        }.items():  # fmt: skip
            monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(families, "device_of", lambda device: families.HOPPER)
    monkeypatch.setattr(choose, "rows_of_gemm", lambda p: p.rows)
    monkeypatch.setattr(choose, "_gemv_is_faster", lambda p: False)
    monkeypatch.setattr(
        sm90_s8_gemm, "choose", lambda tokens, features, stored, processors: fitted(128, 2, stored)
    )


def layer(name: str = "int4", bias: bool = False, seed: int = 0) -> Any:
    """A quantized layer from WIDTH to ROWS; the weight's codes are those of a CPU."""
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(WIDTH, ROWS, bias=bias)).bfloat16().requires_grad_(False)
    with mock.patch.object(dispatch, "has_kernels", return_value=False):
        ao_lab.quantize_(net, (CONFIGS | DYNAMIC | OTHERS)[name.removesuffix(PRESHUFFLED)]())
        if name.endswith(PRESHUFFLED):
            net[0].weight = nn.Parameter(net[0].weight.to_layout("preshuffled"), requires_grad=False)
    return net[0]


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random ones."""
    return torch.randn(*shape, WIDTH, dtype=dtype)


def kept(one: Any) -> PreparedProducts:
    """What a layer's weight keeps prepared."""
    found: PreparedProducts = vars(one.weight)["_settled"].get(PROGRAMS)
    return found


def addresses_of(one: Any) -> set[int]:
    """Addresses of what kernels read of a layer: its bias and the weight's parts, but for a scale of all that others hold."""
    parts = dict(one.weight.parts)
    if one.weight.meta.layout == "preshuffled":
        parts.pop("outer", None)
    return {part.data_ptr() for part in (*parts.values(), one.bias) if part is not None}


def run(gpu: Any, one: Any, x: torch.Tensor) -> tuple[Any, int, list[list[Any]]]:
    """The result, how many calls were looked up, and the launches."""
    before, calls = len(gpu.straight), len(gpu.calls)
    with torch.no_grad():
        y = one(x)
    return y, len(gpu.calls) - calls, [addresses(launch) for launch in gpu.straight[before:]]


def addresses(launch: Sequence[Any]) -> list[Any]:
    """Arguments, of descriptors where their matrices begin."""
    return [value.base.data_ptr() if hasattr(value, "base") else value for value in launch]


def given(launch: Sequence[Any], fixed: set[int]) -> list[Any]:
    """Arguments, with a mark for addresses of memory that a call makes."""
    least = 1 << 28
    made = [isinstance(value, int) and value > least and value not in fixed for value in launch]
    return ["made" if new else value for value, new in zip(launch, made, strict=True)]
