"""Four quantizers written a second time with exact fractions, straight from their definitions: the truth of test_quantize.py.

Nothing of `reference` is used: numbers are `Fraction`, rounding to float32 is written out, and the tables of e2m1 and e4m3 come
from the OCP text and ml_dtypes. Inputs are finite float32 rows; results are codes and scales as Python numbers.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(float(v)) for v in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)]
LARGEST = Fraction(float(np.finfo(np.float32).max))


def power(e):
    return Fraction(2) ** e


def floor_log2(value):
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if power(e) <= value else e - 1


def float32(value):
    """Nearest float32, ties to even; None for infinity."""
    if value == 0:
        return value
    quantum = power(max(floor_log2(abs(value)), -126) - 23)
    rounded = round(value / quantum) * quantum  # Python rounds fractions to even
    return rounded if abs(rounded) <= LARGEST else None


def nearest_code(value, table):
    """Code of the nearest magnitude, ties to the even code, saturating."""
    size = abs(value)
    return min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))


def float_code(x, value, table):
    """With x's sign, that of zeros included."""
    return nearest_code(value, table) | (len(table) + len(table) % 2 if np.signbit(x) else 0)


def exact(row):
    return [Fraction(float(v)) for v in row]


def mxfp4(block):
    """OCP MX 1.0, section 6.3: 2**(floor(log2(max)) - 2), clamped to e8m0; elements divided exactly."""
    values = exact(block)
    largest = max(map(abs, values))
    e = -127 if largest == 0 else max(floor_log2(largest) - 2, -127)
    return [float_code(x, v / power(e), E2M1) for x, v in zip(block, values, strict=True)], e + 127


def fp8_rowwise(row):
    """max / 448 in float32, at least 2**-126; elements times the float32 reciprocal, rounded to float32, then to e4m3."""
    values = exact(row)
    scale = max(float32(max(map(abs, values)) / 448), power(-126))
    reciprocal = float32(1 / scale)
    return [float_code(x, float32(v * reciprocal), E4M3) for x, v in zip(row, values, strict=True)], scale


def int8_asymmetric(row):
    """(max - min) / 255 over a range that holds zero; zero point -128 - rne(min / s); codes clamp(rne(x / s) + zero)."""
    values = exact(row)
    low, high = min(0, *values), max(0, *values)
    width = float32(high - low)
    scale = max(float32((LARGEST if width is None else width) / 255), power(-126))
    zero = min(max(-128 - round(float32(low / scale)), -128), 127)
    reciprocal = float32(1 / scale)
    codes = [min(max(round(float32(v * reciprocal)) + zero, -128), 127) for v in values]
    return [code % 256 for code in codes], scale, zero


def nvfp4(x):
    """Outer scale max / 2688, block scales (max / 6) / outer in e4m3 (at least 2**-9), elements times 1 / (outer * block)."""
    outer = max(float32(max((abs(v) for v in exact(x.reshape(-1))), default=Fraction(0)) / 2688), power(-112))
    codes, scales = [], []
    for block in x.reshape(-1, 16):
        values = exact(block)
        ratio = float32(float32(max(map(abs, values)) / 6) / outer)
        scales.append(max(nearest_code(ratio, E4M3), 1))
        reciprocal = float32(1 / float32(outer * E4M3[scales[-1]]))
        codes += [float_code(b, float32(v * reciprocal), E2M1) for b, v in zip(block, values, strict=True)]
    return codes, scales, outer
