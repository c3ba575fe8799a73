"""Products of quantized inputs by a weight's codes: kernels "int8" and "scaled_mm" of `ao_lab.gemm.select`.

* "int8": exact integer sums of codes; scales, zero points and the bias in float32, and one rounding.
* "scaled_mm": `torch._scaled_mm` of float8 codes, under one scale for each row or for all, and under scales of
  blocks: 1x128 of the first operand, 1x128 or 128x128 of the second. What torch takes of blocks (2.11 to 2.13,
  compute capability 9.0): scales in float32 that decode. Those of 1x128 lie block after block, (M, K/128) with
  strides (1, M). Those of 128x128 run along K, K/128 rounded up to a multiple of 4, which `torch._scaled_mm` does not
  know: it reads past its scales where K/128 is no such multiple, and gives NaN. There `_scaled_mm_v2` takes padded
  ones.

Rows that `fast.matmul.linear.linear_of_codes` multiplies faster are left to it, by either kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fast
from ao_lab.gemm.dense import (
    STORED,
    capability,
    cpu_scales_rows,
    dequantized,
    is_host,
    is_unbacked,
    loses_nan,
)
from ao_lab.gemm.operand import QuantizedWeight
from fast.dispatch import OLDEST
from fast.gemm.choose import codes_beat_torch, takes_codes
from fast.matmul.linear import linear_of_codes
from fast.matmul.weights import LONGEST_INT8, one_scale
from fast.quantize.static_scales import quantize_rows
from reference import Quantized, Scheme

#: What products of codes write.
RESULTS = (torch.float32, torch.bfloat16, torch.float16)


#: `linear_of_codes` takes lengths that are multiples of this.
STEP = 16


def activation(w: QuantizedWeight) -> Scheme:
    """The scheme of the input; ValueError where the recipe has none."""
    scheme = w.recipe.activation
    if scheme is None:
        raise ValueError(f"{w.recipe} has no scheme for its input")
    return scheme


def quantized_input(x: torch.Tensor, w: QuantizedWeight, scheme: Scheme) -> Quantized:
    """The input (M, K) in its scheme: static scales where the weight brings them, else found anew. Either way the scale or the
    codes of a row that holds a NaN are NaN."""
    scales = w.input_scales
    if scales is not None and loses_nan(w):
        return quantize_rows(x, scheme, scales)
    return fast.quantize(x, scheme, axis=-1, scales=scales)


def row(scale: torch.Tensor) -> torch.Tensor:
    """A weight's stored scales (N, 1) as a row; one over the whole tensor as it is."""
    return scale if scale.dim() == 0 else scale.t()


def multiplies_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether kernels "int8" and "scaled_mm" are `linear_of_codes` for these inputs."""
    if w.scheme.element == "int8":
        return _are_integer_codes(x, w)
    return _is_one_row(x, w) or _are_few_rows(x, w)


def _is_one_row(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is one row that a kernel multiplies as codes. A number of rows that a tracer leaves open is not one."""
    if not (w.is_cuda and isinstance(x.shape[0], int) and x.shape[0] == 1):
        return False
    sizes: tuple[Any, ...] = tuple(w.codes.shape)
    rows, length = sizes
    if not (isinstance(rows, int) and isinstance(length, int)):
        # Of sizes that a tracer leaves open the kernel asks one thing; the program keeps the answer.
        rows = length = STEP if length % STEP == 0 else 1
    able = capability(w.device.index or 0) >= OLDEST
    return able and takes_codes(activation(w).key, w.scheme.key, (rows, length), x.dtype)


def _are_integer_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether `linear_of_codes` multiplies these integers: one row as `_is_one_row` says, on Hopper's tensor cores any number
    of rows, those that a tracer leaves open too. No rows at all are none."""
    if _is_one_row(x, w):
        return True
    count: Any = x.shape[0]
    none_or_one = isinstance(count, int) and count < 2
    if not w.is_cuda or none_or_one or capability(w.device.index or 0) != OLDEST:
        return False
    whole: bool = w.codes.shape[1] % STEP == 0
    return whole and x.dtype in RESULTS


def _are_few_rows(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is rows that `linear_of_codes` multiplies faster than torch; sizes that a tracer leaves open are not."""
    sizes: tuple[Any, ...] = (x.shape[0], *w.codes.shape)
    if not w.is_cuda or not all(isinstance(size, int) for size in sizes) or sizes[0] < 2:
        return False
    if capability(w.device.index or 0) != OLDEST or sizes[2] % STEP:
        return False
    return codes_beat_torch(activation(w).key, w.scheme.key, sizes[1:], sizes[0])


# Kernel "int8": exact integer sums of codes; scales, zero points and the bias in float32, and one rounding.

#: Rows that cuBLAS's integer product takes at least.
FEWEST_ROWS = 17


#: What lengths of cuBLAS's integer product are multiples of.
INT8_STEP = 8


def int8(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N) plus bias (N), in x's dtype."""
    inputs = quantized_input(x, w, activation(w))
    if multiplies_codes(x, w) and (bias is None or bias.shape == w.shape[1:]):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    weight = w.codes.view(torch.int8)
    sums = _integer_sums(inputs.codes.view(torch.int8), weight.t())
    if inputs.zero is not None:
        sums = sums - inputs.zero.to(torch.int32) * _sums_of_rows(weight)
    y = sums.to(torch.float32) * inputs.scale * row(w.scale)
    total: torch.Tensor = y if bias is None else y + bias.to(torch.float32)
    return total.to(x.dtype)


def _sums_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """Those of the weight's codes (N, K), int32; on a CPU as a product with ones, which is quicker."""
    if weight.device.type != "cpu":
        return weight.sum(1, dtype=torch.int32)
    return _integer_sums(weight.new_ones((1, weight.shape[1])), weight.t())


def _integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact sums in int32; with rows of zeros where the GPU wants more of them."""
    count = a.shape[0]
    if a.device.type == "cpu":
        if a.shape[1] != b.shape[0]:  # whose parts may fit each other
            raise ValueError(
                f"inputs of shape {tuple(a.shape)} by a weight (in, out) of {tuple(b.shape)}: inputs have "
                f"{b.shape[0]} columns"
            )
        from fast.cpu.linear import integer_sums

        return integer_sums(a, b)
    if a.is_cuda and count < FEWEST_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_ROWS - count))
    return torch._int_mm(a, b)[:count]


def int8_unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight and its inputs' scheme; None where it does."""
    scheme = w.recipe.activation
    if scheme is None or scheme.element != "int8" or w.scheme.element != "int8":
        return "both operands must be int8"
    if not (one_scale(scheme) and one_scale(w.scheme)) or w.zero is not None:
        return "each row must have one float32 scale, and the weight no zero point"
    if len(w.shape) != 2 or not w.meta.transposed or w.meta.layout == "2:4":
        return STORED
    if w.shape[0] > LONGEST_INT8:
        return f"sums longer than {LONGEST_INT8} may overflow int32"
    if w.is_cuda and any(length % INT8_STEP for length in w.shape):
        return f"its lengths must be multiples of {INT8_STEP} on a GPU"
    return None


#: Formats that it multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def scaled_mm(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N) plus bias (N), in x's dtype."""
    rows, columns = x.shape[0], w.shape[1]
    # torch._scaled_mm takes no empty scales; sizes that a tracer leaves open are not asked.
    if (isinstance(rows, int) and rows == 0) or (isinstance(columns, int) and columns == 0):
        return dequantized(x, w, bias)
    if activation(w).scale.block == BLOCK:
        return _scaled_blocks(x, w, bias)
    inputs = quantized_input(x, w, activation(w))
    if multiplies_codes(x, w):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    a, b = inputs.codes.view(FLOAT8[inputs.scheme.element]), w.codes.view(FLOAT8[w.scheme.element])
    if a.device != b.device:  # On a CPU torch does not look, and returns memory that nothing was written to.
        raise ValueError(f"inputs are on {a.device}, the weight is on {b.device}; move either by .to(device)")
    scale_a, scale_b = inputs.scale, row(w.scale)
    if scale_a.dim() != scale_b.dim() or (is_host(a.device) and w.shape[1] and cpu_scales_rows()):
        # One scale in all becomes a column or row, which torch multiplies on a CPU by matrices, others element by element; of
        # 0-d, a column of one would have strides of 0.
        scale_a, scale_b = (s.reshape(1, 1) if s.dim() == 0 else s for s in (scale_a, scale_b))
        scale_a, scale_b = scale_a.expand(x.shape[0], 1), scale_b.expand(1, w.shape[1])
    scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    multiply = _rows_op if is_unbacked(rows) else _multiply
    y: torch.Tensor = multiply(a, b, scale_a, scale_b, bias, x.dtype)
    return y


def _multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """codes a (M, K), b (N, K) in torch's dtypes: a @ b.T plus bias (N) in dtype."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)


def _multiply_rows(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    if a.shape[0] == 0:  # torch._scaled_mm takes no empty scales
        return a.new_empty((0, b.shape[0]), dtype=dtype)
    return _multiply(a, b, scale_a, scale_b, bias, dtype)


#: Of rows whose number is unbacked: torch's own operator asks, while it is traced, whether there is one row.
_rows_op = torch.library.custom_op("ao_lab::scaled_mm_rows", _multiply_rows, mutates_args=())


@_rows_op.register_fake
def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def scaled_mm_unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight and its inputs' scheme beside inputs of a dtype; None where it does."""
    scheme = w.recipe.activation
    if scheme is None or scheme.element not in FLOAT8 or w.scheme.element not in FLOAT8:
        return "both operands must be float8_e4m3fn or float8_e5m2"
    if len(w.shape) != 2 or not w.meta.transposed or w.meta.layout == "2:4":
        return STORED
    if dtype not in RESULTS:
        return f"it does not write {dtype}"
    if scheme.scale.block == BLOCK:
        return _blocks_reason(w, scheme, dtype)
    if not (one_scale(scheme) and one_scale(w.scheme)):
        return "each row must have one float32 scale for decoding"
    if w.is_cuda:
        return _gpu_reason(w, scheme, dtype)
    if -1 in (scheme.scale.block, w.scheme.scale.block) and not cpu_scales_rows():
        return f"torch {torch.__version__} takes one scale for each operand on a CPU, 2.13 one for each row"
    return None


def _blocks_reason(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if not w.is_cuda or capability(w.device.index or 0) != CAPABILITY:
        return "its blockwise matmuls are for GPUs of compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"of blocks it writes bfloat16, not {dtype}"
    return blocks_reason(scheme, w.scheme, (w.shape[1], w.shape[0]))


def _gpu_reason(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if (own := capability(w.device.index or 0)) < (8, 9):
        return f"compute capability {own[0]}.{own[1]} has no float8 matmul; 8.9 and later have"
    if any(length % STEP for length in w.shape):
        return f"its lengths must be multiples of {STEP} on a GPU"
    if scheme.element == w.scheme.element == "float8_e5m2":
        return "GPUs have no matmul of float8_e5m2 by float8_e5m2"
    rowwise = "tensor" not in (scheme.scale.block, w.scheme.scale.block)
    if dtype != torch.bfloat16 and (rowwise or dtype == torch.float32):
        return f"on a GPU it writes bfloat16, not {dtype}"
    return None


#: Elements under a scale.
BLOCK = 128


#: What the number of scales is a multiple of along the sum, under scales of squares.
PADDED = 4


#: The compute capability that it is for.
CAPABILITY = (9, 0)


#: `torch.nn.functional.ScalingType` of blocks 1x128 and 128x128, as the operator takes them.
ROW, SQUARE = 4, 5


def decodes(scheme: Scheme) -> bool:
    """Whether float32 scales multiply codes, and nothing else does anything to them."""
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.storage == "float32"
    return plain and scheme.scale.stored == "decode"


def blocks_reason(a: Scheme, b: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why operands (M, K) and (N, K) are not multiplied, whatever M and the device are. shape: (N, K)."""
    if a.element != "float8_e4m3fn" or b.element != "float8_e4m3fn":
        return "it supports e4m3 by e4m3"
    square = b.scale.block == (BLOCK, BLOCK)
    if a.scale.block != BLOCK or not (square or b.scale.block == BLOCK):
        return "blocks must be 1x128 of a, and 1x128 or 128x128 of b"
    if not (decodes(a) and decodes(b)):
        return "scales must be float32 and decode"
    if shape[1] % BLOCK or shape[0] % (BLOCK if square else STEP):
        return f"blocks of {BLOCK} must divide the sum's length, and those of b its rows"
    return None


def whole_steps(x: torch.Tensor) -> torch.Tensor:
    """Inputs (M, K) with rows of zeros up to a multiple of 16, before they are quantized: codes and scales are two to pad.

    As they are where a tracer leaves M open, which no program may depend on: the product pads then.
    """
    more = -x.shape[0] % STEP if isinstance(x.shape[0], int) else 0
    return nn.functional.pad(x, (0, 0, 0, more)) if more else x


def blocks_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, square: bool, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """codes a (M, K), b (N, K), scales (M, K/128) and (N, K/128), or (N/128, K/128) of squares: a @ b.T plus bias (N) in dtype.

    M is a multiple of 16, or a size that a tracer leaves open. Sums of 128 products are added in float32.
    """
    multiply = _op if torch.compiler.is_compiling() else _blocks_multiply
    y: torch.Tensor = multiply(a, b, scale_a, scale_b, square, dtype, bias)
    return y


def _blocks_multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, square: bool, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    rows = a.shape[0]
    if more := -rows % STEP:
        a = nn.functional.pad(a.view(torch.uint8), (0, 0, 0, more))
        scale_a = nn.functional.pad(scale_a, (0, 0, 0, more))
        return _blocks_multiply(a, b, scale_a, scale_b, square, dtype, bias)[:rows].clone()
    left, right = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t()
    scale_a = scale_a.t().contiguous().t()
    more = -scale_b.shape[1] % PADDED
    if not square or not more:
        # Of a weight that was sliced along K scales are a view of the whole one's.
        scale_b = scale_b.contiguous().t() if square else scale_b.t().contiguous()
        return torch._scaled_mm(left, right, scale_a, scale_b, bias, out_dtype=dtype)
    scale_b = nn.functional.pad(scale_b, (0, more)).t()
    result: torch.Tensor = torch.ops.aten._scaled_mm_v2(
        left, right, [scale_a], [ROW], [0], [scale_b], [SQUARE], [0], bias, dtype
    )
    return result


#: While a program is traced: compilers have products of blocks of their own.
_op = torch.library.custom_op("ao_lab::scaled_mm_blocks", _blocks_multiply, mutates_args=())


@_op.register_fake
def _blocks_fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, square: bool, dtype: torch.dtype, bias: Any
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _scaled_blocks(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    padded = whole_steps(x)
    inputs = quantized_input(padded, w, activation(w))
    square = w.scheme.scale.block != BLOCK
    y = blocks_product(inputs.codes, w.codes, inputs.scale, w.scale, square, x.dtype, bias)
    return y if padded is x else y[: x.shape[0]]


__all__ = [
    "BLOCK",
    "CAPABILITY",
    "FLOAT8",
    "RESULTS",
    "STEP",
    "activation",
    "blocks_product",
    "blocks_reason",
    "decodes",
    "int8",
    "int8_unsupported_reason",
    "multiplies_codes",
    "quantized_input",
    "row",
    "scaled_mm",
    "scaled_mm_unsupported_reason",
]
