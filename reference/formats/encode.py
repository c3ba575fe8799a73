"""`encode` and `decode`: values to codes and back, for every format and rounding mode.

Codes are computed on bit patterns, by one rule of rounding. Edge cases:

* NaN: the format's NaN (`Format.nan_code`, sign and payload dropped); 0 where the format has none.
* Beyond the largest finite value: ``saturate`` gives that value, infinities included (as Hopper's satfinite casts);
  ``nonfinite`` gives the format's infinity, or its NaN where it has no infinity (``inf`` and ``nan`` name one of them).
  Rounding comes first: 464 is a tie for e4m3fn and becomes 448 in nearest_even, NaN in nearest_away. As in IEEE 754 section
  7.4, finite values in toward_zero, to_odd, and in up and down on their inner side, stop at the largest finite value.
* -0: stays -0 where the format has it, else 0. Negative values in unsigned integers: 0. Integers have only ``saturate``.
* float8_e8m0fnu has no zero and no sign: positive values below 2**-127 become 2**-127, so does 0 in ``saturate``; 0 is NaN
  in ``nonfinite``, negative values always. It has one significand bit, always 1, so a tie in nearest_even goes up, as in
  ml_dtypes and torch.
* Codebooks take the nearest value, ties to the lower index, and no other rounding mode.

NumPy inputs go through a table of 65,536 codes where the format has at most 6 significant bits: a float32 rounded to odd to
bfloat16 (its upper half, last bit set if the lower half is not zero) decides every rounding to so few bits, as two more bits
and stickiness are enough (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008). The rule fills the table, so there is one
definition. Work runs in chunks whose temporaries stay in cache, on a few threads (NumPy releases the interpreter lock).

**The float rule** (`encode_bits`: float32 bit patterns to codes, in int32 arithmetic). A float32 is significand * 2**(e - 23)
with a 24-bit significand (a subnormal one keeps its leading zeros and e = -126). In the target, values of exponent e are
multiples of 2**(max(e, emin) - mantissa_bits), so the last 23 - mantissa_bits + max(emin - e, 0) bits are rounded away.
Adding max(e - emin, 0) << mantissa_bits to the result gives the code: the hidden bit carries into the exponent field, in
subnormals as in a rounding that reaches the next power of two.

**The one rule of rounding** (`round_shift`): an integer significand loses its low `shift` bits. Every encoder and every scale
comes down to this function, so a mode means the same everywhere. With t = significand / 2**shift, exactly:

=============  ======================================================================================
nearest_even   nearest integer to t, ties to even
nearest_away   nearest integer to t, ties away from zero
toward_zero    t truncated
up, down       toward plus, minus infinity: the magnitude rounds up where the sign agrees
to_odd         t truncated, last bit set if anything was lost
stochastic     floor(t + r), r = the top `shift` bits of the element's random word as a fraction
=============  ======================================================================================

Stochastic rounding uses at most 24 random bits, in the carry form of LLVM's cvt.rs (gfloat calls it StochasticFastest). A
value so small that more than 24 bits are lost is truncated to 24 first, so its probability of rounding up is exact to 2**-24.

Random bits come from Philox 4x32-10 by counter, as Triton draws them. Word i of stream s under a seed is output i mod 4 of
philox(seed, counter = (low 32 bits of i // 4, high 32 bits, s, 0)), so any element's word can be computed anywhere, in any
order: on a GPU the same bits come from `tl.philox`, whose four results go to four neighbouring elements. Row and column
copies of a tensor use different streams, so that their errors are independent.

**`Arithmetic`** is float32's, or every result is rounded again to a 16-bit dtype. Rounding a float32 result to bfloat16 or
float16 is what PyTorch's CPU kernels do. For one operation on 16-bit operands it equals the directly rounded result, because
24 >= 2 * 11 + 2 (Figueroa, SIGNUM Newsletter 30(3), 1995).

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox4x32 with 10 rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.bridges import bridged
from reference.arrays.namespace import (
    Array,
    Namespace,
    choice,
    code_input,
    codes_of,
    float_input,
    int32_of,
    namespace_of,
)
from reference.arrays.softfloat import (
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    NAN,
    SIGN,
    add,
    bits_of,
    divide,
    float32_bits,
    is_nan,
    multiply,
    normalized,
    order_key,
    subtract,
    widen_float16,
)
from reference.formats.formats import FORMATS, Format, format_of

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
# What a value rounded beyond the largest finite one becomes; see `reference.formats.encode`.
OVERFLOWS = ("saturate", "nonfinite", "inf", "nan")
STOCHASTIC_BITS = 24
# From here on a 24-bit significand rounds to 0, or to 1 in the modes that look at the lost bits.
LARGEST_SHIFT = 25


def check_mode(mode: str, random_bits: Array | None) -> str:
    """The mode's name if it exists and comes with random bits exactly when it needs them."""
    choice(mode, MODES, "rounding")
    if (mode == "stochastic") != (random_bits is not None):
        need = "needs random_bits, one uint32 per element" if mode == "stochastic" else "takes no random_bits"
        raise ValueError(
            f"rounding {mode!r} {need}; `from reference import random_bits`, random_bits(x.shape, seed=0)"
        )
    return mode


def round_shift(
    ns: Namespace,
    significand: Array,
    shift: Array,
    negative: Array,
    mode: str,
    random_bits: Array | None = None,
) -> Array:
    """Integer nearest to significand / 2**shift in the given mode; 0 <= significand < 2**24, shift >= 1, int32."""
    if mode == "stochastic":
        return _stochastic(significand, shift, random_bits, ns)
    shift = ns.minimum(shift, LARGEST_SHIFT)
    floor = significand >> shift
    if mode == "nearest_even":
        return (significand + ((1 << (shift - 1)) - 1) + (floor & 1)) >> shift
    if mode == "nearest_away":
        return (significand + (1 << (shift - 1))) >> shift
    if mode == "toward_zero":
        return floor
    inexact = ns.astype((floor << shift) != significand, "int32")
    if mode == "to_odd":
        return floor | inexact
    grows = negative if mode == "down" else ~negative
    return floor + (inexact & ns.astype(grows, "int32"))


def _stochastic(significand: Array, shift: Array, random_bits: Array | None, ns: Namespace) -> Array:
    excess = ns.minimum(ns.maximum(shift - STOCHASTIC_BITS, 0), 31)
    shift = ns.minimum(shift, STOCHASTIC_BITS)
    # The word's top 24 bits as a non-negative int32, of which the top `shift` are used.
    word = (ns.bitcast(random_bits, "int32") >> 8) & 0xFFFFFF
    return ((significand >> excess) + (word >> (STOCHASTIC_BITS - shift))) >> shift


MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF
U64 = npt.NDArray[np.uint64]


def philox(seed: int, counter: tuple[U64, U64, U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words (in uint64) per counter of four 32-bit words (in uint64), under a 64-bit seed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, seed >> 32 & MASK
    low = np.uint64(MASK)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIER[0]), c2 * np.uint64(MULTIPLIER[1])
        c0 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def random_bits(shape: int | tuple[int, ...], *, seed: int, stream: int = 0) -> npt.NDArray[np.uint32]:
    """uint32 words of the given shape, in C order.

    seed: 0 to 2**64 - 1; stream: 0 to 2**32 - 1. For torch use `torch.from_numpy`, for JAX
    `jax.numpy.asarray`. Raises ValueError for numbers outside these ranges.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for name, value, bits in (("seed", seed, 64), ("stream", stream, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is an integer from 0 to 2**{bits} - 1, got {value!r}")
    count = prod(shape)
    index = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox(seed, (index & np.uint64(MASK), index >> np.uint64(32), zero + np.uint64(stream), zero))
    return np.stack(words, axis=-1).reshape(-1)[:count].astype(np.uint32).reshape(shape)


# Larger integers saturate every integer format, with any zero point: their shift below stays positive.
LARGEST_INTEGER_EXPONENT = 14
# What the internal overflow policy "mark" puts in place of a saturated code (`fake_quantize_vjp` needs to know them).
MARK = 1 << 20


def encode_bits(
    ns: Namespace, bits: Array, fmt: Format, rounding: str, overflow: str, random_bits: Array | None = None
) -> Array:
    """int32 codes of float32 bit patterns (int32, any shape) in a format of any kind.

    rounding: a mode of `reference.formats.encode`; overflow: one of its policies, or "mark", which writes `MARK` in place of
    a saturated code. random_bits: uint32 or int32 of the shape of `bits`, for stochastic rounding. Arguments are not checked.
    """
    if fmt.kind == "float" and rounding == "nearest_even":
        return nearest_even_codes(ns, bits, bits & MAGNITUDE, fmt, overflow)
    if fmt.kind == "float":
        magnitude = bits & MAGNITUDE
        exponent = ns.maximum(magnitude >> 23, 1) - 127
        significand = (magnitude & MANTISSA) | ns.where(magnitude < 0x800000, 0, 0x800000)
        return encode_parts(ns, bits, exponent, significand, fmt, rounding, overflow, random_bits)
    if fmt.kind == "int":
        integer = round_to_integer(ns, bits, fmt.fraction_bits, rounding, random_bits)
        return ns.where(is_nan(bits), fmt.nan_code or 0, clamp_integer(ns, integer, fmt))
    if fmt.kind == "scale":
        return _encode_scale(ns, bits, fmt, rounding, overflow, random_bits)
    return _encode_codebook(ns, bits, fmt, rounding)


def encode_parts(
    ns: Namespace,
    bits: Array,
    exponent: Array,
    significand: Array,
    fmt: Format,
    rounding: str,
    overflow: str,
    random_bits: Array | None = None,
) -> Array:
    """Codes of +-significand * 2**(exponent - 23) in a float format; `bits` gives sign, infinity and NaN."""
    negative = bits < 0
    below = ns.maximum(fmt.emin - exponent, 0)
    rounded = round_shift(ns, significand, below + (23 - fmt.mantissa_bits), negative, rounding, random_bits)
    code = rounded + (ns.maximum(exponent - fmt.emin, 0) << fmt.mantissa_bits)
    return _finish(ns, code, bits, fmt, rounding, overflow)


def nearest_even_codes(ns: Namespace, bits: Array, magnitude: Array, fmt: Format, overflow: str) -> Array:
    """Codes in a float format, nearest_even, in fewer steps than `encode_parts`.

    `magnitude` is a float32 pattern; below 2**-126 it is zero or a subnormal of bfloat16. Normal results: half a unit in the
    last place less one, plus the last bit that remains, is added to the pattern and carries. Subnormal results: adding a
    constant whose unit in the last place is the format's smallest value rounds to nearest even in every library. XLA flushes
    an operand only where it is too small to change the sum.
    """
    drop = 23 - fmt.mantissa_bits
    carried = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    code = carried - ((fmt.emin + 126) << fmt.mantissa_bits)
    if fmt.emin > -126:
        # Where float32 has no such constant, both are smaller by a power of two, which rounds what comes to 0 alone.
        exponent = fmt.emin - fmt.mantissa_bits + 23
        less = max(exponent - 127, 0)
        constant = (exponent - less + 127) << 23
        unit = ns.bitcast(ns.full((1,) * magnitude.ndim, constant, "int32", magnitude), "float32")
        with np.errstate(all="ignore"):
            value = ns.bitcast(magnitude, "float32")
            small = ns.bitcast((value * 2.0**-less if less else value) + unit, "int32") - constant
        code = ns.where(magnitude < (fmt.emin + 127) << 23, small, code)
    return _finish(ns, code, bits, fmt, "nearest_even", overflow)


def _finish(ns: Namespace, code: Array, bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """Limit, sign and NaN of a magnitude's code."""
    code = _limit(ns, code, bits, fmt, rounding, overflow)
    if fmt.sign_mask and fmt.has_negative_zero:
        code = code | (bits >> (32 - fmt.bits) & fmt.sign_mask)
    elif fmt.sign_mask:
        code = ns.where((bits < 0) & (code != 0), code | fmt.sign_mask, code)
    # NaN last: no other step may touch it.
    return ns.where(is_nan(bits), fmt.nan_code or 0, code)


def _limit(ns: Namespace, code: Array, bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """Clamp at the largest finite code, or go beyond it as the overflow policy and the direction of rounding say."""
    if overflow == "saturate":
        return ns.minimum(code, fmt.max_code)
    if overflow == "mark":
        return ns.where(code > fmt.max_code, MARK, code)
    beyond = _overflow_code(fmt, overflow)
    over = code > fmt.max_code
    inward = {"toward_zero": bits == bits, "to_odd": bits == bits, "up": bits < 0, "down": bits >= 0}.get(
        rounding
    )
    if inward is not None:
        finite = (bits & MAGNITUDE) < INFINITY
        code = ns.where(over & inward & finite, fmt.max_code, code)
        over = over & ~(inward & finite)
    return ns.where(over, beyond, code)


def _overflow_code(fmt: Format, overflow: str) -> int:
    code = fmt.infinity_code if overflow in ("inf", "nonfinite") else fmt.nan_code
    return code if code is not None else fmt.nan_code or 0


def round_to_integer(
    ns: Namespace, bits: Array, fraction_bits: Any, rounding: str, random_bits: Array | None = None
) -> Array:
    """Signed int32 nearest to x * 2**fraction_bits; beyond +-2**14 (and for NaN) any such integer."""
    magnitude = bits & MAGNITUDE
    exponent = ns.maximum(magnitude >> 23, 1) - 127 + fraction_bits
    significand = (magnitude & MANTISSA) | ns.where(magnitude < 0x800000, 0, 0x800000)
    shift = 23 - ns.minimum(exponent, LARGEST_INTEGER_EXPONENT)
    rounded = round_shift(ns, significand, shift, bits < 0, rounding, random_bits)
    return ns.where(bits < 0, -rounded, rounded)


def clamp_integer(ns: Namespace, integer: Array, fmt: Format, overflow: str = "saturate") -> Array:
    """int32 saturated to the format's range and masked to its bits."""
    low, high = fmt.integer_range
    if overflow == "mark":
        return ns.where((integer < low) | (integer > high), MARK, 0)
    return ns.minimum(ns.maximum(integer, low), high) & ((1 << fmt.bits) - 1)


def _encode_scale(
    ns: Namespace, bits: Array, fmt: Format, rounding: str, overflow: str, random_bits: Array | None
) -> Array:
    exponent, significand = normalized(ns, bits & MAGNITUDE)
    # One significand bit: the fraction decides between 2**exponent and the next power of two. Zero counts as tiny.
    rounded = round_shift(
        ns, significand, 23 + ns.where(significand == 0, 1, 0), bits < 0, rounding, random_bits
    )
    code = exponent + fmt.bias + rounded - 1
    code = ns.where((bits & MAGNITUDE) == INFINITY, fmt.max_code + 1, code)
    # Nothing lies below 2**-bias, so that is the nearest code of every smaller positive value.
    code = _limit(ns, ns.maximum(code, 0), bits, fmt, rounding, overflow)
    if overflow != "saturate":
        code = ns.where((bits & MAGNITUDE) == 0, fmt.nan_code or 0, code)
    return ns.where(is_nan(bits) | ((bits < 0) & (bits != SIGN)), fmt.nan_code or 0, code)


def _encode_codebook(ns: Namespace, bits: Array, fmt: Format, rounding: str) -> Array:
    floor = midpoint_floors(fmt, rounding).view(np.int32)
    thresholds = [int(b) if b >= 0 else int(b ^ MAGNITUDE) for b in floor]
    return ns.where(is_nan(bits), _zero_code(fmt), _count_above(ns, order_key(ns, bits), thresholds))


def midpoint_floors(fmt: Format, rounding: str = "nearest_even") -> npt.NDArray[np.float32]:
    """The largest float32 up to each midpoint of a codebook's values. A midpoint of two float32 values has 25 bits: x is above
    it iff x is above its truncation toward minus infinity.
    """
    middle = _midpoints(fmt, rounding)
    floor = middle.astype(np.float32)
    return np.asarray(np.where(floor > middle, np.nextafter(floor, np.float32(-np.inf)), floor), np.float32)


def encode_codebook_float64(ns: Namespace, x: Array, fmt: Format, rounding: str) -> Array:
    """float64 meets the midpoints themselves: rounded to odd in float32 (24 bits), it could cross one of 25 bits."""
    code = _count_above(ns, x, [float(value) for value in _midpoints(fmt, rounding)])
    return ns.where(x == x, code, _zero_code(fmt))


def _midpoints(fmt: Format, rounding: str) -> Array:
    """float64 midpoints of the format's float32 values, exact."""
    choice(rounding, ("nearest_even",), f"rounding of codebook {fmt.name}")
    values = fmt.values.astype(np.float64)
    return (values[1:] + values[:-1]) / 2


def _count_above(ns: Namespace, x: Array, thresholds: list[Any]) -> Array:
    code = ns.astype(x > thresholds[0], "int32")
    for threshold in thresholds[1:]:
        code = code + ns.astype(x > threshold, "int32")
    return code


def _zero_code(fmt: Format) -> int:
    return int(np.argmin(np.abs(np.asarray(fmt.table))))


@bridged
def encode(
    x: Any,
    fmt: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    random_bits: Any = None,
) -> Array:
    """Encode x in a format: one code per element, the unsigned integer that stores its quantized value.

    x: float32, bfloat16, float16 or float64, any shape, NumPy, JAX or torch (float64 is rounded once, correctly).
    fmt: a name of `FORMATS` or a record. rounding: nearest_even, nearest_away, toward_zero, up, down, to_odd or stochastic,
    with random_bits, uint32 of x's shape. overflow, of what is beyond the largest finite value: "saturate" (that value),
    "nonfinite" (the format's infinity, or its NaN), "inf" or "nan".
    Returns uint8 (uint16 for 16-bit formats) of x's shape in the same library, the code in the low bits.
    Raises TypeError for integer or complex x, ValueError for an unknown name or an overflow that the format cannot express.
    """
    fmt = format_of(fmt)
    ns, x, name = float_input(x, "encode")
    check_mode(rounding, random_bits)
    check_overflow(fmt, rounding, overflow)
    random_bits = check_random_bits(ns, x, random_bits)
    if ns.name == "numpy" and rounding != "stochastic" and fits_table(fmt):
        return _encode_by_table(x, name, fmt, rounding, overflow)
    if fmt.kind == "codebook" and name == "float64":
        return codes_of(ns, encode_codebook_float64(ns, x, fmt, rounding), fmt.bits)
    bits = float32_bits(ns, x, name, to_odd=True)
    return codes_of(ns, encode_bits(ns, bits, fmt, rounding, overflow, random_bits), fmt.bits)


@bridged
def decode(codes: Any, fmt: str | Format) -> Array:
    """The exact float32 value of every code; shape and library of `codes` (uint8 or uint16), bits above the format's ignored.

    Raises TypeError for codes of another dtype, ValueError for an unknown name.
    """
    fmt = format_of(fmt)
    ns, codes = code_input(codes, "decode")
    index = int32_of(ns, codes) & ((1 << fmt.bits) - 1)
    # Tables hold bit patterns, so that no library can flush a subnormal on the way.
    table = ns.constant(fmt.values.view(np.int32), index)
    return ns.bitcast(ns.take(table, index), "float32")


def _encode_by_table(x: Array, name: str, fmt: Format, rounding: str, overflow: str) -> Array:
    ns = namespace_of(x)
    bits = (
        ns.bitcast(x, "uint16")
        if name == "bfloat16"
        else ns.bitcast(float32_bits(ns, x, name, to_odd=True), "uint32")
    )
    return encode_flat(bits.reshape(-1), fmt, rounding, overflow).reshape(x.shape)


def check_overflow(fmt: Format, rounding: str, overflow: str) -> None:
    """ValueError for an overflow policy that does not exist, or that needs a code the format does not have."""
    choice(overflow, OVERFLOWS, "overflow")
    code = {"inf": fmt.infinity_code, "nan": fmt.nan_code, "nonfinite": fmt.nan_code, "saturate": 0}[overflow]
    if code is None or (fmt.kind == "int" and overflow != "saturate"):
        raise ValueError(
            f"overflow {overflow!r} needs a code that {fmt.name} does not have; use overflow='saturate'"
        )


def check_random_bits(ns: Namespace, x: Array, random_bits: Any) -> Array | None:
    """`random_bits` unchanged, or None; ValueError unless they are uint32 of x's shape in x's library."""
    if random_bits is None:
        return None
    array = hasattr(random_bits, "dtype") and namespace_of(random_bits) is ns
    given = ns.dtype_name(random_bits) if array else type(random_bits).__name__
    if given != "uint32" or ns.shape(random_bits) != ns.shape(x):
        raise ValueError(
            f"random_bits is one uint32 per element of x in the same library, shape {ns.shape(x)}; "
            f"got {given} {tuple(getattr(random_bits, 'shape', ()))}"
        )
    return random_bits


# Elements whose temporaries stay in a core's second cache: with shorter chunks two threads wait for the interpreter lock more
# than they work (2^15: 132 ms, 2^18: 57 ms for MXFP8 of 16.8M floats). And what makes a thread worth starting.
CHUNK = 1 << 18
SLAB = 1 << 20


def fits_table(fmt: Format) -> bool:
    """Whether 8 significant bits, the last one sticky, decide every rounding: at most 6 bits in the format; and codes are
    bytes.
    """
    bits = {"float": fmt.mantissa_bits + 1, "int": fmt.bits - fmt.signed, "scale": 1, "codebook": 8}[fmt.kind]
    return bits <= 6 and fmt.bits <= 8


def odd_halves(bits: Array) -> Array:
    """uint32 patterns as uint16, rounded to odd."""
    lost = bits & np.uint32(0xFFFF)
    lost += np.uint32(0xFFFF)
    lost |= bits
    lost >>= np.uint32(16)
    return lost.astype(np.uint16)


def encode_flat(bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """uint8 codes of flat contiguous patterns: uint32 of float32, or uint16 of bfloat16."""
    table = encode_table(fmt, rounding, overflow)
    codes = np.empty(bits.shape, np.uint8)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, CHUNK):
            part = bits[begin : min(begin + CHUNK, stop)]
            index = part if part.dtype == np.uint16 else odd_halves(part)
            np.take(table, index, out=codes[begin : begin + len(part)], mode="clip")

    run_in_slabs(run, bits.size, SLAB)
    return codes


@lru_cache(maxsize=256)
def encode_table(fmt: Format, rounding: str, overflow: str) -> Any:
    """uint8 code of every 16-bit pattern, where an odd one stands for everything strictly between its neighbours."""
    patterns = np.arange(1 << 16, dtype=np.uint32)
    bits = ((patterns << 16) | (patterns & 1)).view(np.int32)
    return encode_bits(namespace_of(bits), bits, fmt, rounding, overflow).astype(np.uint8)


def run_in_slabs(run: Callable[[int, int], None], total: int, slab: int) -> None:
    """run(start, stop) over range(total), on a thread per core when there is more than one slab."""
    workers = min(os.cpu_count() or 1, -(-total // slab))
    if workers <= 1:
        run(0, total)
        return
    edges = [total * part // workers for part in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))


# Float arithmetic in a stated precision.


class Arithmetic:
    """Operations on float32 bit patterns (int32), each rounded to `dtype`."""

    def __init__(self, ns: Namespace, dtype: str) -> None:
        self.ns = ns
        self.dtype = "float32" if dtype == "float64" else dtype

    def round(self, bits: Array) -> Array:
        """Nearest even in the dtype; overflow gives infinity, NaN stays."""
        if self.dtype == "float32":
            return bits
        narrow = encode_bits(self.ns, bits, FORMATS[self.dtype], "nearest_even", "nonfinite")
        wide = narrow << 16 if self.dtype == "bfloat16" else widen_float16(self.ns, narrow)
        return self.ns.where(is_nan(bits), NAN, wide)

    def constant(self, value: float, like: Array) -> Array:
        """A Python number, rounded to the dtype as an operand; shape (1,)."""
        return self.round(self.ns.full((1,), bits_of(value), "int32", like))

    def multiply(self, a: Array, b: Array) -> Array:
        return self.round(multiply(self.ns, a, b))

    def divide(self, a: Array, b: Array) -> Array:
        return self.round(divide(self.ns, a, b))

    def add(self, a: Array, b: Array) -> Array:
        return self.round(add(self.ns, a, b))

    def subtract(self, a: Array, b: Array) -> Array:
        return self.round(subtract(self.ns, a, b))

    def reciprocal(self, a: Array) -> Array:
        return self.divide(self.constant(1.0, a), a)

    def round_integer(self, bits: Array) -> Array:
        """Nearest int32, ties to even; magnitudes beyond 2**14 are some integer beyond it."""
        return round_to_integer(self.ns, bits, 0, "nearest_even")


def to_dtype_bits(ns: Namespace, bits: Array, name: str, *, saturate: bool = False) -> Array:
    """float32 bit patterns rounded to nearest even into an array of dtype `name`: `float32_bits` the other way.

    A finite value beyond the target's range becomes infinity, or its largest finite value with `saturate`.
    """
    if name == "float32":
        return ns.bitcast(bits, "float32")
    if name == "float64":
        if ns.name == "jax" and not ns.jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(
                "JAX has no float64 unless jax_enable_x64 is set; ask for float32, which holds every value"
            )
        return ns.astype(ns.bitcast(bits, "float32"), "float64")
    fmt = FORMATS[name]
    wide = encode_bits(ns, bits, fmt, "nearest_even", "saturate" if saturate else "nonfinite")
    if saturate:
        # An infinity was infinite before this cast: it stays.
        infinite = ((bits >> 16) & 0x8000) | (fmt.infinity_code or 0)
        wide = ns.where((bits & MAGNITUDE) == INFINITY, infinite, wide)
    return ns.bitcast(codes_of(ns, wide, 16), name)


__all__ = [
    "MARK",
    "check_overflow",
    "check_random_bits",
    "clamp_integer",
    "decode",
    "encode",
    "encode_bits",
    "encode_parts",
    "midpoint_floors",
    "nearest_even_codes",
    "round_to_integer",
]
