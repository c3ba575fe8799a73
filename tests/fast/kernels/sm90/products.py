"""Products by given variants of kernels in CUDA C++, on CPU tensors: the emulator runs them (`StandIn`, whose options `device`
are)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import reference
from fast.gemm import families
from fast.gemm.families import CODES, PLAIN, SPARSE, SPARSE_INT4
from fast.kernels.sm90_intn_small_m import host as intn
from fast.kernels.sm90_s8_gemm import host as s8
from fast.kernels.sm90_s8_gemm.host import Problem
from fast.kernels.sm90_sparse24_gemm import arrange
from fast.kernels.sm90_sparse24_gemm import host as sparse24
from fast.kernels.sm90_sparse24_w4a16_gemv import host as sparse24_gemv
from fast.kernels.sm90_w4a16_gemm import experts as of_experts
from fast.kernels.sm90_w4a16_gemm import host as gemm
from fast.kernels.sm90_w4a16_gemv import host as gemv
from fast.kernels.sm90_w4a16_gemv import several
from fast.kernels.triton_sparse24_small_m import host as sparse_linear
from fast.launch import nvrtc
from fast.matmul.preshuffled import layout
from fast.scale_factors import ArrangedWeight, form_of
from reference import Quantized, Scheme
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator.device.stand_in import StandIn
from tests.gpu.sparsity.cases import as_tensors, case, exact_case, wanted, zero_points
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight


def require_nvrtc() -> None:
    """Skip where NVRTC is not installed."""
    try:
        nvrtc.library()
    except RuntimeError as error:
        pytest.skip(str(error))


def arranged(w: Quantized) -> ArrangedWeight:
    """A preshuffled weight as kernels take it."""
    q = layout.preshuffled(w)
    return ArrangedWeight(q.codes, q.scale, q.zero, tuple(q.shape), *form_of(q.scheme, q.shape[1]))  # type: ignore[arg-type]


def w4a16_gemv(
    x: Any, w: Any, bias: Any = None, *, variant: Any, x_scale: Any = None, dtype: Any = None, **device: Any
) -> torch.Tensor:
    """`sm90_w4a16_gemv`."""
    call = lambda: gemv.sm90_w4a16_gemv(x, w, bias, variant=variant, x_scale=x_scale, dtype=dtype)  # noqa: E731
    return StandIn(**device).made(call, x, w.words, w.scale, w.zero, bias, x_scale)


def w4a16_gemv_of_several(x: Any, weights: Any, variant: Any, gated: bool, **device: Any) -> Any:
    """`sm90_w4a16_gemv` of several weights in one launch: all products, or the gated one alone."""

    def call() -> Any:
        with mock.patch.object(several, "variant_of", return_value=variant):
            if gated:
                return (several.linear_small_swiglu(x, *weights),)
            return several.linear_small_several(x, *weights)

    operands = (part for w in weights for part in (w.words, w.scale, w.zero))
    return StandIn(**device).made(call, x, *operands)


def intn_small_m(x: Any, w: Any, bias: Any, variant: Any, **device: Any) -> torch.Tensor:
    """`sm90_intn_small_m`."""
    operands = x, w.codes, w.scale, w.zero, bias
    return StandIn(**device).made(lambda: intn.sm90_intn_small_m(x, w, bias, variant), *operands)


def w4a16_gemm(
    x: Any, w: Any, bias: Any, variant: Any, schedule: Any = None, x_scale: Any = None, **device: Any
) -> torch.Tensor:
    """`sm90_w4a16_gemm`, by default as `schedule.scheduled` has it."""

    def call() -> Any:
        rows, options = x.numel() // w.shape[1], {"scaled": x_scale is not None, "schedule": schedule}
        launch = gemm.launch_of(w, rows, x.dtype, -1, variant, **options)
        return gemm.call_of(launch, x, w, bias, x_scale).result("y")

    return StandIn(**device).made(call, x, w.words, w.scale, w.zero, bias, x_scale)


def w4a16_gemm_of_experts(x: Any, w: Any, ends: Any, variant: Any, **device: Any) -> torch.Tensor:
    """`sm90_w4a16_gemm` of rows sorted by expert."""

    def call() -> Any:
        return of_experts.call_of(of_experts.launch_of(x, w, variant), x, w, ends).result("y")

    return StandIn(**device).made(call, x, w.words, w.scale, w.zero, ends)


def s8_gemm(
    variant: Any, element: str, dtype: torch.dtype, x: Any, w: Any, bias: Any, **device: Any
) -> torch.Tensor:
    """`sm90_s8_gemm` of codes and scales of x and w."""
    problem = Problem(element, str(dtype).removeprefix("torch."))
    operands = x.codes, x.scale, w.codes, w.scale, bias
    return StandIn(**device).made(lambda: s8.call_of(variant, problem, x, w, bias).result("y"), *operands)


def sparse24_gemm(variant: Any, out: str, *operands: Any, **device: Any) -> torch.Tensor:
    """`fast.linear_sparse`; out: the name of a dtype."""
    x, values, metadata, *rest = operands
    order = arrange.arrange(metadata, 16 if values.itemsize == 2 else 8)
    given = x, values, order, *rest
    return StandIn(**device).made(lambda: sparse24.product(out, True, given, variant).result("y"), *given)


def sparse24_w4a16_gemv(
    x: Any,
    codes: Any,
    metadata: Any,
    scale: Any,
    bias: Any = None,
    *,
    variant: Any,
    zero: Any = None,
    **device: Any,
) -> torch.Tensor:
    """`fast.linear_sparse_int4`."""
    group = 4 * codes.shape[1] // scale.shape[1]
    given = x, codes, metadata, scale, bias

    def call() -> Any:
        with _served(), mock.patch.object(sparse24_gemv, "choose", return_value=variant):
            return sparse_linear.linear_sparse_int4(
                *given, group, zero=zero, family="sm90_sparse24_w4a16_gemv"
            )

    return StandIn(**device).made(call, *given, zero)


def sparse24_pair(
    x: Any, first: Any, second: Any, *, variant: Any, gated: bool = False, **device: Any
) -> Any:
    """Two products of one x, or silu of the first times the second."""
    group = 4 * first[0].shape[1] // first[2].shape[1]

    def call() -> Any:
        with _served():
            both = (
                sparse24_gemv.sm90_sparse24_w4a16_gemv_swiglu
                if gated
                else sparse24_gemv.sm90_sparse24_w4a16_gemv_pair
            )
            return both(x, first, second, group, variant)

    return StandIn(**device).made(call, x, *first, *second)


def _served() -> Any:
    return mock.patch.object(sparse24_gemv, "is_served", return_value=True)


def multiplied(
    name: str, scheme: Scheme | None, p: families.Problem, variant: Any, **device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of a family by a variant, and what it is: operands are exact, see `tests.support.linear_cases`. scheme: None
    for 2:4 weights that are not quantized."""
    (n, k), count = p.shape, int(p.rows)
    bias, group = (torch.arange(n) % 7 - 3).to(p.inputs), p.group
    if p.layout == SPARSE_INT4:
        operands = as_tensors(exact_case(count, n, k, group, families._name(p.inputs), "float32", 1))
        zero = torch.from_numpy(zero_points(operands, 1)) if p.zero else None
        dense = sparse_int4_weight(*operands[1:4], zero)
        got = sparse24_w4a16_gemv(*operands, variant=variant, zero=zero, **device)
        return got, exact_result(operands.x, dense, operands.bias)
    if p.layout == SPARSE:
        torch.manual_seed(0)
        kinds, is_scaled = (getattr(torch, p.element),) * 2, scheme is not None
        one = case(count, n, k, kinds, whole=True, device="cpu")
        extra = (one.bias, one.x_scale, one.scale) if is_scaled else (None, None, None)
        got = sparse24_gemm(
            variant, families._name(p.inputs), one.x, one.values, one.metadata, *extra, **device
        )
        return got, wanted(one, p.inputs, is_scaled)
    if scheme is None:
        raise ValueError(f"weights in layout {p.layout} have a scheme")
    w, x = exact_weight(scheme, n, k), exact_inputs(count, k, p.inputs)
    if p.layout == CODES:
        codes = exact_weight(scheme, count, k, seed=3)
        if name == "sm90_s8_gemm":
            got = s8_gemm(variant, p.element, p.inputs, codes, w, bias, **device)
        else:
            got = by_function(name, variant, codes, w, bias, p.inputs, None, **device)
        return got, reference.linear(
            codes, w, bias, accumulation="blocked", block=k, out_dtype=families._name(p.inputs)
        )
    if p.layout == PLAIN:
        return intn_small_m(x, w, bias, variant, **device), exact_result(x, w, bias)
    if name == "sm90_w4a16_gemm":
        return w4a16_gemm(x, arranged(w), bias, variant, **device), exact_result(x, w, bias)
    return by_function(name, variant, x, arranged(w), bias, **device), exact_result(x, w, bias)


def by_function(name: str, variant: Any, *operands: Any, **device: Any) -> torch.Tensor:
    """A family's "linear" of operands as `fast.matmul` calls it, and of a variant."""
    function: Any = families.FAMILIES[name].function("linear")
    parts = ("codes", "words", "scale", "zero")
    held = [one for of in operands for one in (of, *(getattr(of, part, None) for part in parts))]
    tensors = [one for one in held if isinstance(one, torch.Tensor)]
    result: torch.Tensor = StandIn(**device).made(lambda: function(*operands, variant=variant), *tensors)
    return result


__all__ = [
    "arranged",
    "by_function",
    "intn_small_m",
    "multiplied",
    "require_nvrtc",
    "s8_gemm",
    "sparse24_gemm",
    "sparse24_pair",
    "sparse24_w4a16_gemv",
    "w4a16_gemm",
    "w4a16_gemm_of_experts",
    "w4a16_gemv",
]
