"""Whether a kernel is right: the calls that it has to stand, what is found of them, the fault of the bank that it looks like.

`ao_lab.testing.probe_kernel` says it of kernels of torch and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.formats.encode import decode, encode
from reference.probe.detect import Finding, findings, rounded
from reference.probe.estimates import F64
from reference.probe.faults import FAULTS, Case, typical_inputs, typical_weight
from reference.quantize.quantize import quantize
from reference.schemes.schemes import Scheme

#: Sizes of a case without x or w: no multiples of tiles; six blocks of 128 along K.
TOKENS, OUTPUTS, CHANNELS = 251, 96, 768
#: Powers of two that inputs are multiplied by, and those of float16, whose outputs would overflow.
POWERS = {"float32": (12, -12), "bfloat16": (12, -12), "float16": (4, -4)}
#: What may be cut off K.
CUTS = (128, 64, 32, 16)
#: Which share of a difference a fault of the bank has to explain to be named.
EXPLAINED = 0.5


@dataclass(frozen=True)
class KernelReport:
    """All findings of all cases. looks_like: the fault of the bank that explains most of the difference, "" where none explains
    half; explained: its share."""

    findings: tuple[Finding, ...]
    looks_like: str = ""
    explained: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What was found, the surest first."""
        return tuple(sorted((one for one in self.findings if one.found), key=lambda one: -one.sigmas))

    def __str__(self) -> str:
        if self.ok:
            first = self.findings[0]
            most = max(one.sigmas for one in self.findings)
            return (
                f"a right kernel, as far as {len(self.findings)} tests tell: {first.test} {first.error:.3g}, that of the "
                f"specification {first.right:.3g}; the largest difference is {most:.1f} standard errors"
            )
        lines = [f"  {one}" for one in self.faults[:5]]
        fault = FAULTS.get(self.looks_like)
        what = (
            "like none of the bank of faults" if fault is None else f"like {self.looks_like!r}: {fault.says}"
        )
        share = f" ({100 * self.explained:.0f}% of the difference)" if fault else ""
        return "\n".join([f"a faulty kernel; it looks {what}{share}", *lines])


def judge(
    kernel: Callable[[Case], Any],
    scheme: Scheme | None,
    weight: Scheme,
    x: Any = None,
    w: Any = None,
    *,
    dtype: str = "float32",
    accumulation: str = "float32",
    quantized: bool = False,
    seed: int = 0,
) -> KernelReport:
    """Run a kernel, a function of a `Case` that gives outputs (M, N), on all cases. Arguments and errors are those of
    `ao_lab.testing.probe_kernel`; x and w are NumPy arrays."""
    found: list[Finding] = []
    outputs: dict[str, tuple[Case, F64]] = {}
    for case in cases(scheme, weight, *operands(x, w, dtype, seed), dtype):
        y = np.asarray(kernel(case), np.float64)
        outputs[case.name] = case, y
        found += findings(case, y, dtype, accumulation, quantized=quantized)
    if not found:
        raise ValueError(
            f"no token has an output that {dtype} holds: x or w is too large; divide them, or give another dtype"
        )
    worst = max((one for one in found if one.found), key=lambda one: one.sigmas, default=None)
    name, share = ("", 0.0) if worst is None else likeness(*outputs[worst.case], dtype)
    return KernelReport(tuple(found), name, share)


def cases(scheme: Scheme | None, weight: Scheme, x: Any, w: Any, dtype: str) -> Iterator[Case]:
    """The calls that a kernel has to stand."""
    yield Case(x, w, scheme, weight, "inputs as they are")
    for power in POWERS[dtype]:
        yield Case(x * np.float32(2.0**power), w, scheme, weight, f"inputs times 2^{power}")
    cut = next((n for n in CUTS if x.shape[1] > 2 * n and _takes(scheme, weight, x[:, n:], w[:, n:])), 0)
    less, shorter = (np.ascontiguousarray(one) for one in (x[:-5, cut:], w[:, cut:]))
    yield Case(less, shorter, scheme, weight, "other lengths")
    broken = x.copy()
    broken[len(x) // 2, x.shape[1] // 3] = np.nan
    yield Case(broken, w, scheme, weight, "NaN in a token")


def _takes(scheme: Scheme | None, weight: Scheme, x: Any, w: Any) -> bool:
    try:
        for one, record in ((x, scheme), (w, weight)):
            if record is not None:
                quantize(np.ascontiguousarray(one), record)
    except ValueError:
        return False
    return True


def operands(x: Any, w: Any, dtype: str, seed: int) -> tuple[Any, Any]:
    """x and w as float32 arrays of values that the dtype holds; ValueError for shapes that do not fit, NaN and infinity."""
    channels = next((int(one.shape[-1]) for one in (x, w) if one is not None), CHANNELS)
    given = [
        typical_inputs(TOKENS, channels, seed) if x is None else np.asarray(x, np.float32),
        typical_weight(OUTPUTS, channels, seed) if w is None else np.asarray(w, np.float32),
    ]
    shapes = [one.shape for one in given]
    if any(one.ndim != 2 for one in given) or shapes[0][1] != shapes[1][1] or min(map(min, shapes)) < 8:
        raise ValueError(
            f"x is (M, K) and w (N, K) with 8 tokens, outputs and channels at least, got {shapes[0]} and {shapes[1]}"
        )
    if not all(np.isfinite(one).all() for one in given):
        raise ValueError("x and w are finite; leave out the tokens that are not")
    return tuple(
        np.asarray(decode(encode(one, dtype), dtype)) if dtype != "float32" else one for one in given
    )  # type: ignore[return-value]


def likeness(case: Case, y: F64, dtype: str) -> tuple[str, float]:
    """The fault of the bank that a kernel's outputs are nearest to, and the share of their difference from a right kernel's
    that it explains; "" where that is less than half."""
    best = "", 0.0
    right = rounded(case.right, dtype)
    for name, fault in FAULTS.items():
        found = fault.outputs(case)
        if found is None:
            continue
        wrong = rounded(found, dtype)
        if (np.isfinite(wrong) != np.isfinite(y)).any():
            continue
        some = np.isfinite(y)
        apart = np.where(np.isfinite(right), right, 0)[some]
        whole = float(((y[some] - apart) ** 2).sum())
        share = 1 - float(((y[some] - wrong[some]) ** 2).sum()) / whole if whole else 0.0
        best = max(best, (name, share), key=lambda one: one[1])
    return best if best[1] >= EXPLAINED else ("", 0.0)


__all__ = ["KernelReport", "judge"]
