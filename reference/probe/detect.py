"""Whether a kernel's outputs are those of a right one, in standard errors: overall, by channel, by token.

Outputs y of a kernel are compared twice. **Coarse**, with the exact product of the operands before they are quantized, beside
the right kernel of the specification: a kernel may round otherwise (another order of scaling, ties, powers of two as scales)
and still has to lose as little. **Fine**, with the exact product of the quantized operands, where most tokens show that the
kernel's codes are those of the specification: then sums alone are left to err, and float32 sums in any order lose less
than what `sum_error` finds for one term after the other; what another convention of scales adds is no error of sums
(`reference.probe.rescaled`). Then no output may be off by more than a bound that is proven
(`reference.probe.each_output`), which no statistics say of one among thousands. Channels and tokens have standard errors over
the other axis; five of them, and some more error than the right one has, are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import Any

import ml_dtypes
import numpy as np

from reference.formats.encode import decode, encode
from reference.matmul.linear import transposed
from reference.matmul.matmul import matmul
from reference.probe.drift import difference
from reference.probe.each_output import BEYOND, beyond, each_bound, ties_size
from reference.probe.estimates import F64, Estimate, mean, quantile
from reference.probe.faults import Case
from reference.probe.rescaled import rescaled

#: Standard errors that make a fault, and how much more error than a right kernel's at least. With scales that are powers of two
#: the largest element of a row is rounded too, which is all of some rows' error (1.27 times; a cast that truncates: from 1.33).
ERRORS, MORE = 5.0, 1.3
#: The same of one channel or token: scales rounded up to powers of two double the error of some.
MORE_OF_ONE = 2.5
#: The same of one output, where codes are not those of the specification.
MORE_OF_OTHER = 4.0
#: The same of sums, whose error a right kernel has exactly: that of its outputs' rounding.
MORE_SUMS = 1.01
#: The same where codes that differ at ties add to it: each by a sixteenth of an element of e4m3.
MORE_TIES = 2.0
#: A kernel's codes are the specification's where half of its tokens are so much closer to their product than rounding is.
CLOSE = 0.25
#: The test of sums, where codes are the specification's.
SUMS = "error of sums"
#: What stands in its place where scales are of another convention.
SCALES = "another convention of scales"
#: Terms of a chain of the tensor core whose sums are added in float32.
PROMOTED = 128
#: Tokens and channels that a simulation of sums takes; their error may be so many times as large.
SIMULATED, MARGIN = 64, 3.0


@dataclass(frozen=True)
class Finding:
    """One test of one case: its name, the error of the kernel and of a right one, and their difference in standard errors.

    Errors are root mean squares over those of the exact outputs of the same tokens and channels: 1 is as large as these.
    """

    case: str
    test: str
    error: float
    right: float
    sigmas: float
    #: How much more error than the right one's makes a fault, at least.
    more: float = MORE

    @property
    def found(self) -> bool:
        """Whether this is a fault."""
        return self.sigmas >= ERRORS and self.error > self.more * self.right

    def __str__(self) -> str:
        if self.sigmas == inf:
            return f"{self.case}: {self.test}"
        return (
            f"{self.case}: {self.test} {self.error:.3g} of its outputs' size, that of a right kernel {self.right:.3g}; "
            f"{self.sigmas:.1f} standard errors apart"
        )


def findings(
    case: Case, y: Any, dtype: str = "float32", accumulation: str = "float32", *, quantized: bool = False
) -> list[Finding]:
    """All tests of a kernel's outputs y (M, N), float64 or narrower, that were rounded to `dtype`.

    accumulation: "float32"; "precise": FP8 sums of 128 terms in the tensor core, added in float32, are right too; "fast": so
    is one chain. quantized: the kernel was given quantized operands. ValueError for another shape.
    """
    y = np.asarray(y, np.float64)
    if y.shape != case.exact.shape:
        raise ValueError(
            f"{case.name}: the kernel returned shape {y.shape}, x (M, K) and w (N, K) give {case.exact.shape}"
        )
    finite = np.isfinite(case.right)
    # Beyond the dtype's largest number a kernel may give that or an infinity; such tokens are left out.
    over = finite & (np.abs(rounded(case.right, dtype)) >= largest(dtype))
    broken = int((finite & np.where(over, np.isnan(y), ~np.isfinite(y))).sum())
    mended = int((~finite & np.isfinite(y)).sum())
    if broken or mended:
        said = (
            (broken, "inf or NaN where the right ones are finite"),
            (mended, "finite where the right ones are inf or NaN"),
        )
        test = "; ".join(f"{count} of {y.size} outputs are {what}" for count, what in said if count)
        return [Finding(case.name, test, (broken + mended) / y.size, 0.0, inf)]
    rows = (finite & ~over).all(1)
    if not rows.any():
        return []
    same = _same_codes(case, y[rows], rows, quantized)
    fine = list(_fine(case, y[rows], rows, dtype, accumulation, quantized)) if same else []
    coarse = [*_coarse(case, y[rows], rows), *_furthest(case, y[rows], rows, dtype, same)]
    if same:
        fine.append(each_output(case, y[rows], rows, dtype, accumulation, quantized))
    if (
        not quantized
        and any(one.found for one in fine)
        and _rescaled(case, y[rows], rows, dtype, accumulation)
    ):
        return [
            *_coarse(case, y[rows], rows),
            *_furthest(case, y[rows], rows, dtype, False),
            Finding(case.name, SCALES, fine[0].error, fine[0].error, 0.0),
        ]
    return [*coarse, *fine]


def _rescaled(case: Case, y: F64, rows: Any, dtype: str, accumulation: str) -> bool:
    off = np.abs(y - case.right[rows])
    bound = each_bound(case, off, rows, dtype, accumulation, quantized=False)
    return rescaled(case, y, rows, BEYOND * bound)


def _coarse(case: Case, y: F64, rows: Any) -> Iterator[Finding]:
    """Overall, the worst channel, the worst token."""
    exact = case.exact[rows]
    e, right = y - exact, case.right[rows] - exact
    (one, first), (two, second) = (
        _ratio((x**2).sum(1)[:, None], (exact**2).sum(1)[:, None]) for x in (e, right)
    )
    yield _compared(
        case.name,
        "error",
        Estimate(float(one[0]), float(first[0])),
        Estimate(float(two[0]), float(second[0])),
    )
    yield _worst(case.name, "error of channel", e, right, exact)
    yield _worst(case.name, "error of token", e.T, right.T, exact.T)


def _furthest(case: Case, y: F64, rows: Any, dtype: str, same: bool) -> Iterator[Finding]:
    """The one output that is furthest off, in root mean squares of the rounding error of its token and channel.

    A right kernel's largest is what the specification's own largest one is. Beside the same codes it may be twice that, where
    one code that lies on a tie is another; beside others, of another rounding, four times.
    """
    right, exact = case.right[rows], case.exact[rows]
    rounding, whole = right - exact, sqrt(float((exact**2).mean()))
    unit = _sizes(rounding)
    live = unit > 0
    if not whole or not live.any():
        return
    safe = np.where(live, unit, 1)
    allowed = float((np.abs(rounding) / safe)[live].max()) * unit + np.abs(rounded(right, dtype) - right)
    off = np.where(live, np.abs(y - (right if same else exact)), 0.0)
    at = np.unravel_index(int((off / np.where(live, allowed, 1)).argmax()), off.shape)
    token = int(np.flatnonzero(rows)[at[0]])
    yield Finding(
        case.name, f"output ({token}, {at[1]})", float(off[at]) / whole, float(allowed[at]) / whole,
        float(off[at] / safe[at]), MORE_OF_ONE if same else MORE_OF_OTHER,
    )  # fmt: skip


def each_output(case: Case, y: F64, rows: Any, dtype: str, accumulation: str, quantized: bool) -> Finding:
    """The one output that is furthest beyond what sums, its rounding and values at ties may add to it."""
    one = beyond(case, y, rows, dtype, accumulation, quantized=quantized, margin=BEYOND)
    size = sqrt(float((case.exact[rows] ** 2).mean())) or 1.0
    wrong = one.off > BEYOND * one.bound
    test = f"output {one.at}"
    if wrong:
        may = "sums of its quantized values in any order" + ("" if quantized else ", and ties of rounding")
        test += f" is off by {one.off / size:.3g} of its outputs' size; {may}, by {one.bound / size:.3g}"
        test += f"; {one.whole}" if one.whole else ""
    return Finding(case.name, test, one.off / size, one.bound / size, inf if wrong else 0.0, BEYOND)


def _same_codes(case: Case, y: F64, rows: Any, quantized: bool) -> bool:
    """Of all tokens; and where the kernel quantizes, each operand's rounding is a part of the error, as other codes' is not."""
    right, exact = case.right[rows], case.exact[rows]
    both = right - exact
    near, rounding = (float(np.median(np.linalg.norm(one, axis=1))) for one in (y - right, both))
    if quantized or near > CLOSE * rounding:
        return near <= CLOSE * rounding
    of_w = case.x[rows].astype(np.float64) @ (case.b - case.w).T
    live = [one.ravel() for one in (of_w, both - of_w) if np.linalg.norm(one) > 1e-6 * np.linalg.norm(both)]
    parts = np.linalg.lstsq(np.stack(live, 1), (y - exact).ravel(), rcond=None)[0] if live else np.ones(1)
    return bool(np.abs(parts - 1).max() <= CLOSE)


def _fine(case: Case, y: F64, rows: Any, dtype: str, accumulation: str, quantized: bool) -> Iterator[Finding]:
    """The error over the size of each token's outputs, beside what rounding of outputs and of sums may add.

    Where codes were given, the mean difference over tokens in standard errors: most outputs are rounded alike, so that it is
    sharp. Else medians, since a kernel that scales in another order has another code here and there, in most tokens where
    inputs have 16 bits, whose quotients lie on ties more often: what these may add is counted where it matters.
    """
    right = case.right[rows]
    stored = rounded(right, dtype) - right
    allowed = np.sqrt(stored**2 + (sum_error(case, rows, accumulation) * _sizes(right)) ** 2)
    size = np.linalg.norm(right, axis=1)
    some = size > 0
    if not some.any():
        return
    one, two = (np.linalg.norm(e, axis=1)[some] / size[some] for e in (y - right, allowed))
    if quantized:
        apart = mean(one**2 - two**2)
        sigmas = apart.value / apart.error if apart.error > 0 else inf if apart.value > 0 else 0.0
        error, least = (sqrt(float((x**2).mean())) for x in (one, two))
        yield Finding(case.name, SUMS, error, least, sigmas, MORE_SUMS)
    else:
        more = MORE_SUMS if dtype == "float32" else MORE_TIES
        found = _compared(case.name, SUMS, quantile(one), quantile(two), more)
        if found.found:
            allowed = np.sqrt(allowed**2 + ties_size(case)[rows] ** 2)
            two = np.linalg.norm(allowed, axis=1)[some] / size[some]
            found = _compared(case.name, SUMS, quantile(one), quantile(two), more)
        yield found


def sum_error(case: Case, rows: Any, accumulation: str) -> float:
    """What sums may lose of their size: `MARGIN` times what some of them lose term by term in float32, or in one chain."""
    some = np.flatnonzero(rows)[:SIMULATED]
    a, b = case.a[some].astype(np.float32), case.b[:SIMULATED].astype(np.float32)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    if accumulation != "float32":
        part = replace(case, x=case.x[some], w=case.w[:SIMULATED])
        promote = None if accumulation == "fast" else PROMOTED
        sums = np.asarray(
            matmul(part.xq, transposed(part.wq), accumulation="hopper_fp8", promote=promote), np.float64
        )
        exact = part.right
    else:
        sums = np.zeros(exact.shape, np.float32)
        for k in range(a.shape[1]):
            sums += np.outer(a[:, k], b[:, k])
    size = float(np.linalg.norm(exact))
    return MARGIN * float(np.linalg.norm(sums.astype(np.float64) - exact)) / size if size else 0.0


def _sizes(y: F64) -> F64:
    """The root mean square output of each token and channel: what their sums' errors are in proportion to."""
    rows, columns = (np.sqrt((y**2).mean(axis, keepdims=True)) for axis in (1, 0))
    whole = sqrt(float((y**2).mean())) or 1.0
    return np.asarray(rows * columns / whole)


def largest(dtype: str) -> float:
    """The largest number of a dtype of outputs."""
    return float(ml_dtypes.finfo(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).max)


def rounded(y: F64, dtype: str) -> F64:
    """Rounded to a dtype of outputs."""
    if dtype == "float64":
        return y
    with np.errstate(over="ignore"):
        single = y.astype(np.float32)
    return np.asarray(single if dtype == "float32" else decode(encode(single, dtype), dtype), np.float64)


def _compared(case: str, test: str, one: Estimate, two: Estimate, more: float = MORE) -> Finding:
    """The error of a kernel and that of a right one."""
    return Finding(case, test, one.value, two.value, difference(two, one), more)


def _worst(case: str, test: str, e: F64, right: F64, y: F64) -> Finding:
    """The column that is furthest off, of those whose error is enough above the right one's.

    Rows count alike, whatever their size. That the largest of N normal numbers lies about sqrt(2 log N) away is taken off
    its standard errors, in squares.
    """
    size = np.linalg.norm(y, axis=1, keepdims=True)
    size[size == 0] = 1
    (one, first), (two, second) = (_ratio((x / size) ** 2, (y / size) ** 2) for x in (e, right))
    spread = np.sqrt(first**2 + second**2)
    apart = np.where(one > MORE_OF_ONE * two, one - two, 0.0)
    sigmas = apart / np.where(spread > 0, spread, 1e-300)
    at = int(sigmas.argmax())
    least = sqrt(max(min(float(sigmas[at]), 1e150) ** 2 - 2 * log(max(len(sigmas), 1)), 0.0))
    return Finding(case, f"{test} {at}", float(one[at]), float(two[at]), least, MORE_OF_ONE)


def _ratio(a: F64, c: F64) -> tuple[F64, F64]:
    """Of each column sqrt(sum a / sum c) and its standard error by the delta method; 0 for columns of zeros."""
    n, below = len(a), c.sum(0)
    live = below > 0
    safe = np.where(live, below, 1)
    square = np.where(live, a.sum(0) / safe, 0)
    spread = (a - square * c).std(0, ddof=1 if n > 1 else 0) * sqrt(n) / safe
    root = np.sqrt(square)
    return root, np.where(root > 0, spread / np.where(root > 0, 2 * root, 1), 0)


__all__ = ["BEYOND", "Finding", "each_output", "findings", "sum_error"]
