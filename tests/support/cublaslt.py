"""What `torch._scaled_mm` refuses on a GPU: for tests in which CPU tensors pass for a GPU's. On a CPU it takes operands of any
strides and lengths.

The rules are torch's, of its meta functions (which programs are traced by), on tensors of the same shapes, strides and dtypes
without memory; and two that cuBLASLt has besides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ao_lab.training import products
from reference import Quantized

E5M2 = torch.float8_e5m2
WIDE = torch.float32


def without_memory(value: Any) -> Any:
    """Meta tensors for tensors, also in lists."""
    if isinstance(value, list):
        return [without_memory(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _common(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: Any) -> None:
    if a.dtype == b.dtype == E5M2:
        raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
    if bias is not None and dtype == WIDE:
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")


_scaled_mm, _scaled_mm_v2 = torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default


def check(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> None:  # fmt: skip
    """RuntimeError, or ValueError, for operands of `torch._scaled_mm` that a GPU refuses."""
    _common(a, b, bias, out_dtype)
    _scaled_mm(*map(without_memory, (a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)))


def check_v2(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, kinds_a: Any, swizzle_a: Any, scale_b: Any, kinds_b: Any, swizzle_b: Any,
    bias: torch.Tensor | None = None, dtype: Any = None,
) -> None:  # fmt: skip
    """The same of `aten::_scaled_mm_v2`."""
    _common(a, b, bias, dtype)
    given = (a, b, scale_a, kinds_a, swizzle_a, scale_b, kinds_b, swizzle_b, bias, dtype)
    _scaled_mm_v2(*map(without_memory, given))


def _zeros(a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    check(a, b, *rest, **named)
    return torch.zeros(a.shape[0], b.shape[1], dtype=named.get("out_dtype"))


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Ask of every emulated training product of two operands that `torch._scaled_mm` would take on a GPU whether it would take
    these: layouts are those of what was gathered, cached and kept. What was asked, as (M, N, K)."""
    asked: list[tuple[int, int, int]] = []
    emulated = products.PRODUCTS["emulate"]

    def run(a: Any, b: Any, record: Any, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(a, Quantized) and isinstance(b, Quantized) and not torch.compiler.is_compiling():
            with monkeypatch.context() as patched:
                patched.setattr(products, "has_fp8", lambda device: True)
                patched.setattr(torch, "_scaled_mm", _zeros)
                if products.unsupported_reason(a, b) is None:
                    asked.append((a.shape[0], b.shape[0], a.shape[1]))
                    products.scaled_mm(a, b, record, dtype, bias)
        return emulated.run(a, b, record, dtype, bias)

    monkeypatch.setitem(products.PRODUCTS, "emulate", products.Kernel(run, emulated.unsupported_reason))
    return asked


__all__ = ["check", "check_v2", "watch"]
