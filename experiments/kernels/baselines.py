"""Baselines: the same work without our kernels. Each is timed in turn with ours, on the same inputs.

A baseline that has nothing for a case has no row; one that should run and cannot has a row with its error.

torchao's functions (0.18) are called as its users call them and imported on first use. torchao's conventions are not our own
(see `reference.schemes.conventions`): the work is the same, some bits are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ao_lab.measure.turns import Call
from experiments.kernels.expressions import expression
from experiments.kernels.operations import Case, Inputs
from reference import SCHEMES, Scheme

Made = tuple[Callable[..., Any], Callable[[Inputs], tuple[Any, ...]]]


def torchao_call(case: Case) -> Made | None:
    """A function and its arguments from a case's inputs, or None where torchao has nothing for it; ImportError without it."""
    if case.options.get("axis", -1) != -1 or case.scheme not in SCHEMES:
        return None
    scheme = SCHEMES[case.scheme]
    maker = {
        "quantize": _quantize,
        "small": _quantize,
        "dequantize": _dequantize,
        "fake_quantize": _fake_quantize,
        "both": _both,
    }.get(case.operation)
    return maker(case, scheme) if maker else None


def family(scheme: Scheme) -> str:
    """Which part of torchao knows a scheme: mx, nvfp4, float8 (its training casts), blockwise, affine, or none."""
    fmt = scheme.format
    if scheme.scale.power_of_two:
        return "none" if fmt.kind == "int" else "mx"
    if scheme.outer is not None:
        return "nvfp4" if fmt.name == "float4_e2m1fn" else "none"
    if fmt.kind == "float":
        return "blockwise" if isinstance(scheme.scale.block, tuple) or scheme.scale.block == 128 else "float8"
    return "affine" if fmt.kind == "int" and scheme.zero is None else "none"


def _quantize(case: Case, scheme: Scheme) -> Made | None:
    kind = family(scheme)
    if kind == "mx":
        return to_mx_call(scheme), lambda inputs: (inputs["x"],)
    if kind == "nvfp4":
        return nvfp4_call(), _x_and_outer
    if kind == "float8":
        return float8_call(scheme), lambda inputs: (inputs["x"],)
    if kind == "blockwise" and scheme.scale.block == 128:
        from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_blockwise_act_quant_lhs

        return triton_fp8_blockwise_act_quant_lhs, lambda inputs: (inputs["x"],)
    if kind == "affine":
        return affine_call(scheme), lambda inputs: (inputs["x"],)
    return None


def _x_and_outer(inputs: Inputs) -> tuple[Any, ...]:
    scales = inputs.get("scales")
    return (inputs["x"],) if scales is None else (inputs["x"], scales.outer)


def to_mx_call(scheme: Scheme) -> Callable[..., Any]:
    """`to_mx`: 6-bit codes are not packed, 4-bit ones are."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode.RCEIL if scheme.scale.rule == "rceil" else ScaleCalculationMode.FLOOR
    element = mx_element(scheme)
    return lambda x: to_mx(x, element, 32, mode)


def mx_element(scheme: Scheme) -> Any:
    """torchao's name of an element format."""
    from torchao.prototype.mx_formats import constants

    return {
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float6_e2m3fn": constants.DTYPE_FP6_E2M3,
        "float6_e3m2fn": constants.DTYPE_FP6_E3M2,
        "float4_e2m1fn": torch.float4_e2m1fn_x2,
    }[scheme.element]


def nvfp4_call() -> Callable[..., Any]:
    """`nvfp4_quantize` with two levels, the outer scale given or found first."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def run(x: torch.Tensor, outer: torch.Tensor | None = None) -> Any:
        scale = per_tensor_amax_to_scale(x.abs().max()) if outer is None else outer
        return nvfp4_quantize(x, 16, scale)

    return run


def float8_call(scheme: Scheme) -> Callable[..., Any]:
    """`hp_tensor_to_float8_dynamic`, the cast of float8 training: tensorwise or rowwise."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    dtype = torch.float8_e5m2 if scheme.element == "float8_e5m2" else torch.float8_e4m3fn
    rowwise = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    options = rowwise if scheme.scale.block == -1 else {}
    return lambda x: hp_tensor_to_float8_dynamic(x, dtype, LinearMMConfig(), **options)


def affine_block(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """Block size in torchao's words."""
    block = scheme.scale.block
    if block == "tensor":
        return (shape[0], shape[1])
    return (1, shape[1] if block == -1 else int(block))


def affine_call(scheme: Scheme) -> Callable[..., Any]:
    """`choose_qparams_affine` and `quantize_affine`, symmetric, one int8 an element."""
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    low, high = scheme.format.integer_range

    def run(x: torch.Tensor) -> Any:
        block = affine_block(scheme, x.shape)
        found = choose_qparams_affine(
            x, MappingType.SYMMETRIC, block, torch.int8, low, high, scale_dtype=torch.float32
        )
        return quantize_affine(x, block, found[0], found[1], torch.int8, low, high), found[0]

    return run


def _fake_quantize(case: Case, scheme: Scheme) -> Made | None:
    if family(scheme) != "affine":
        return None
    from torchao.quantization import quant_primitives as primitives

    low, high = scheme.format.integer_range

    def run(x: torch.Tensor) -> Any:
        block = affine_block(scheme, x.shape)
        symmetric = primitives.MappingType.SYMMETRIC
        scale, zero = primitives.choose_qparams_affine(
            x, symmetric, block, torch.int8, low, high, scale_dtype=torch.float32
        )
        return primitives._fake_quantize_affine(x, block, scale, zero, torch.int8, low, high)

    return run, lambda inputs: (inputs["x"],)


def _both(case: Case, scheme: Scheme) -> Made | None:
    if family(scheme) != "mx":
        return None
    one = to_mx_call(scheme)
    return (lambda x: (one(x), one(x.t().contiguous()))), lambda inputs: (inputs["x"],)


def _dequantize(case: Case, scheme: Scheme) -> Made | None:
    kind = family(scheme)
    if case.options["packed"] and scheme.format.name != "float4_e2m1fn":
        # Only pairs of float4 codes are packed in torchao, neither 6-bit floats nor integers.
        return None
    if kind == "mx":
        return _mx_back(scheme)
    if kind == "nvfp4":
        return _nvfp4_back()
    if kind == "float8":
        from torchao.quantization.quant_primitives import _dequantize_affine_float8

        return (
            lambda codes, scale: _dequantize_affine_float8(codes, scale, torch.bfloat16),
            lambda inputs: (inputs["q"].codes.view(torch.float8_e4m3fn), inputs["q"].scale),
        )
    return _affine_back(scheme) if kind == "affine" else None


def _mx_back(scheme: Scheme) -> Made:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    element = mx_element(scheme)
    carrier = element if scheme.format.bits == 8 else torch.uint8
    return (
        lambda codes, scale: to_dtype(codes, scale, element, 32, torch.bfloat16),
        lambda inputs: (inputs["q"].codes.view(carrier), inputs["q"].scale.view(torch.float8_e8m0fnu)),
    )


def _nvfp4_back() -> Made:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs["q"]
        scale = q.scale.view(torch.float8_e4m3fn)
        return (NVFP4Tensor(q.codes, scale, 16, torch.bfloat16, per_tensor_scale=q.outer),)

    return (lambda stored: stored.dequantize(torch.bfloat16)), arguments


def _affine_back(scheme: Scheme) -> Made:
    from torchao.quantization.quant_primitives import dequantize_affine

    low, high = scheme.format.integer_range
    shift = 8 - scheme.format.bits

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs["q"]
        return (q.codes << shift).view(torch.int8) >> shift, q.scale

    def run(codes: torch.Tensor, scale: torch.Tensor) -> Any:
        block = affine_block(scheme, codes.shape)
        return dequantize_affine(
            codes, block, scale, None, torch.int8, low, high, output_dtype=torch.bfloat16
        )

    return run, arguments


COMPILED = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}


@dataclass(frozen=True)
class Baseline:
    """Who it is, what it computes, how its call is found for a case, whether it is compiled, and only as one graph."""

    name: str
    what: str
    find: Callable[[Case], Made | None]
    compiled: bool
    whole: bool = False


BASELINES = (
    Baseline(
        "torch eager", "the work as plain torch operations, one kernel each", expression, compiled=False
    ),
    Baseline(
        "torch.compile",
        "the same expression under torch.compile (max-autotune-no-cudagraphs, static shapes)",
        expression,
        compiled=True,
        whole=True,
    ),
    Baseline(
        "torchao",
        "torchao's function for the scheme by its own convention, under torch.compile as above; it packs 4-bit MX and NVFP4 "
        "codes, and stores 6-bit and integer codes one a byte",
        torchao_call,
        compiled=True,
    ),
)


def offers(baseline: Baseline, case: Case) -> bool:
    """Whether a baseline has something for a case; one whose library is missing counts, so that its row can say so."""
    try:
        return baseline.find(case) is not None
    except ImportError:
        return True


def calls_of(baseline: Baseline, case: Case, sets: Sequence[Inputs]) -> list[Call]:
    """One call per input set, all through one function, which is compiled when it first runs."""
    found = baseline.find(case)
    if found is None:
        raise ValueError(f"{baseline.name} has nothing for {case.name}")
    run, arguments = found
    if baseline.compiled and not is_kernel(run):
        # A compiled function is kept by its code, which all expressions of a kind share: begin anew, or the ninth falls back.
        torch._dynamo.reset()
        # A graph break would make an expression slower than it has to be: better an error than a weak baseline.
        run = torch.compile(run, fullgraph=baseline.whole, **COMPILED)
    return [partial(run, *arguments(inputs)) for inputs in sets]


def is_kernel(run: Callable[..., Any]) -> bool:
    """Whether a baseline's function launches a Triton kernel itself, and has nothing to compile."""
    return (
        getattr(run, "__name__", type(run).__name__).startswith("triton_") or "CustomOp" in type(run).__name__
    )
