"""Matrix multiplication with a stated accumulation: three tiers, each defined to the last bit.

With S the exact sums of products and rne the rounding to nearest, ties to even, of float32:

* ``exact``: out = round(S + bias), one rounding to the output type and none before it.
* ``blocked``: K is cut into blocks. Each block's exact sum is rounded to float32, multiplied by the scales that change along
  K (a's, then b's; every product rounded to float32), and added in order in float32. This is what a kernel approximates
  that promotes every block (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
* ``hopper_fp8``: the same, with the sum of a block taken by the tensor core model of `reference.matmul.tensor_core_model`
instead of exactly.

In the last two, the scales that do not change along K follow after the last sum (a's, then b's; each block scale before its
outer scale), then the bias is added in float32, then the result is rounded to the output type.

Batches (..., M, K) @ (..., K, N) broadcast as in `np.matmul`. It runs on the host in NumPy for every library and is meant
for tests and measurements: it is not jittable and gives no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, choice, dtype_name, namespace_of
from reference.matmul.exact import F64, RESULTS, exact_matmul, round_result
from reference.matmul.operands import INTEGERS, Operand, format_of_operand, from_host, operand_of, to_host
from reference.matmul.tensor_core_model import (
    TensorCore,
    add_float32,
    multiply_float32,
    parts_of,
    tensor_core_matmul,
)
from reference.quantize.quantize import Quantized

ACCUMULATIONS = ("exact", "blocked", "hopper_fp8")


def matmul(
    a: Array | Quantized,
    b: Array | Quantized,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike = "float32",
    bias: Array | None = None,
    block: int = 128,
    k_step: int = 32,
    frac_bits: int = 13,
    promote: int | None = None,
    operand_formats: tuple[str, str] | None = None,
) -> Array:
    """a (..., M, K) times b (..., K, N), plus bias, to `out_dtype`: (..., M, N) in the library and on the device of `a`.

    Operands are float32, bfloat16, float16, float8 or signed integer arrays, or `Quantized`. The value of a `Quantized` is
    what `dequantize` gives in float32; so ``exact`` equals `matmul` of the dequantized operands. The other tiers sum code
    values (less an integer zero point) and apply scales as the module says; an encoding scale enters by its rounded
    reciprocal. Schemes with float zero points, flattened blocks or a codebook enter as their dequantized values.

    `bias` is float32, bfloat16 or float16 and broadcasts to the result. `out_dtype` is float32, bfloat16, float16, or int32
    for integer arrays in the exact tier (ValueError if a sum does not fit). Results round to nearest even, underflow is
    gradual, overflow is infinite. NaN and infinities follow IEEE 754. Zero sums are +0; K = 0 gives the bias or +0.

    ``blocked`` uses blocks of `block` elements. ``hopper_fp8`` uses `k_step` and `frac_bits` of
    `reference.matmul.tensor_core_model`, whose accumulator has min(frac_bits, 23) mantissa bits, in one chain over K, or
    from a zero accumulator every `promote` elements (None: fast accumulation). Where a scale changes along K, blocks are
    cut at the greatest common divisor with its group. Unquantized operands of this tier count as float8_e4m3fn unless their
    dtype is another float8 or `operand_formats` names them, for example ("bfloat16", "bfloat16") with k_step=16,
    frac_bits=25.

    Raises ValueError for shapes that do not match, values that the tensor core's format does not hold, and unknown names;
    TypeError for other dtypes, for operands of two libraries, and under JAX tracing.
    """
    choice(accumulation, ACCUMULATIONS, "accumulation")
    out_dtype = dtype_name(out_dtype, (*RESULTS, "int32"), "out_dtype")
    left, right = operands_of(a, b)
    added = bias_of(bias, left, right)
    if out_dtype == "int32":
        return from_host(_integer_sums(left, right, accumulation, bias), "int32", a)
    if accumulation == "exact":
        sums = exact_matmul(left.values, right.values, added)
        return from_host(round_result(sums, out_dtype), out_dtype, a)
    if accumulation == "blocked":
        sums = _scaled_blocks(left, right, _positive(block, "block"), _exact_block)
    else:
        core = tensor_core(k_step, frac_bits, promote)
        sums = _scaled_blocks(left, right, promote, hopper_block(left, right, core, operand_formats))
    total = sums if added is None else add_float32(sums, added)
    return from_host(round_result(total, out_dtype), out_dtype, a)


def operands_of(a: Array | Quantized, b: Array | Quantized) -> tuple[Operand, Operand]:
    """Both operands on the host, checked: one library, equal K, batches that broadcast."""
    names = [namespace_of(x.codes if isinstance(x, Quantized) else x).name for x in (a, b)]
    if names[0] != names[1]:
        raise TypeError(
            f"both operands belong to one library, got {names[0]} and {names[1]}; convert one of them"
        )
    left, right = operand_of(a, -1, "a"), operand_of(b, -2, "b")
    if left.k != right.k:
        raise ValueError(
            f"a (..., M, K) times b (..., K, N) needs one K, got shapes {left.codes.shape} and {right.codes.shape}; "
            f"transpose b if it is (N, K)"
        )
    _product_shape(left, right)
    return left, right


def bias_of(bias: Array | None, left: Operand, right: Operand) -> F64 | None:
    """The bias on the host, checked to broadcast to the product."""
    if bias is None:
        return None
    host, _ = to_host(bias, "bias")
    shape = _product_shape(left, right)
    try:
        fits = np.broadcast_shapes(host.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"bias of shape {host.shape} does not broadcast to the result {shape}; give one value per column"
        )
    return host


def block_step(left: Operand, right: Operand, size: int | None) -> int:
    """Elements of K per partial sum: `size` (None: all of K), cut to divide every group of a scale that changes along K."""
    return math.gcd(size or 0, left.group or 0, right.group or 0) or max(left.k, 1)


def tensor_core(k_step: int, frac_bits: int, promote: int | None) -> TensorCore:
    """The model that `matmul` runs: a 16-bit or wider alignment delivers float32."""
    mantissa = min(frac_bits, 23) if isinstance(frac_bits, int) else frac_bits
    return TensorCore(k_step=k_step, frac_bits=frac_bits, mantissa_bits=mantissa, promote=promote)


def hopper_block(
    left: Operand, right: Operand, core: TensorCore, names: tuple[str, str] | None
) -> Callable[[F64, F64], F64]:
    """The sum of one block by the tensor core model, for checked operand formats."""
    given = (None, None) if names is None else names
    emin = format_of_operand(left, given[0], "a").emin, format_of_operand(right, given[1], "b").emin
    chain = TensorCore(k_step=core.k_step, frac_bits=core.frac_bits, mantissa_bits=core.mantissa_bits)
    return lambda x, y: tensor_core_matmul(x, y, core=chain, emin=emin)


def _scaled_blocks(
    left: Operand, right: Operand, size: int | None, product: Callable[[F64, F64], F64]
) -> F64:
    """Sum of blocks in order in float32, each multiplied by its scales; then the scales that hold for all of K."""
    total = np.zeros(_product_shape(left, right))
    for part in parts_of(left.k, block_step(left, right, size)):
        partial = product(left.part(part), right.part(part))
        for scale in (left.scale_at(part.start), right.scale_at(part.start)):
            partial = partial if scale is None else multiply_float32(partial, scale)
        total = add_float32(total, partial)
    for scale in (*left.final_scales, *right.final_scales):
        total = multiply_float32(total, scale)
    return total


def _exact_block(a: F64, b: F64) -> F64:
    return round_result(exact_matmul(a, b), "float32")


def _integer_sums(left: Operand, right: Operand, accumulation: str, bias: Any) -> F64:
    if left.kind not in INTEGERS or right.kind not in INTEGERS or accumulation != "exact" or bias is not None:
        raise ValueError(
            f"out_dtype int32 is for integer arrays in the exact tier without bias; got {left.kind}, {right.kind}, "
            f"accumulation={accumulation!r}{'' if bias is None else ' and a bias'}: use out_dtype='float32'"
        )
    sums = exact_matmul(left.values, right.values)
    if np.any(np.abs(sums + 0.5) > 2.0**31):
        raise ValueError(
            f"a sum does not fit int32 (largest magnitude {np.abs(sums).max():.0f}); use out_dtype='float32'"
        )
    return sums


def _product_shape(left: Operand, right: Operand) -> tuple[int, ...]:
    x, y = left.codes.shape, right.codes.shape
    try:
        batch = np.broadcast_shapes(x[:-2], y[:-2])
    except ValueError:
        raise ValueError(
            f"batches of shapes {x[:-2]} and {y[:-2]} do not broadcast; give equal batch axes, or 1"
        ) from None
    return (*batch, x[-2], y[-1])


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a number of K elements, at least 1; got {value!r}")
    return value
