"""Which instruction sequences serve a scheme: questions about its record, each of which has one answer for all its kernels.

A sequence is right for some records only: each function says for which, and why. `constants` writes the answers into the
constants.

Records of other projects need no rule for NaN, infinity, overflow or underflow on ordinary blocks. A block is ordinary if its
largest magnitude lies between 2**-64 and 2**64 (`bounds` says it for each record), or if it is zero where the record has a
scale for that. A kernel looks at the largest magnitudes of its tile. If all are ordinary, the sequences of `sm90` make the
codes; otherwise the general rules do, in the same launch. So a precondition of a sequence that fails on rare blocks alone
keeps no record from it.

`on_ordinary_blocks` gives the record that equals another one there. What it drops, and why:

* `nan`, `nan_code`: every element is finite, and every scale.
* `smallest_exponent`: scales lie above 2**-127.
* `rceil_log2` of 16-bit inputs is `rceil`: see `log2_is_exact`.
* `dequantize="ieee"`: no value overflows, but in float16.

What it keeps, and how the sequences round alike:

* Scales in the input's dtype (`compute="input"`): the float32 quotient is rounded once more, as the general rules do.
* `apply="divide"`: see `quotient_sequence`.
* `arithmetic="input"`: what a product or quotient gives is rounded to the dtype before it is rounded to a code; the thresholds
  of codebooks are those of numbers before that (`difference_thresholds`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import frexp

import numpy as np

from fast.kernels.sm90.codebooks import has_cubic, is_stretched
from reference.arrays.softfloat import steps_above
from reference.formats.formats import FORMATS, Format
from reference.schemes.schemes import Scale, Scheme

# What kernels call the OCP formats: records with the same fields are the same format, whatever their names.
OCP = {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float6_e2m3fn": "e2m3",
    "float6_e3m2fn": "e3m2",
    "float4_e2m1fn": "e2m1",
}
# Formats whose nearest-even, saturating cast is one instruction on sm_89 and later.
HARDWARE = ("e4m3", "e5m2")
# And those of which a few instructions make four codes at a time, for tiles with four elements of a row in a thread.
SEQUENCES = (*HARDWARE, "e2m1")

# Targets for which one corrected product is the rounded quotient; tests/gpu/kernels/schemes.py checks every
# significand. A power of two times one of them has the same significands.
QUOTIENTS = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0, 448.0, 57344.0, 6.0, 6.0 * 448.0)


def has_quotient(target: float) -> bool:
    """Whether `quotient` divides by the target exactly: 127.5 is 255 / 2, and its quotients are twice those of 255."""
    return frexp(target)[0] in {frexp(known)[0] for known in QUOTIENTS}


@lru_cache(maxsize=256)
def ocp_name(fmt: Format) -> str:
    """What `OCP` calls the format with these fields; "" for another one."""
    same = (short for name, short in OCP.items() if replace(fmt, name=name) == FORMATS[name])
    return next(same, "")


def storage_kind(storage: str) -> str:
    """What kernels tell apart among storages: "float32", a name of `OCP`, or "" for other codes."""
    return storage if storage == "float32" else ocp_name(FORMATS[storage])


def fast_path_of(scheme: Scheme, nearest: bool) -> str:
    """Which sequence of `fast_codes` makes the codes of a default scheme whose scales come from the tile; "" for none."""
    fmt = scheme.format
    if not nearest or scheme.nan != "block" or scheme.nan_code is not None or scheme.apply != "reciprocal":
        return ""
    if scheme.smallest_exponent is not None or not scheme.negative_zero or scheme.arithmetic != "float32":
        return ""
    if not _has_reciprocals(scheme):
        return ""
    if fmt.kind == "int" and fmt.signed and fmt.nan_code is None:
        return (
            ""
            if scheme.outer is not None or (scheme.zero is not None and scheme.zero.rule == "value")
            else "int"
        )
    if fmt.kind == "codebook":
        return _codebook_sequence(scheme)
    if scheme.outer is not None and not is_under_outer(scheme):
        return ""
    if fmt.bits == 6 and scheme.scale.target > fmt.max:
        # Far beyond the largest code the conversions of 8 bits, which stand in, reach bits that codes of 6 do not have.
        return ""
    return ocp_name(fmt)


def is_read_by_sequence(fmt: Format) -> bool:
    """Whether `fast_values` reads this element: signed integers and the OCP formats without infinities; or `codebooks`."""
    if fmt.kind == "codebook":
        return fmt.bits == 4
    return ocp_name(fmt) in ("e4m3", "e2m3", "e3m2", "e2m1") or (
        fmt.kind == "int" and fmt.signed and fmt.nan_code is None and fmt.bits <= 8
    )


def is_quick(record: Scale) -> bool:
    """Whether `division.quotient` serves: plain ratios that are raised to 2**-126 or more, exactly computed for this target.

    Only in records where infinity poisons a block: the quotient of infinity is NaN.
    """
    plain = record.rule == "ratio" and record.stored == "decode" and record.compute == "float32"
    floors = _is_raised(record, 2.0**-126) and record.storage == "float32"
    return plain and floors and record.statistic != "minmax_split" and record.target in QUOTIENTS


def is_power_ratio(record: Scale) -> bool:
    """Whether scales are powers of two with normal reciprocals above a ratio, so that exponent fields tell them.

    The quotient m / t of significands from 1 to 2 rounds above 1 exactly if m > t, and above 1/2 in any case.
    """
    kind, floor = record.floor or ("", 0.0)
    plain = record.rule == "ratio_pow2" and record.stored == "decode" and record.storage == "float32"
    raised = kind == "stored" and not isinstance(floor, str) and floor >= 2.0**-126 and frexp(floor)[0] == 0.5
    return (
        plain
        and raised
        and record.compute == "float32"
        and record.statistic == "absmax"
        and record.target >= 4
    )


def _is_raised(record: Scale, least: float) -> bool:
    """Whether stored scales are raised to `least` or more. "tiny" and "eps" of no dtype lie below 2**-126."""
    kind, value = record.floor or ("", 0.0)
    return kind == "stored" and (2.0**-126 if isinstance(value, str) else value) >= least


def has_pairs(scheme: Scheme, dtype: str, fast_path: str) -> bool:
    """Whether packed codes are made from pairs.

    `fp4_fp6`: MX floats below 8 bits and NVFP4, of bfloat16. `integers`: 4-bit integers with zero points, of 16
    bits.
    """
    scale = scheme.scale
    if is_ranged(scheme, fast_path):
        return dtype != "float32" and scheme.format.bits == 4 and scale.block in (32, 64, 128, 256)
    if dtype != "bfloat16":
        return False
    if scheme.outer is not None:
        # A block of 16 lies in one thread, a two-dimensional one in several.
        sized = scale.block == 16 or isinstance(scale.block, tuple)
        return fast_path == "e2m1" and sized and not scale.power_of_two
    return fast_path in ("e2m1", "e2m3", "e3m2") and scale.block == 32 and scale.power_of_two


def is_ranged(scheme: Scheme, fast_path: str) -> bool:
    """Whether `integers.scale_of_range` makes scales and zero points.

    From a target of 4 on no reciprocal is below 2**-126; up to the span of the codes no zero point lies beyond them.
    """
    scale, zero = scheme.scale, scheme.zero
    coded = fast_path == "int" and zero is not None and zero.rule == "code"
    return (
        coded
        and scale.statistic == "minmax_with_zero"
        and is_quick(scale)
        and 4 <= scale.target <= 2**scheme.format.bits - 1
    )


def is_fast_stochastic(scheme: Scheme) -> bool:
    """Whether `stochastic_rounding` rounds: MX floats of default schemes whose multipliers are normal numbers."""
    fmt, scale = scheme.format, scheme.scale
    plain = scheme.nan == "block" and scheme.nan_code is None and scheme.smallest_exponent is None
    signed = fmt.kind == "float" and fmt.bits <= 8 and bool(fmt.sign_mask) and fmt.has_negative_zero
    stochastic = scheme.rounding == "stochastic" and scheme.overflow == "saturate" and scheme.negative_zero
    return (
        plain
        and signed
        and stochastic
        and scale.power_of_two
        and scheme.outer is None
        and scale.target >= 4.0
    )


def _has_reciprocals(scheme: Scheme) -> bool:
    """Whether codes come from scales that multiply them too, each with a finite reciprocal."""
    scale = scheme.scale
    finite = scheme.codes_from == "stored" and _is_raised(scale, 2.0**-126)
    return scale.stored == "decode" and (finite or scale.power_of_two)


def _codebook_sequence(scheme: Scheme) -> str:
    """ "codebook" where scales are maxima, so that scaled elements lie between -1 and 1; "stretched" for levels one apart."""
    scale, fmt = scheme.scale, scheme.format
    storable = scale.stored == "decode" and scale.compute == "float32"
    if not (_is_plain_ratio(scale) and storable and scheme.outer is None and scheme.poison_code == 0):
        return ""
    if is_stretched(fmt):
        return "stretched"
    return "codebook" if scale.target == 1.0 and has_cubic(fmt) else ""


def is_under_outer(scheme: Scheme) -> bool:
    """Whether `outer_scales.choose_under_outer` makes the scales: e4m3, with a floor, under a float32 outer scale."""
    scale, outer = scheme.scale, scheme.outer
    if (
        outer is None
        or outer.statistic != "absmax_elements"
        or outer.stored != "decode"
        or scheme.nan != "block"
    ):
        return False
    plain = (
        scale.rule == "ratio"
        and scale.stored == "decode"
        and scale.compute == "float32"
        and scheme.zero is None
    )
    storable = (
        storage_kind(scale.storage) == "e4m3" and scale.floor is not None and scale.floor[0] == "stored"
    )
    return (
        plain
        and storable
        and scale.statistic == "absmax"
        and scheme.outer_order == "decode"
        and scale.target in QUOTIENTS
    )


def is_outer_ordinary(scheme: Scheme) -> bool:
    """Whether an outer scale that comes from a tensor is raised to 2**-112 and below 2**117."""
    outer = scheme.outer
    return outer is not None and _is_raised(outer, 2.0**-112) and 2.0**128 / outer.target <= 2.0**117


def never_saturates(scheme: Scheme) -> bool:
    """Whether |x| <= amax cannot round beyond the largest code: symmetric integers with a float32 scale amax / qmax.

    Three roundings of relative size 2**-24 separate x * (1 / s) from at most qmax, far less than a half.
    """
    scale, fmt = scheme.scale, scheme.format
    return (
        _is_plain_ratio(scale)
        and scheme.zero is None
        and scheme.outer is None
        and fmt.kind == "int"
        and scale.target == fmt.max
    )


def _is_plain_ratio(record: Scale) -> bool:
    """Whether scales are float32 quotients of the largest magnitudes and a target."""
    return record.statistic == "absmax" and record.rule == "ratio" and record.storage == "float32"


# Bits of the significands of 16-bit dtypes.
SIGNIFICANT = {"bfloat16": 8, "float16": 11, "float32": 24}
LEAST, MOST = 2.0**-64, 2.0**64
# Outer scales, and elements where a product that underflows would lose the sign of a zero that it makes.
OUTER, SIGNED_OUTER, SIGNED_MOST = (2.0**-60, 2.0**60), (2.0**-12, 2.0**60), 2.0**16


def on_ordinary_blocks(scheme: Scheme, dtype: str) -> Scheme | None:
    """The record that makes the same codes, scales and zero points of ordinary blocks by a sequence; None without one."""
    scale = scheme.scale
    exact = (
        scheme.rounding == "nearest_even" and scheme.overflow == "saturate" and scheme.codes_from == "stored"
    )
    if not exact or scale.stored != "decode" or scheme.apply == "encode":
        return None
    if dtype == "float32":
        # The input's dtype is the one in which everything is computed anyway.
        scale = replace(scale, compute="float32")
        scheme = replace(scheme, arithmetic="float32")
    if scale.rule == "rceil_log2" and log2_is_exact(dtype, scale.target):
        scale = replace(scale, rule="rceil")
    result = replace(scheme, scale=scale, nan="block", nan_code=None, smallest_exponent=None)
    return result if ordinary_sequence(result, dtype) else None


def ordinary_sequence(scheme: Scheme, dtype: str) -> str:
    """Which sequence of `fast_codes` makes the codes of ordinary blocks; "" for none."""
    scale, fmt = scheme.scale, scheme.format
    if not _has_scales(scheme, dtype) or (scheme.apply == "divide" and not quotient_sequence(scheme, dtype)):
        return ""
    if fmt.kind == "int" and fmt.nan_code is None and fmt.bits <= 8:
        return "int" if _has_integers(scheme, dtype) else ""
    if fmt.kind == "codebook":
        return "codebook" if _has_codebook(scheme, dtype) else ""
    if scheme.zero is not None or scale.statistic != "absmax" or (fmt.bits == 6 and scale.target > fmt.max):
        return ""
    return ocp_name(fmt)


def bounds(scheme: Scheme, dtype: str) -> tuple[float, float]:
    """The least and the most magnitude of blocks that are ordinary."""
    if dtype == "float16" and scheme.scale.compute == "input":
        # Scales are normal numbers of float16, and ranges do not overflow.
        return scheme.scale.target * 2.0**-14, 2.0**14
    return LEAST, MOST if scheme.negative_zero or scheme.outer is None else SIGNED_MOST


def outer_bounds(scheme: Scheme) -> tuple[float, float]:
    """The same of outer scales."""
    return OUTER if scheme.negative_zero else SIGNED_OUTER


def has_zero_blocks(scheme: Scheme) -> bool:
    """Whether a block of zeros goes by the sequence.

    It does if its scale is not 0: its codes are those of 0 as in any other block. And if its scale is 0 and the element is an
    8-bit float or an entry of a codebook: 1 / 0 is NaN in `reciprocal_rn`, and so is every product with it, as every 0 / 0 is
    by the rules. Such a float's code is that of NaN; a codebook has none, and codes of blocks whose multiplier is NaN are 0.
    """
    raised = scheme.scale.power_of_two or scheme.scale.floor is not None or scheme.outer_order == "folded"
    return raised or (
        scheme.outer is None and (scheme.format.kind == "codebook" or ocp_name(scheme.format) in HARDWARE)
    )


def has_single_pairs(scheme: Scheme, dtype: str) -> bool:
    """Whether 4-bit floats under e4m3 scales alone are made from pairs of bfloat16, as those under an outer scale are."""
    single = (
        scheme.outer is None and storage_kind(scheme.scale.storage) == "e4m3" and scheme.scale.block == 16
    )
    return single and dtype == "bfloat16" and ocp_name(scheme.format) == "e2m1"


def quotient_sequence(scheme: Scheme, dtype: str) -> str:
    """How the sequences divide elements by scales; "" where none is exact. p: bits of a significand of the dtype.

    "product": x * (1 / s), rounded to bfloat16. A quotient a / b of two 8-bit significands is no midpoint c of bfloat16 (9
    bits, odd): 256 a = b c asks for b = 256. It is at least 2**-17 of its size away from one, and the product 2**-23 from
    it. So product and quotient are rounded to the same bfloat16.
    "corrected": x * m + x * (1 - s m) m with m = 1 / s, whose error before its last rounding is below 2**-46 of its size.
    Midpoints of float32 have 25 bits, so quotients of p-bit significands lie 2**-(p + 25) or more away from them: the
    rounding is that of the quotient up to p = 11. Scales s of 24 bits, as those under an outer scale, have quotients as near
    as 2**-48, but there only the sides of the ties t of e2m1 matter, of bfloat16 x. With integer significands X < 2**8 and
    2**23 <= S < 2**24 and the midpoint (M 2**k +- 1) / 2**j beside t, M being 1, 3, 5 or 7 and k from 22 to 25, a quotient so
    near asks for |X 2**i - S (M 2**k +- 1)| <= 8 with i of 39 or more. So S lies at most 8 from a multiple of 2**22, and the
    terms below 2**39 cancel only if M = 1, t = 1/4 and S = 2**24 - 1. There (1 - s m) m rounded towards zero gives the right
    side and rounded to nearest a tie (`reciprocal_error_cut`; a test tries every S). 8-bit floats with -0 take for m the
    largest number that is not above 1 / s (`reciprocal_below`): the error is below 2**-45 there, and -0 stays.
    """
    scale = scheme.scale
    if scheme.outer is not None:
        own = scheme.outer_order == "encode" and ocp_name(scheme.format) == "e2m1"
        return "corrected" if own and dtype == "bfloat16" else ""
    if scale.compute != "input" or dtype == "float32":
        return ""
    return "product" if scheme.arithmetic == "input" and dtype == "bfloat16" else "corrected"


@lru_cache(maxsize=64)
def log2_is_exact(dtype: str, target: float) -> bool:
    """Whether rounded logarithms of a / target lie above an integer exactly where a / target lies above a power of two.

    They do where the quotient's fraction is 0 or above the steps that float32 loses, for every significand of the dtype.
    """
    if dtype == "float32":
        return False
    bits = SIGNIFICANT[dtype]
    significands = np.arange(1 << (bits - 1), 1 << bits).astype(np.float32)
    fractions = (significands / np.float32(target)).view(np.int32) & 0x7FFFFF
    return bool(np.all((fractions == 0) | (fractions > steps_above().max())))


@lru_cache(maxsize=64)
def difference_thresholds(fmt: Format, dtype: str) -> tuple[float, ...] | None:
    """The largest float32 with each code, if it is rounded to the dtype and the nearest entry by rounded differences decides.

    None where codes do not keep the order of the values.

    Of every value of the dtype from -1 to 1; torchao's NF4 rounds entries and differences to the dtype. Rounding keeps the
    order too: the largest float32 that is rounded to the largest value with a code is the largest with it, and no instruction
    rounds.
    """
    import ml_dtypes

    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    every = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    y = np.sort(every[np.abs(every) <= 1])
    table = np.asarray(fmt.table, np.float32).astype(kind).astype(np.float32)
    code = np.abs((y[:, None] - table).astype(kind).astype(np.float32)).argmin(axis=1)
    last = np.searchsorted(code, np.arange(len(table) - 1), side="right") - 1
    # Midpoints of neighbours of the dtype are float32, and a tie goes to either.
    middle = (y[last] + y[last + 1]) / 2
    result = np.where(middle.astype(kind) == y[last], middle, np.nextafter(middle, np.float32(-np.inf)))
    return tuple(float(v) for v in result) if np.all(np.diff(code) >= 0) else None


def _has_scales(scheme: Scheme, dtype: str) -> bool:
    """Whether the scales come from a sequence: powers of two, ratios in float32 or the input's dtype, e4m3 codes."""
    scale, outer = scheme.scale, scheme.outer
    if outer is not None and outer.statistic != "absmax_elements":
        return False
    if scale.power_of_two:
        return outer is None and scale.rule != "rceil_log2"
    storable = scale.storage == "float32" or (scale.storage == dtype and scale.compute == "input")
    plain = scale.rule == "ratio" and has_quotient(scale.target) and scale.compute in ("float32", "input")
    if storage_kind(scale.storage) == "e4m3":
        return plain and _has_e4m3_scales(scheme)
    return plain and storable and outer is None


def _has_e4m3_scales(scheme: Scheme) -> bool:
    """Block scales of 4-bit floats in e4m3, alone or in one of the orders of `outer_scales`."""
    scale, outer = scheme.scale, scheme.outer
    kind = "" if scale.floor is None else scale.floor[0]
    if ocp_name(scheme.format) != "e2m1" or scheme.arithmetic != "float32":
        return False
    if outer is None:
        return kind == "scale" and scheme.apply == "reciprocal" and scale.compute == "float32"
    order = scheme.outer_order
    return (
        (
            order == "reciprocal_first"
            and kind == "scale"
            and scale.compute == "float32"
            and outer.stored == "decode"
        )
        or (order == "folded" and kind == "" and scale.compute == "float32" and outer.stored == "encode")
        or (order == "encode" and kind == "zero" and outer.stored == "encode")
    )


def _has_integers(scheme: Scheme, dtype: str) -> bool:
    """Signed integers without a zero point or with a code as one; unsigned ones with a float one, of bfloat16."""
    scale, zero, fmt = scheme.scale, scheme.zero, scheme.format
    if zero is None:
        return fmt.signed and scale.statistic in ("absmax", "minmax_split")
    if zero.rule == "code":
        return fmt.signed and scale.statistic == "minmax_with_zero" and 1 <= scale.target <= 2**fmt.bits - 1
    small = scale.statistic == "minmax" and not fmt.signed and fmt.fraction_bits == 0
    same = (
        scale.compute == scheme.arithmetic == "input"
        and scheme.apply == "divide"
        and zero.storage == "bfloat16"
    )
    return small and same and dtype == "bfloat16" and scale.floor is not None


def _has_codebook(scheme: Scheme, dtype: str) -> bool:
    """Codebooks of 16 between -1 and 1 under their maxima, where rounded differences decide."""
    scale, fmt = scheme.scale, scheme.format
    if scheme.arithmetic != "input" or dtype == "float32" or scale.target != 1.0 or scheme.zero is not None:
        return False
    thresholds = difference_thresholds(fmt, dtype) if fmt.bits == 4 else None
    return thresholds is not None and scale.statistic == "absmax" and has_cubic(fmt, thresholds)
