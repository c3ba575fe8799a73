"""The product of a 2:4 weight of 4-bit integers as it is stored (`fast.linear_sparse_int4`): the default for such weights on
GPUs.

Up to `MOST_ROWS` rows of inputs read the kept codes, their places, the scales and zero points, 0.375 bytes an element and what
a group has: within `reference.linear_error_bound` of the exact product with the dense equivalent, exact where all sums are.
More rows are multiplied by torch with the dense equivalent in the input's dtype, which one kernel makes for the call: the
numbers of "dequantize".

It takes weights alone (no activation scheme) of int4 in groups of 32, 64, 128 or 256 columns with one float32 or bfloat16 scale
each, or with one for a row, which every group of it has then, and inputs in bfloat16 and float16. Groups may have integer zero
points: those are multiplied as stored on Hopper alone, of lengths that its kernel divides (`zero_points_reason`).
"""

from __future__ import annotations

import torch

import fast
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.select import Kernel
from ao_lab.gemm.sparse import device_reason, enter
from fast.device import OLDEST
from reference import Scheme
from reference.sparsity.linear_sparse_int4 import GROUPS, INPUTS

NAME = "sparse_int4"
#: The most rows of inputs that read the weight as it is stored.
MOST_ROWS = 64
SCALES = ("float32", "bfloat16")
#: Columns of a stage of the kernel of zero points, the least of it.
STAGE = 256
#: Bytes of its copies.
COPY = 4
#: The block of schemes whose rows have one scale.
ROWS = -1


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight (K, N) beside inputs of a dtype; None where it does."""
    if w.meta.layout != "2:4":
        return "the weight is not in 2:4 storage"
    if w.recipe.activation is not None:
        return "its inputs must not be quantized"
    if str(dtype).removeprefix("torch.") not in INPUTS:
        return f"its inputs must be {' or '.join(INPUTS)}, got {dtype}"
    return _scheme_reason(w.scheme) or _shape_reason(w) or _device_reason(w)


def _scheme_reason(scheme: Scheme) -> str | None:
    if scheme.element != "int4":
        return f"it multiplies int4, not {scheme.element}"
    if scheme.outer is not None or scheme.dequantize != "float32":
        return "a weight must be its code times one scale, in float32"
    if scheme.zero is not None and (scheme.zero.rule != "code" or scheme.zero.storage != "int8"):
        return "zero points must be integers that are taken off codes"
    scale = scheme.scale
    if scale.block not in (*GROUPS, ROWS) or scale.stored != "decode" or scale.storage not in SCALES:
        groups = ", ".join(map(str, GROUPS))
        return (
            f"each group of {groups} columns, or each row, must have one {' or '.join(SCALES)} scale for decoding, got blocks "
            f"of {scale.block!r} in {scale.storage}"
        )
    return None


def _shape_reason(w: QuantizedWeight) -> str | None:
    if len(w.shape) != 2 or w.block_axis != -2 or w.codes.dim() != 2:
        return "the weight must be a matrix, stored as (out, in)"
    length, group = w.shape[0], group_of(w)
    if length % group or not length:
        return f"the length of its sums must be a multiple of its group of {group}, got {length}"
    return None if w.scheme.zero is None else zero_points_reason(length, group)


def group_of(w: QuantizedWeight) -> int:
    """Columns of a group: of one scale for a row the most that divide the length of its sums, and that all kernels take."""
    scale, length = w.scheme.scale, w.shape[0]
    if scale.block != ROWS:
        return int(scale.block)  # type: ignore[arg-type]
    groups = [group for group in GROUPS if scale.storage == "float32" or group < GROUPS[-1]]
    fits = (group for group in reversed(groups) if length % (COPY * group) == 0)
    return next(fits, GROUPS[0])


def zero_points_reason(length: int, group: int) -> str | None:
    """Why sums of a length have no kernel where each group has a zero point; None where they have: whole stages of its warps,
    and rows of zero points that are whole copies of four bytes."""
    step = max(STAGE, COPY * group)
    if length % step:
        return f"with zero points the length of its sums must be a multiple of {step}, got {length}"
    return None


def _device_reason(w: QuantizedWeight) -> str | None:
    return device_reason(w, OLDEST, later=w.scheme.zero is None)


def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N), plus bias (N), in x's dtype."""
    metadata: torch.Tensor = w.metadata  # type: ignore[attr-defined]
    # `torch.addmm` takes one number for all columns too.
    bias = None if bias is None else bias.expand(w.shape[1]).contiguous()
    scale, zero = w.scale, w.zero
    if w.scheme.scale.block == ROWS:
        blocks = (w.shape[1], w.shape[0] // group_of(w))
        scale = scale.expand(blocks).contiguous()
        zero = None if zero is None else zero.expand(blocks).contiguous()
    return fast.linear_sparse_int4(x, w.codes, metadata, scale, bias, zero)


enter(NAME, Kernel(run, unsupported_reason), before="dequantize")

__all__ = ["MOST_ROWS", "NAME", "run", "unsupported_reason"]
