"""`probe_kernel`: whether a kernel of one's own is a right one, told by errors on the inputs of a layer, and what it looks
like if not.

    report = testing.probe_kernel(my_linear, scheme="fp8_rowwise", dtype="bfloat16", device="cuda")
    assert report.ok, report

A kernel takes x (M, K) and w (N, K) and quantizes both itself, or takes both as `Quantized` (`operands="quantized"`), and
returns x w.T (M, N). It runs on inputs of a layer, four times, on the same times powers of two (a scale that is missing is no
fault where inputs are of size 1), on lengths that tiles do not divide, and with a NaN in one token and zeros in another;
`reference.probe.detect` compares. On inputs that any convention of scales holds exactly (`reference.probe.held_exactly`) each
output is known to its last rounding, so that wrong tokens, channels, tails or outputs show whatever the convention. Elsewhere a
fault is at least five standard errors of a right kernel's error away, so that one in a million right kernels would be taken for
one; what it does like one of the bank (`reference.probe.faults`) is named. A kernel that does not quantize, or that changes
what it is given, is faulty too. Where its quantized values are those of the specification, each output is held to a bound
(`reference.probe.each_output`). Two inputs show each value alone (`reference.probe.each_alone`), so that casts to one side are
found whatever the other operand. Inputs at ties of rounding tell whether it rounds these alike (`report.ties`), and calls on
the same inputs whether it is deterministic (`report.remarks`); neither is a fault.

The bits of a kernel are not compared: `testing.assert_same_bits` does that. A kernel passes here that rounds otherwise than the
specification and loses no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from reference.arrays.namespace import choice
from reference.probe.detect import Finding
from reference.probe.estimates import F64
from reference.probe.faults import Case
from reference.probe.judge import KernelReport, judge
from reference.quantize.stored import Quantized
from reference.schemes.schemes import Scheme, scheme_of

DTYPES = ("float32", "bfloat16", "float16")
#: Bits of dtypes that a kernel may return.
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
#: What quantized operands consist of.
PARTS = ("codes", "scale", "outer", "zero")


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
    """Run a kernel on inputs of a layer, the same times powers of two, of other lengths (M, N and K; the report names those
    that the kernel raised an error for) and with a NaN in one token and zeros in another, and say what is wrong with it.

    kernel(x, w) returns x w.T (M, N). scheme: of x, None: multiplied as it is; weight_scheme: of w, by default as x's. x (M, K)
    and w (N, K): of a layer, arrays or tensors of any float dtype (`Probe.samples` has tokens); without them typical ones of
    odd lengths. operands: "dense", arrays of `dtype`, or "quantized", as `quantize` of the specification makes them, whose
    values are to be multiplied unrounded (one that rounds them to bfloat16 first has another error of sums). library:
    of the arrays, "torch" (on `device`) or "numpy". dtype: of x, w and the outputs, which may be wider: float32, bfloat16 or
    float16. accumulation: "float32"; of FP8 sums in the tensor core "precise" (chains of 128 added in float32) or "fast" (one
    chain).

    Raises ValueError for other shapes than (M, N), for inputs that are not finite or that the schemes do not take, and for
    names that there are not; TypeError where the kernel returns no array, or one of fewer bits than `dtype`.
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
    arrays = (None if one is None else _array(one) for one in (x, w))
    report = judge(
        call,
        inputs,
        weight,
        *arrays,
        dtype=dtype,
        accumulation=accumulation,
        quantized=operands == "quantized",
        seed=seed,
    )
    changed = tuple(Finding(name, "the kernel changed its operands", 1.0, 0.0, inf) for name in call.changed)
    return replace(report, findings=(*report.findings, *changed))


@dataclass(frozen=True)
class Call:
    """How a kernel is called. changed: cases whose operands were others afterwards."""

    kernel: Callable[[Any, Any], Any]
    operands: str
    library: str
    dtype: str
    device: str
    changed: dict[str, None] = field(default_factory=dict)

    def __call__(self, case: Case) -> F64:
        """Its outputs as NumPy float64."""
        given = self._operands(case)
        y = self.kernel(*given)
        if [_bytes(one) for one in given] != [_bytes(one) for one in self._operands(case)]:
            self.changed[case.name] = None
        if not hasattr(y, "shape"):
            raise TypeError(f"{case.name}: the kernel returned {type(y).__name__}, no array (M, N)")
        got = str(y.dtype).removeprefix("torch.")
        if BITS.get(got, 64) < BITS[self.dtype] or {got, self.dtype} == {"float16", "bfloat16"}:
            raise TypeError(
                f"{case.name}: the kernel returned {got} for dtype={self.dtype!r}; where its operands are {got} as well, give "
                f"dtype={got!r}, else let it return {self.dtype}"
            )
        if hasattr(y, "detach"):
            y = y.detach().to("cpu").double().numpy()
        return np.asarray(y, np.float64)

    def _operands(self, case: Case) -> tuple[Any, Any]:
        if self.operands == "quantized":
            x = self._of(case.x) if case.scheme is None else self._quantized(case.xq)
            return x, self._quantized(case.wq)
        return self._of(case.x), self._of(case.w)

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

        parts: dict[str, Any] = {
            name: None
            if (part := getattr(q, name)) is None
            else torch.from_numpy(np.array(part)).to(self.device)
            for name in PARTS
        }
        return replace(q, **parts)


def _bytes(x: Any) -> list[bytes]:
    """Of an array or tensor, or of all parts of quantized ones."""
    parts = [getattr(x, name) for name in PARTS] if isinstance(x, Quantized) else [x]
    held = [one for one in parts if one is not None]
    return [one.tobytes() if isinstance(one, np.ndarray) else _of_tensor(one) for one in held]


def _of_tensor(x: Any) -> bytes:
    import torch

    raw: bytes = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return raw


def _array(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach().to("cpu").float().numpy()
    return np.ascontiguousarray(np.asarray(x), np.float32)


__all__ = ["KernelReport", "probe_kernel"]
