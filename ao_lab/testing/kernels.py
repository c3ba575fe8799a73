"""`probe_kernel`: whether a kernel of one's own is a right one, told by errors on the inputs of a layer, and what it looks
like if not.

    report = testing.probe_kernel(my_linear, scheme="fp8_rowwise", dtype="bfloat16", device="cuda")
    assert report.ok, report

A kernel takes x (M, K) and w (N, K) and quantizes both itself, or takes both as `Quantized` (`operands="quantized"`), and
returns x w.T (M, N). It runs on inputs of a layer, on the same times powers of two (a scale that is missing is no fault where
inputs are of size 1), on lengths that tiles do not divide, and with a NaN in one token; `reference.probe.detect` compares. A
fault is at least five standard errors of a right kernel's error away, so that one in a million right kernels would be taken for
one; what it does like one of the bank (`reference.probe.faults`) is named.

The bits of a kernel are not compared: `testing.assert_same_bits` does that. A kernel passes here that rounds otherwise than the
specification and loses no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.arrays.namespace import choice
from reference.formats.encode import decode, encode
from reference.probe.detect import Finding, findings, rounded
from reference.probe.estimates import F64
from reference.probe.faults import FAULTS, Case, typical_inputs, typical_weight
from reference.quantize.quantize import Quantized, quantize
from reference.schemes.schemes import Scheme, scheme_of

DTYPES = ("float32", "bfloat16", "float16")
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


def probe_kernel(
    kernel: Callable[[Any, Any], Any],
    *,
    scheme: str | Scheme | None = "fp8_rowwise",
    weight_scheme: str | Scheme | None = None,
    x: Any = None,
    w: Any = None,
    operands: str = "dense",
    library: str = "torch",
    dtype: str = "float32",
    device: str = "cpu",
    accumulation: str = "float32",
    seed: int = 0,
) -> KernelReport:
    """Run a kernel on the cases of the module text and say what is wrong with it.

    kernel(x, w) returns x w.T (M, N). scheme: of x, None: multiplied as it is; weight_scheme: of w, by default as x's. x (M, K)
    and w (N, K): of a layer, arrays or tensors of any float dtype (`Probe.samples` has tokens); without them typical ones of
    odd lengths. operands: "dense", arrays of `dtype`, or "quantized", as `quantize` of the specification makes them. library:
    of the arrays, "torch" (on `device`) or "numpy". dtype: of x, w and the outputs, float32, bfloat16 or float16. accumulation:
    "float32"; of FP8 sums in the tensor core "precise" (chains of 128 added in float32) or "fast" (one chain).

    Raises ValueError for other shapes than (M, N), for inputs that are not finite or that the schemes do not take, and for
    names that there are not; TypeError where the kernel returns no array.
    """
    choice(operands, ("dense", "quantized"), "operands")
    choice(library, ("torch", "numpy"), "library")
    choice(dtype, DTYPES, "dtype")
    choice(accumulation, ("float32", "precise", "fast"), "accumulation")
    if scheme is None and weight_scheme is None:
        raise ValueError("neither operand is quantized; give weight_scheme, scheme, or both")
    inputs = None if scheme is None else scheme_of(scheme)
    weight = scheme_of(scheme if weight_scheme is None else weight_scheme)  # type: ignore[arg-type]
    call = Call(kernel, operands, library, dtype, device)
    found: list[Finding] = []
    outputs: dict[str, tuple[Case, F64]] = {}
    for case in cases(inputs, weight, *_operands(x, w, dtype, seed), dtype):
        y = call(case)
        outputs[case.name] = case, y
        found += findings(case, y, dtype, accumulation, quantized=operands == "quantized")
    worst = max((one for one in found if one.found), key=lambda one: one.sigmas, default=None)
    name, share = ("", 0.0) if worst is None else likeness(*outputs[worst.case], dtype)
    return KernelReport(tuple(found), name, share)


@dataclass(frozen=True)
class Call:
    """How a kernel is called."""

    kernel: Callable[[Any, Any], Any]
    operands: str
    library: str
    dtype: str
    device: str

    def __call__(self, case: Case) -> F64:
        """Its outputs as NumPy float64."""
        if self.operands == "quantized":
            given = (
                self._of(case.x) if case.scheme is None else self._quantized(case.xq),
                self._quantized(case.wq),
            )
        else:
            given = self._of(case.x), self._of(case.w)
        y = self.kernel(*given)
        if not hasattr(y, "shape"):
            raise TypeError(f"{case.name}: the kernel returned {type(y).__name__}, no array (M, N)")
        if hasattr(y, "detach"):
            y = y.detach().to("cpu").double().numpy()
        return np.asarray(y, np.float64)

    def _of(self, x: Any) -> Any:
        if self.library == "numpy":
            import ml_dtypes

            return x.astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        import torch

        return torch.from_numpy(np.array(x)).to(self.device, getattr(torch, self.dtype))

    def _quantized(self, q: Quantized) -> Quantized:
        if self.library == "numpy":
            return q
        import torch

        names = ("codes", "scale", "outer", "zero")
        parts: dict[str, Any] = {
            name: None
            if (part := getattr(q, name)) is None
            else torch.from_numpy(np.array(part)).to(self.device)
            for name in names
        }
        return replace(q, **parts)


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


def _operands(x: Any, w: Any, dtype: str, seed: int) -> tuple[Any, Any]:
    """x and w as float32 arrays of values that the dtype holds; ValueError for shapes that do not fit, NaN and infinity."""
    channels = next((int(one.shape[-1]) for one in (x, w) if one is not None), CHANNELS)
    given = [
        typical_inputs(TOKENS, channels, seed) if x is None else _array(x),
        typical_weight(OUTPUTS, channels, seed) if w is None else _array(w),
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


def _array(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach().to("cpu").float().numpy()
    return np.ascontiguousarray(np.asarray(x), np.float32)


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


__all__ = ["KernelReport", "probe_kernel"]
