"""Which instruction sequences serve a scheme: questions about its record, each of which has one answer for all its kernels.

A sequence is right for some records only: each function says for which, and why. `constants` writes the answers into the
constants.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import frexp

from fast.kernels.sm90.codebook16 import has_cubic
from fast.kernels.sm90.uniform_codebook import is_stretched
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
    """Whether `fast_values` reads this element: signed integers and the OCP formats without infinities; or `codebook16`."""
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

    `fp4` and `fp6`: MX floats below 8 bits and NVFP4, of bfloat16. `int_asymmetric`: 4-bit integers with zero points, of 16
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
    """Whether `int_asymmetric.scale_of_range` makes scales and zero points.

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
