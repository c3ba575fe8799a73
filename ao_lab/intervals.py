"""Numbers with what is known of them: 95% intervals of means of few windows, and values rounded to the digits of their error.

"±" means one thing wherever ao_lab prints it: half of a 95% interval. Of a mean of n values (windows, examples) that is its
standard error times the 97.5% quantile of Student's t distribution with n - 1 degrees of freedom: 12.7 of two values, 2.36 of
eight, 2.04 of 32, and 1.96 where there are many.

Source: Student, "The probable error of a mean", Biometrika 6 (1908); the rounding is that of NIST Technical Note 1297, 7.2.2.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

#: Significant digits of an error.
DIGITS = 2
#: Where the lower half and the middle 95% of a distribution end.
QUANTILE = 0.975
#: Values from which on the normal distribution does, and steps of halving.
MANY, STEPS = 3000, 60
#: Windows from which on one configuration is called better than another.
ENOUGH = 8
#: What tables say of the sign.
MEANING = "±: half of a 95% interval"


@cache
def quantile(count: int | None) -> float:
    """The 97.5% quantile of Student's t for a mean of `count` values; of the normal distribution where it is None.

    Found by halving on the angle atan(t / sqrt(n - 1)), to the last digits of float64; from `MANY` values on it is the normal
    one, which differs by less than a thousandth there. ValueError for fewer than two values, which have no standard error.
    """
    if count is None or count >= MANY:
        return NormalDist().inv_cdf(QUANTILE)
    if count < 2:
        raise ValueError(f"an interval takes two values or more, got {count}; measure more windows")
    low, high = 0.0, math.pi / 2
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, count - 1) < 2 * QUANTILE - 1 else (low, middle)
    return math.sqrt(count - 1) * math.tan(low)


def within(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(angle)) of Student's t with so many degrees of freedom, a whole number.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    odd, square = freedom % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def half_interval(stderr: float | None, count: int | None) -> float | None:
    """Half of the 95% interval of a mean with this standard error over `count` values; None where there is none.

    count: None for a standard error of so many values that the normal distribution does (or of unknown number).
    """
    if stderr is None or not math.isfinite(stderr) or (count is not None and count < 2):
        return None
    return quantile(count) * stderr


def places(error: float) -> int:
    """Digits after the point down to the second significant digit of an error: 4 of 0.0027, 0 of 27; never negative."""
    exponent = math.floor(math.log10(error))
    found = DIGITS - 1 - exponent
    # 0.0996 has two digits as 0.10: rounding may carry into one more.
    return max(0, found - (round(error, found) >= 10.0 ** (exponent + 1)))


def rounded(value: float | None, half: float | None, *, sign: bool = False, unit: str = "") -> str:
    """ "-0.00051 ± 0.00027": a value and half of its interval to the two significant digits of the latter.

    Without an interval (None, 0 or not finite) the value alone in four significant digits; "-" for no value. sign: a plus
    before positive values. unit: behind both, such as "%".
    """
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if half is None or not math.isfinite(half) or half <= 0 or not math.isfinite(value):
        return f"{value:{plus}.4g}{unit}"
    digits = places(half)
    return f"{value:{plus}.{digits}f} ± {half:.{digits}f}{unit}"


def to_error(value: float | None, half: float | None) -> str:
    """The value alone, in three significant digits, or fewer where its error says less."""
    if value is None:
        return "-"
    if half is not None and math.isfinite(half) and half > 0 and math.isfinite(value):
        value = round(value, places(half))
    return f"{value:.3g}"


def is_noise(value: float, half: float | None) -> bool:
    """Whether the interval around a difference holds 0; False without an interval."""
    return half is not None and abs(value) <= half


__all__ = ["half_interval", "is_noise", "quantile", "rounded", "to_error"]
