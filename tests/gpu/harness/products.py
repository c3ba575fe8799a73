"""Products by given variants of kernels in CUDA C++. allocate: of shape, strides and dtype, in place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fast.kernels.sm90_s8_gemm import host as s8
from fast.kernels.sm90_sparse24_gemm import host as sparse24
from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_w4a16_gemm import experts as of_experts
from fast.kernels.sm90_w4a16_gemm import host as gemm
from fast.kernels.sm90_w4a16_gemm.host import choose
from fast.launch.cuda import processors_of
from fast.launch.launcher import Call


def made(describe: Callable[[], Call | None], allocate: Any = None) -> Any:
    """The result of a call."""
    if allocate is None:
        call = describe()
    else:
        original = Call.allocate

        def allocated(self: Call, name: str, shape: Any, dtype: Any, fill: Any = ()) -> torch.Tensor:
            own = original(self, name, shape, dtype, fill)
            self.tensors[name] = allocate(tuple(shape), own.stride(), own.dtype)
            return self.tensors[name]

        with mock.patch.object(Call, "allocate", allocated):
            call = describe()
    assert call is not None, "the variant does not compile or load"
    return call.result("y")


def w4a16_gemm(
    x: torch.Tensor, w: Any, bias: Any = None, variant: Any = None, x_scale: Any = None, allocate: Any = None
) -> Any:
    """By `sm90_w4a16_gemm`; variant: by default the rule's."""
    rows, device = x.numel() // w.shape[1], x.get_device()
    one = variant or choose(rows, *w.shape, gemm.weight_of(w), processors_of(device))
    launch = gemm.launch_of(w, rows, x.dtype, device, one, scaled=x_scale is not None)
    assert launch is not None
    return made(lambda: gemm.call_of(launch, x, w, bias, x_scale), allocate)


def w4a16_gemm_of_experts(
    x: torch.Tensor, w: Any, ends: torch.Tensor, variant: Any = None, allocate: Any = None
) -> Any:
    """The same of rows sorted by expert."""
    launch = of_experts.launch_of(x, w, variant)
    assert launch is not None
    return made(lambda: of_experts.call_of(launch, x, w, ends), allocate)


def s8_gemm(x: Any, w: Any, bias: Any, dtype: torch.dtype, variant: Any, allocate: Any = None) -> Any:
    """By `sm90_s8_gemm`, of codes and scales."""
    return made(lambda: s8.call_of(variant, s8.problem_of(dtype), x, w, bias), allocate)


def sparse24_gemm(
    out: str, variant: Any, x: Any, values: Any, metadata: Any, *rest: Any, allocate: Any = None
) -> Any:
    """By `sm90_sparse24_gemm`; rest: bias, x_scale, scale, of which the last may be left out."""
    order = metadata if metadata.dim() == 3 else arrange(metadata, 8 * x.itemsize)
    operands = (x, values, order, *rest, *(None,) * (3 - len(rest)))
    return made(lambda: sparse24.product(out, True, operands, variant), allocate)


__all__ = ["made", "s8_gemm", "sparse24_gemm", "w4a16_gemm", "w4a16_gemm_of_experts"]
