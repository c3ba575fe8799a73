"""float32 values and their bit patterns inside kernels; the counterpart of `reference.arrays.softfloat` and
`reference.arrays.softfloat`.

On a GPU float32 addition, multiplication and `div_rn` are IEEE and keep subnormals, so most rules work on floats. Kernels are
compiled without contraction of a * b + c. A NaN that arithmetic makes has another pattern than the reference's: `canonical`
brings every NaN that leaves a kernel to 0x7fc00000.
"""

import triton
import triton.language as tl

SIGN = tl.constexpr(-0x80000000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(0x7F7FFFFF)
MANTISSA = tl.constexpr(0x007FFFFF)
HIDDEN = tl.constexpr(0x00800000)
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def bits_of(v):
    """int32 pattern of float32."""
    return v.to(tl.int32, bitcast=True)


@triton.jit
def float_of(b):
    """float32 of an int32 pattern."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def read(pointers, inside):
    """Load, with 0 where an element does not exist; inside is None where all do."""
    if inside is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def read_once(pointers, inside, EVICT: tl.constexpr):
    """`read` by an eviction_policy of `tl.load`. No argument of a kernel has a string for a default: Triton 3.6 takes none."""
    if inside is None:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=inside, other=0, eviction_policy=EVICT)


@triton.jit
def widened(v, SIGNS_NAN: tl.constexpr = False):
    """float32 of 16-bit floats, exact, subnormals kept. SIGNS_NAN: a NaN of float16 keeps its sign."""
    if v.dtype == tl.bfloat16:
        return float_of(v.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif v.dtype == tl.float16 and SIGNS_NAN:
        sign = (v.to(tl.int16, bitcast=True).to(tl.int32) << 16) & SIGN
        return float_of((bits_of(v.to(tl.float32)) & MAGNITUDE) | sign)
    else:
        return v.to(tl.float32)


@triton.jit
def low_float(w, IS_BF16: tl.constexpr):
    """float32 of the 16-bit floats in the low halves of words, exact; IS_BF16: bfloat16, otherwise float16."""
    if IS_BF16:
        return float_of(w << 16)
    else:
        return w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_float(w, IS_BF16: tl.constexpr):
    """The same of the high halves."""
    if IS_BF16:
        return float_of(w & -65536)
    else:
        return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def is_nan(v):
    """Whether a float32 is NaN, on its pattern, where no compiler may reason about NaN."""
    return (bits_of(v) & MAGNITUDE) > INFINITY


@triton.jit
def canonical(v):
    """Every NaN as the quiet one without payload."""
    b = bits_of(v)
    return float_of(tl.where((b & MAGNITUDE) > INFINITY, NAN, b))


@triton.jit
def order_key(b):
    """An int32 that orders float32 patterns as floats (-0 below +0); its own inverse."""
    return tl.where(b < 0, b ^ MAGNITUDE, b)


@triton.jit
def normalized(b):
    """(exponent, 24-bit significand) of non-negative patterns, subnormals normalised; for 0 a very small exponent."""
    counted = bits_of(b.to(tl.float32)) - (149 << 23)
    wide = tl.where(b < HIDDEN, counted, b)
    return (wide >> 23) - 127, (wide & MANTISSA) | HIDDEN


@triton.jit
def rounded(v, DTYPE: tl.constexpr):
    """float32 rounded to nearest even in a dtype, as float32."""
    if DTYPE == "bfloat16":
        b = bits_of(v)
        up = float_of((b + 0x7FFF + ((b >> 16) & 1)) & -65536)
        v = tl.where((b & MAGNITUDE) > INFINITY, v, up)
    elif DTYPE == "float16":
        # The selection keeps the compiler from computing products in float16, where it loses the sign of zeros.
        v = tl.where((bits_of(v) & MAGNITUDE) > INFINITY, v, v.to(tl.float16).to(tl.float32))
    return v


@triton.jit
def narrow(v, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """float32 as the output dtype, NaN canonical; SATURATE: finite values stay finite."""
    if DTYPE == "float32":
        return canonical(v)
    elif DTYPE == "bfloat16":
        out = _stopped(v, 0x7F7F0000, SATURATE).to(tl.bfloat16).to(tl.int16, bitcast=True)
        return tl.where(is_nan(v), tl.full((), 0x7FC0, tl.int16), out).to(tl.bfloat16, bitcast=True)
    else:
        out = _stopped(v, 0x477FE000, SATURATE).to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(is_nan(v), tl.full((), 0x7E00, tl.int16), out).to(tl.float16, bitcast=True)


@triton.jit
def _stopped(v, TOP: tl.constexpr, SATURATE: tl.constexpr):
    """Finite values beyond the pattern TOP brought back to it."""
    if SATURATE:
        b = bits_of(v)
        over = ((b & MAGNITUDE) > TOP) & ((b & MAGNITUDE) < INFINITY)
        v = tl.where(over, float_of((b & SIGN) | TOP), v)
    return v
