"""Products of weights in 2:4 storage: kernels of `ao_lab.gemm.select.PRODUCTS`, which imports this for the first such weight.

* `sparse_int4` (`fast.linear_sparse_int4`), the default for int4 weights on GPUs. Up to `MOST_ROWS` rows of inputs
  read the codes, metadata, scales and zero points as they are stored, 0.375 bytes an element and what a group has:
  within `reference.linear_error_bound` of the exact product with the dense equivalent, exact where all sums are. More
  rows are multiplied by torch with the dense equivalent in the input's dtype, which one kernel makes for the call:
  the numbers of "dequantize". It takes weights alone (no activation scheme) of int4 in groups of 32, 64, 128 or 256
  columns with one float32 or bfloat16 scale each, or with one for a row, and inputs in bfloat16 and float16. Groups
  may have integer zero points: those are multiplied as stored on Hopper alone, of lengths that its kernel divides
  (`zero_points_reason`).
* `sparse_wgmma` (`fast.linear_sparse`), the default on Hopper for other elements, of any number of rows. Scales of
  rows and columns and the bias are applied on the way out, in float32, before the one rounding to the output's dtype.
  int8 by int8: exact sums in int32, the bits of kernel "int8" of the dense layer. float8 by float8, e4m3 and e5m2 in
  any pair: within `reference.linear_sparse_error_bound`, in one chain over K, which keeps about 14 bits on the tensor
  core; for recipes that accumulate "blocked", in chains of 128 elements. bfloat16 and float16 weights and inputs of
  that dtype: float32 sums, likewise. The metadata in the order of the kernel's threads is made from the canonical one
  when a product first needs it and kept beside it: an eighth of a byte for each dense element, never saved. NVRTC
  compiles a kernel for each shape's tiles at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fast
from ao_lab.gemm.codes import quantized_input
from ao_lab.gemm.dense import capability
from ao_lab.gemm.operand import Kernel, QuantizedWeight, kept
from fast.dispatch import OLDEST, is_traced
from fast.gemm.families import MULTIPLES_24
from fast.launch.nvrtc import missing_compiler
from fast.matmul.weights import LONGEST_INT8, one_scale
from fast.sparsity.linear_sparse import HOPPER
from reference import Scheme
from reference.sparsity.linear_sparse_int4 import GROUPS, INPUTS

Function = Callable[..., torch.Tensor]


def traceable(name: str, function: Function, fake: Function) -> Function:
    """`function` of two tensors and more, which for what traces programs is the operator ao_lab::`name` with the same body.

    Its annotations are the operator's types; `fake` says what it returns, without values.
    """
    operator: Any = torch.library.custom_op(f"ao_lab::{name}", function, mutates_args=())
    operator.register_fake(fake)

    def call(*args: Any) -> torch.Tensor:
        traced = torch.compiler.is_compiling() or is_traced(args[0]) or is_traced(args[1])
        result: torch.Tensor = (operator if traced else function)(*args)
        return result

    return call


def device_reason(w: QuantizedWeight, oldest: tuple[int, int], *, later: bool = True) -> str | None:
    """Why a kernel for Nvidia GPUs of a compute capability (and later ones) does not run where a weight is; None: it does."""
    if not w.is_cuda:
        return f"it is for Nvidia GPUs, this weight is on {w.device.type}"
    own = capability(w.device.index or 0)
    if own == oldest or (later and own > oldest):
        return None
    needs = f"compute capability {oldest[0]}.{oldest[1]}{' and later' if later else ''}"
    return f"it is for {needs}, this GPU has {own[0]}.{own[1]}"


def shape_reason(w: QuantizedWeight, step: int, *, features: bool) -> str | None:
    """Why a weight (K, N) has no shape that is multiplied where K, and with `features` N too, are multiples of a step."""
    if len(w.shape) != 2 or w.block_axis != -2:
        return "the weight must be a matrix, stored as (out, in)"
    lengths = tuple(w.shape) if features else (w.shape[0],)
    if any(length % step or not length for length in lengths):
        what = f"its lengths must be multiples of {step}, got {lengths}"
        return what if features else f"its sums must have a multiple of {step} terms, got {lengths[0]}"
    if w.scheme.element == "int8" and w.shape[0] > LONGEST_INT8:
        return f"sums longer than {LONGEST_INT8} may overflow int32"
    return None


def kind_of(scheme: Scheme) -> str:
    """What elements of a scheme are multiplied with: int8 with int8, 8-bit floats ("float8") with each other."""
    return f"{scheme.format.kind}{scheme.format.bits}"


#: The most rows of inputs that read the weight as it is stored.
MOST_ROWS = 64


SCALES = ("float32", "bfloat16")


#: Columns of a stage of the kernel of zero points, the least of it.
STAGE = 256


#: Bytes of its copies.
COPY = 4


#: The block of schemes whose rows have one scale.
ROWS = -1


def int4_unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
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
        return f"it supports int4, not {scheme.element}"
    if scheme.outer is not None or scheme.dequantize != "float32":
        return "a weight must be its quantized value times one scale, in float32"
    if scheme.zero is not None and (scheme.zero.rule != "code" or scheme.zero.storage != "int8"):
        return "zero points must be integers subtracted from quantized values"
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


def int4_run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
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


INT4 = Kernel(int4_run, int4_unsupported_reason)


WGMMA_NAME = "sparse_wgmma"


#: torch's dtypes of elements that are multiplied as they are, and of quantized ones.
PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16}


CODES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


#: The accumulation of recipes whose float8 sums are promoted.
BLOCKED = "blocked"


def wgmma_unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight (K, N) beside inputs of a dtype; None where it does."""
    if w.meta.layout != "2:4":
        return "the weight is not in 2:4 storage"
    step = MULTIPLES_24[16 if w.scheme.element in PLAIN else 8]
    return _operands_reason(w, dtype) or shape_reason(w, step, features=False) or _wgmma_device_reason(w)


def _operands_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    element, activation = w.scheme.element, w.recipe.activation
    if element in PLAIN:
        if activation is not None or dtype != PLAIN[element]:
            return f"inputs of {element} weights must be {element} themselves, got {dtype}"
        return None
    if element not in CODES:
        return f"it multiplies {', '.join((*PLAIN, *CODES))}, not {element}"
    if activation is None or activation.element not in CODES or kind_of(activation) != kind_of(w.scheme):
        return f"inputs of {element} weights must be {kind_of(w.scheme)} too"
    if (
        not (one_scale(activation) and one_scale(w.scheme))
        or w.zero is not None
        or activation.zero is not None
    ):
        return "each row must have one float32 scale for decoding, and neither operand a zero point"
    return None if dtype in OUTPUTS else f"it does not write {dtype}"


def _wgmma_device_reason(w: QuantizedWeight) -> str | None:
    return device_reason(w, HOPPER, later=False) or missing_compiler()


def wgmma_run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N), plus bias (N), in x's dtype."""
    metadata: torch.Tensor = w.metadata  # type: ignore[attr-defined]
    fast_sums = w.recipe.accumulation != BLOCKED
    if w.recipe.activation is None:
        return product_of(x, w.codes, metadata, w.scheme.element, bias, None, None, x.dtype, fast_sums)
    inputs = quantized_input(x, w, w.recipe.activation)
    codes = inputs.codes.view(CODES[inputs.scheme.element])
    scales = (inputs.scale, w.scale)
    return product_of(codes, w.codes, metadata, w.scheme.element, bias, *scales, x.dtype, fast_sums)


def _product(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    element: str,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    fast_sums: bool,
) -> torch.Tensor:
    """x (M, K) times the 2:4 codes (N, K/2), scaled: (M, N)."""
    values = codes.view({**PLAIN, **CODES}[element])
    order = kept(codes, metadata, WGMMA_NAME, lambda: fast.arrange_sparse_metadata(metadata, values.dtype))
    scales: dict[str, Any] = {"x_scale": x_scale, "scale": scale}
    return fast.linear_sparse(x, values, order, bias, **scales, out_dtype=dtype, fast_sums=fast_sums)


def _fake(x: torch.Tensor, codes: torch.Tensor, metadata: torch.Tensor, element: str, bias: Any, x_scale: Any, scale: Any,
          dtype: torch.dtype, fast_sums: bool) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=dtype)


product_of = traceable("sparse_wgmma_mm", _product, _fake)


WGMMA = Kernel(wgmma_run, wgmma_unsupported_reason)


__all__ = [
    "INT4",
    "MOST_ROWS",
    "WGMMA",
    "WGMMA_NAME",
    "device_reason",
    "int4_run",
    "int4_unsupported_reason",
    "kind_of",
    "shape_reason",
    "traceable",
    "wgmma_run",
    "wgmma_unsupported_reason",
]
