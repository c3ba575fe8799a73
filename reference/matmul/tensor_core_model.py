"""A bit-level model of Hopper's tensor cores (wgmma): fixed-point sums of aligned, truncated products.

One step takes an accumulator c and `k_step` pairs (a_k, b_k). Exactly:

1. A number x of a format whose smallest normal exponent is emin has the exponent e(x) = max(floor(log2 |x|), emin): a
   subnormal counts with emin and a significand below 1. The product a_k b_k is exact and has the exponent
   e(a_k) + e(b_k), not normalised: its significand lies in (0, 4). A zero product has no exponent.
2. E = max(e(c), all product exponents), where e(c) is taken with emin = -126 and e(0) = -126.
3. Every product and c is cut to a multiple of 2**(E - frac_bits), toward zero: magnitudes are truncated, signs kept.
4. These integers are added exactly; no carry is lost.
5. The sum is delivered with `mantissa_bits` fraction bits, truncated toward zero, subnormal below 2**-126; it is the next
   accumulator. A zero sum is +0. A sum of 2**128 or more is infinite (FP8 products cannot reach that).

NaN, and infinities of both signs among the products, give NaN; otherwise an infinite product gives infinity.
FP8 inputs use k_step 32, frac_bits 13, mantissa_bits 13 (the "22-bit" accumulator e8m13); bfloat16 and float16 inputs use
k_step 16, frac_bits 25, mantissa_bits 23.

With `promote=n` the chain is cut every n elements of K: each part starts from a zero accumulator, and the parts are added
in order in float32, rounded to nearest even (CUTLASS and DeepSeek promote every 128; `torch._scaled_mm` with
use_fast_accum=False). Without, one chain runs over all of K. A last step shorter than k_step is padded with zeros.

Sources: Xie et al., "MMA-Sim" (arXiv 2511.10909), section IV, truncated fused dot-product-add; Khattak and Mikaitis,
"Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004); DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, for promotion.
`tests/gpu/validate_hopper.py` compares this model, and variants of it, with the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from reference.arrays.namespace import choice
from reference.matmul.exact import F64, special_values

ROUNDINGS = ("toward_zero", "down", "nearest_even")
EXPONENTS = ("sum", "normalized")
#: Smallest exponent of the accumulator, a float32.
ACCUMULATOR_EMIN = -126
#: float64 elements of one temporary array: 16 MiB.
SLAB = 1 << 21


@dataclass(frozen=True, kw_only=True)
class TensorCore:
    """The parameters of the model; the defaults are Hopper with FP8 inputs.

    The last three fields exist so that measurements can reject other hypotheses: `align` rounds in step 3, `deliver` in
    step 5 (`toward_zero`, `down`, `nearest_even`), and `product_exponent` is `sum` as in step 1 or `normalized`,
    floor(log2 |a b|).
    """

    k_step: int = 32
    frac_bits: int = 13
    mantissa_bits: int = 13
    promote: int | None = None
    align: str = "toward_zero"
    deliver: str = "toward_zero"
    product_exponent: str = "sum"

    def __post_init__(self) -> None:
        for name, low, high in (("k_step", 1, 1 << 12), ("frac_bits", 1, 35), ("mantissa_bits", 1, 23)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} of a tensor core is an integer from {low} to {high}; got {value!r}")
        if self.promote is not None and (not isinstance(self.promote, int) or self.promote < 1):
            raise ValueError(f"promote is None or a number of K elements, at least 1; got {self.promote!r}")
        choice(self.align, ROUNDINGS, "align")
        choice(self.deliver, ROUNDINGS, "deliver")
        choice(self.product_exponent, EXPONENTS, "product_exponent")


HOPPER_FP8 = TensorCore()
#: torch._scaled_mm with use_fast_accum=False.
HOPPER_FP8_PROMOTED = replace(HOPPER_FP8, promote=128)
#: bfloat16 and float16 inputs.
HOPPER_16BIT = TensorCore(k_step=16, frac_bits=25, mantissa_bits=23)


def tensor_core_matmul(
    a: F64, b: F64, *, core: TensorCore = HOPPER_FP8, emin: tuple[int, int] = (-6, -6)
) -> F64:
    """a @ b as the tensor core of this module computes it: NumPy float64 holding float32 values.

    a (..., M, K) and b (..., K, N) are float64 arrays whose values are those of 8-bit or 16-bit floats; batches broadcast.
    `emin` is the smallest normal exponent of each operand's format: -6 for e4m3fn, -14 for e5m2 and float16, -126 for
    bfloat16. K = 0 gives +0. Rows are processed in slabs, so memory stays bounded.
    """
    special = special_values(a, b)
    if special is not None:
        a, b = np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0)
    rows = max(1, SLAB // max(1, b.shape[-1] * core.k_step))
    slabs = [_chains(a[..., i : i + rows, :], b, core, emin) for i in range(0, max(a.shape[-2], 1), rows)]
    sums = np.concatenate(slabs, axis=-2)
    return sums if special is None else np.where(special == 0, sums, special)


def _chains(a: F64, b: F64, core: TensorCore, emin: tuple[int, int]) -> F64:
    """The accumulation along K: one chain, or promoted parts added in float32."""
    total: F64 = np.matmul(a[..., :0], b[..., :0, :])
    if core.promote is None:
        return _chain(a, b, total, core, emin)
    for part in parts_of(a.shape[-1], core.promote):
        partial = _chain(a[..., part], b[..., part, :], np.zeros_like(total), core, emin)
        total = add_float32(total, partial)
    return total


def parts_of(k: int, size: int) -> Iterator[slice]:
    """Slices of `size` covering 0 .. k; the last may be shorter."""
    return (slice(start, min(start + size, k)) for start in range(0, k, size))


def add_float32(a: F64, b: F64) -> F64:
    """Float32 addition, rounded to nearest even, of float64 arrays that hold float32 values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(a.astype(np.float32) + b.astype(np.float32)).astype(np.float64)


def multiply_float32(a: F64, b: F64) -> F64:
    """Float32 multiplication, rounded to nearest even, of float64 arrays that hold float32 values."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(a.astype(np.float32) * b.astype(np.float32)).astype(np.float64)


def _chain(a: F64, b: F64, start: F64, core: TensorCore, emin: tuple[int, int]) -> F64:
    accumulator = start
    rows, columns = a[..., :, None, :], b.swapaxes(-1, -2)[..., None, :, :]
    for part in parts_of(a.shape[-1], core.k_step):
        accumulator = _step(rows[..., part], columns[..., part], accumulator, core, emin)
    return accumulator


def _step(a: F64, b: F64, c: F64, core: TensorCore, emin: tuple[int, int]) -> F64:
    """One step: a (..., M, 1, k), b (..., 1, N, k), accumulator c (..., M, N)."""
    products = a * b
    normalized = core.product_exponent == "normalized"
    # Powers of two multiply exactly, and a zero operand takes its product out of the maximum.
    powers = power_of(products, -1022) if normalized else power_of(a, emin[0]) * power_of(b, emin[1])
    floor = np.maximum(power_of(c, ACCUMULATOR_EMIN), 2.0**ACCUMULATOR_EMIN)
    unit = np.maximum(powers.max(axis=-1), floor) * 2.0**-core.frac_bits
    total = _round(products / unit[..., None], core.align).sum(axis=-1) + _round(c / unit, core.align)
    return _delivered(total * unit, core)


def power_of(x: F64, emin: int) -> F64:
    """2**max(floor(log2 |x|), emin) elementwise, 0 where x is 0."""
    _, exponent = np.frexp(x)
    return np.where(x == 0, 0.0, np.ldexp(1.0, np.maximum(exponent - 1, emin)))


def _delivered(x: F64, core: TensorCore) -> F64:
    quantum = power_of(x, ACCUMULATOR_EMIN) * 2.0**-core.mantissa_bits
    result = _round(x / np.where(quantum == 0, 1.0, quantum), core.deliver) * quantum
    return np.where(np.abs(result) >= 2.0**128, np.copysign(np.inf, result), result)


def _round(x: F64, how: str) -> F64:
    if how == "toward_zero":
        return np.trunc(x)
    return np.floor(x) if how == "down" else np.rint(x)
