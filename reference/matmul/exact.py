"""Matrix products without error: sums of exact products in fixed point, rounded once.

Everything here is NumPy float64 used as an exact carrier. An array x is cut into digits, x = sum over p of D_p * 2**(base +
16 p), where D_p is an integer below 2**16 with the sign of x. The product of two digit planes is a float64 matmul of
integers below 2**32 over at most 2**21 terms, so every partial sum in it is an integer below 2**53: exact in any order, with
or without fused multiply-add. The planes of equal weight are added in int64; carries are propagated at the end. Where the
whole sum provably fits into 53 bits, one float64 matmul is already exact and is used alone.

The result is handed on rounded to odd (the last bit is set if anything was cut off) with at least 33 significant bits.
Rounding that to nearest even in a format of p <= 31 bits equals rounding the exact sum (Boldo and Melquiond, IEEE Trans.
Computers 57(4), 2008), also in the subnormal range, where p is smaller. There is no double rounding.

Sources: Kulisch's long accumulator; Ozaki et al., Numerical Algorithms 59 (2012), for cutting matrices into error-free parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Host = npt.NDArray[Any]

#: Bits of a digit: two digits multiply to 32 bits, which leaves 21 of float64's 53 for the number of terms.
DIGIT = 16
TERMS = 1 << (53 - 2 * DIGIT)
#: Longest K: int64 holds up to 18 * 18 plane products of K * 2**32 in one position.
LONGEST = 1 << 22
#: Mantissa bits, smallest and largest exponent of the result types.
RESULTS = {"float32": (23, -126, 127), "bfloat16": (7, -126, 127), "float16": (10, -14, 15)}


def exact_matmul(a: F64, b: F64, bias: F64 | None = None) -> F64:
    """a @ b + bias, exact up to one rounding to odd with at least 33 significant bits.

    a (..., M, K), b (..., K, N) and bias (broadcast to the product) are float64 arrays whose values are those of float32
    or of integers up to 32 bits; batches broadcast as in `np.matmul`. NaN and infinity follow IEEE 754: inf * 0 and
    inf - inf are NaN. An exact zero sum is +0. Raises ValueError for K above 2**22.
    """
    if a.shape[-1] > LONGEST:
        raise ValueError(
            f"exact sums hold at most {LONGEST} terms, got K = {a.shape[-1]}; split K and add the parts"
        )
    special = special_values(a, b, bias)
    if special is None:
        return _finite_matmul(a, b, bias)
    sums = _finite_matmul(*(None if x is None else np.where(np.isfinite(x), x, 0.0) for x in (a, b, bias)))  # type: ignore[arg-type]
    return np.where(special == 0, sums, special)


def special_values(a: F64, b: F64, bias: F64 | None = None) -> F64 | None:
    """Where a @ b + bias is NaN or infinite, that value; 0 elsewhere. None if all operands are finite."""
    if all(x is None or np.isfinite(x).all() for x in (a, b, bias)):
        return None
    ones, nan = (np.ones_like(a), np.ones_like(b)), (np.isnan(a), np.isnan(b))
    zero, infinite = (a == 0, b == 0), (np.isinf(a), np.isinf(b))
    bad = (
        _any(nan[0], ones[1])
        | _any(ones[0], nan[1])
        | _any(infinite[0], zero[1])
        | _any(zero[0], infinite[1])
    )
    high = _infinite_products(a, b, infinite)
    low = _infinite_products(-a, b, infinite)
    if bias is not None:
        bad, high, low = bad | np.isnan(bias), high | (bias == np.inf), low | (bias == -np.inf)
    signed = np.where(high, np.inf, np.where(low, -np.inf, 0.0))
    return np.where(bad | (high & low), np.nan, signed)


def round_result(x: F64, name: str) -> F64:
    """x rounded to nearest even to the type `name` of `RESULTS`, as float64. Overflow is infinity, underflow is gradual."""
    mantissa, emin, emax = RESULTS[name]
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, emin) - mantissa)
    with np.errstate(invalid="ignore"):
        rounded = np.copysign(np.rint(x / quantum) * quantum, x)
    return np.where(np.abs(rounded) >= 2.0 ** (emax + 1), np.copysign(np.inf, x), rounded)


def grid_of(x: F64) -> tuple[int, int]:
    """(low, high): every element is a multiple of 2**low and below 2**high in magnitude; (0, 0) without nonzero elements."""
    nonzero = x[x != 0]
    if nonzero.size == 0:
        return 0, 0
    fraction, exponent = np.frexp(nonzero)
    integer = np.ldexp(fraction, 53).astype(np.int64)
    _, trailing = np.frexp((integer & -integer).astype(np.float64))
    return int((exponent + trailing).min()) - 54, int(exponent.max())


def _any(a: Host, b: Host) -> npt.NDArray[np.bool_]:
    """Whether a true pair meets along K: counts of up to 2**22 are exact in float64."""
    return np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64)) > 0)


def _infinite_products(a: F64, b: F64, infinite: tuple[Host, Host]) -> npt.NDArray[np.bool_]:
    """Whether some product of the output is +inf."""
    up, down = (infinite[0] & (a > 0), infinite[1] & (b > 0)), (infinite[0] & (a < 0), infinite[1] & (b < 0))
    return _any(up[0], b > 0) | _any(down[0], b < 0) | _any(a > 0, up[1]) | _any(a < 0, down[1])


def _finite_matmul(a: F64, b: F64, bias: F64 | None) -> F64:
    (low_a, high_a), (low_b, high_b) = grid_of(a), grid_of(b)
    low, high = low_a + low_b, high_a + high_b + max(a.shape[-1] - 1, 0).bit_length()
    if bias is not None and np.any(bias):
        low_bias, high_bias = grid_of(bias)
        low, high = min(low, low_bias), max(high, high_bias) + 1
    if high - low <= 53:
        sums = np.matmul(a, b)
        # Adding +0 turns a sum of negative zeros into +0.
        return np.asarray(sums + (0.0 if bias is None else bias) + 0.0)
    return _fixed_point_matmul(a, b, bias, low_a - (low_a + low_b - low), low_b)


def _fixed_point_matmul(a: F64, b: F64, bias: F64 | None, base_a: int, base_b: int) -> F64:
    planes_a, planes_b = _digits(a, base_a), _digits(b, base_b)
    planes = {} if bias is None else _digits(bias, base_a + base_b)
    top = max(max(planes_a, default=0) + max(planes_b, default=0), max(planes, default=0))
    shape = np.broadcast_shapes(
        np.matmul(a[..., :0], b[..., :0, :]).shape, () if bias is None else bias.shape
    )
    # Five spare positions take the carries of up to 63 bits and the sign.
    limbs = np.zeros((top + 5, *shape), np.int64)
    for place, plane in planes.items():
        limbs[place] += plane.astype(np.int64)
    for p, digits_a in planes_a.items():
        for q, digits_b in planes_b.items():
            limbs[p + q] += _integer_matmul(digits_a, digits_b)
    return _collapse(limbs, base_a + base_b)


def _digits(x: F64, base: int) -> dict[int, F64]:
    """Nonzero digit planes of x by position: x = sum of plane * 2**(base + 16 * position), |digit| < 2**16."""
    _, high = grid_of(x)
    planes: dict[int, F64] = {}
    rest = x
    for place in reversed(range(-(-max(high - base, 0) // DIGIT))):
        digit = np.trunc(np.ldexp(rest, -(base + DIGIT * place)))
        if digit.any():
            planes[place] = digit
            rest = rest - np.ldexp(digit, base + DIGIT * place)
    return planes


def _integer_matmul(a: F64, b: F64) -> I64:
    """a @ b for integers below 2**16, K split so that float64 stays exact."""
    parts = [slice(start, start + TERMS) for start in range(0, a.shape[-1], TERMS)]
    return np.asarray(sum(np.matmul(a[..., part], b[..., part, :]).astype(np.int64) for part in parts))


def _collapse(limbs: I64, base: int) -> F64:
    """Sum of limbs[s] * 2**(base + 16 s) rounded to odd, as float64."""
    _carry(limbs)
    negative = limbs[-1] < 0
    limbs = np.where(negative, -limbs, limbs)
    _carry(limbs)
    head, taken = np.zeros(limbs.shape[1:], np.int64), np.zeros(limbs.shape[1:], np.int64)
    sticky, lowest = np.zeros(limbs.shape[1:], np.bool_), np.zeros(limbs.shape[1:], np.int64)
    for place in reversed(range(len(limbs))):
        digit = limbs[place]
        # Three limbs from the first nonzero one on: 33 to 48 significant bits.
        take = ((head > 0) | (digit > 0)) & (taken < 3)
        head, taken = np.where(take, (head << DIGIT) | digit, head), taken + take
        lowest, sticky = np.where(take, place, lowest), sticky | (~take & (digit > 0))
    magnitude = np.ldexp((2 * head + sticky).astype(np.float64), base + DIGIT * lowest - 1)
    return np.where(negative, -magnitude, magnitude)


def _carry(limbs: I64) -> None:
    """Bring all limbs but the last into 0 .. 2**16 - 1, in place; the last takes the sign."""
    for place in range(len(limbs) - 1):
        limbs[place + 1] += limbs[place] >> DIGIT
        limbs[place] &= (1 << DIGIT) - 1
