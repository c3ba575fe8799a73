"""Part "faults" of `loka`: faulty kernels of the bank, on inputs of a layer, on typical ones and on N(0, 1).

Each fault of `reference.probe.faults` multiplies in float32 outputs. On each kind of inputs two judges look at it: the tests
of `ao_lab.testing.probe_kernel` (inputs as they are, scaled, of other lengths, with a NaN), and MERE of the inputs as they
are, in deviations of a right kernel's over eight samples of the same kind. Right kernels are those of the bank, whose sums have
other orders and whose scales another convention, over seeds, dtypes and schemes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.harness.measuring import Values
from experiments.loka.prediction import seen_by
from experiments.loka.subjects import subject
from reference import SCHEMES
from reference.probe import errors
from reference.probe.detect import ERRORS, rounded
from reference.probe.faults import FAULTS, RIGHT, Case, typical_inputs, typical_weight
from reference.probe.judge import KernelReport, judge

FAULTY, ALARMS = "faults", "right kernels"
#: The schemes of input and weight that a fault is of: the first that can have it.
PAIRS = (
    ("fp8_rowwise", "fp8_rowwise"),
    ("fp8_1x128", "fp8_128x128"),
    ("nvfp4", "nvfp4"),
    ("int8_rowwise_asymmetric", "int8_rowwise"),
)
LEARNED, TYPICAL, RANDOM = "inputs of a layer", "typical inputs", "N(0, 1)"
KINDS = (LEARNED, TYPICAL, RANDOM)
SIGMAS, NAMED, MERE, ERROR = (
    "standard errors",
    "named",
    "MERE, standard errors",
    "error over a right kernel's",
)
#: What a table shows for infinitely many.
MANY = 1e6
TOKENS, OUTPUTS = 251, 128
CHANNELS = {"quick": 384, "full": 768}


def schemes_of(name: str) -> tuple[str, str]:
    """The schemes on which a fault shows."""
    ones = np.ones((70, CHANNELS["full"]), np.float32), np.ones((OUTPUTS, CHANNELS["full"]), np.float32)
    for pair in PAIRS:
        if FAULTS[name].outputs(Case(*ones, *(SCHEMES[one] for one in pair))) is not None:  # type: ignore[call-arg]
            return pair
    raise ValueError(f"no scheme of {PAIRS} can have the fault {name!r}")


@lru_cache(maxsize=8)
def operands(kind: str, scale: str, seed: int) -> tuple[Any, Any]:
    """x (tokens, channels) and w (outputs, channels) of a kind."""
    channels = CHANNELS[scale]
    if kind == RANDOM:
        rng = np.random.default_rng(seed)
        return tuple(rng.standard_normal((n, channels), dtype=np.float32) for n in (TOKENS, OUTPUTS))  # type: ignore[return-value]
    if kind == TYPICAL:
        return typical_inputs(TOKENS, channels, seed), typical_weight(OUTPUTS, channels, seed)
    # The largest layer whose input is a multiple of 128, its last columns cut off.
    one = subject("DCN", "wide", seed, "cpu")
    inputs = seen_by(one, one.probed, TOKENS, seed)
    name = max(inputs, key=lambda name: inputs[name].shape[1] * one.model.get_submodule(name).weight.shape[0])
    w: Any = one.model.get_submodule(name).weight.detach().numpy()
    channels = w.shape[1] // 128 * 128
    return inputs[name].numpy()[:, :channels], w[: max(len(w) // 128 * 128, 1), :channels]


def probed(
    outputs: Callable[[Case], Any], schemes: tuple[str, str], x: Any, w: Any, dtype: str = "float32"
) -> KernelReport:
    """What is told of a kernel that multiplies as `outputs` does; where a case cannot have a fault it is right."""

    def kernel(case: Case) -> Any:
        y = outputs(case)
        return rounded(case.right if y is None else y, dtype)

    return judge(kernel, SCHEMES[schemes[0]], SCHEMES[schemes[1]], x, w, dtype=dtype)


def fault_values(name: str, kind: str, scale: str, seed: int) -> Values:
    """What finds a fault on one kind of inputs."""
    schemes = schemes_of(name)
    x, w = operands(kind, scale, seed)
    report = probed(FAULTS[name].outputs, schemes, x, w)
    most = max((one.sigmas for one in report.faults), default=0.0)
    case = Case(x, w, *(SCHEMES[one] for one in schemes))  # type: ignore[call-arg]
    y = FAULTS[name].outputs(case)
    y = case.right if y is None else np.where(np.isfinite(y), y, 0.0)
    wrong, right = (errors.norm_ratio(one - case.exact, case.exact).value for one in (y, case.right))
    return {
        SIGMAS: (min(most, MANY), ""),
        NAMED: (float(report.looks_like == name), ""),
        ERROR: (wrong / right, "x"),
        MERE: (min(mere_sigmas(case, y, kind, scale, seed), MANY), ""),
    }


def mere_sigmas(case: Case, y: Any, kind: str, scale: str, seed: int) -> float:
    """How far MERE is from a right kernel's, in deviations of that over eight samples of such inputs."""
    parts = np.array_split(np.random.default_rng(seed).permutation(len(case.x)), 8)
    merits = [errors.mere(case.right[p] - case.exact[p], case.exact[p]).value for p in parts]
    spread = float(np.std(merits, ddof=1)) / np.sqrt(len(parts))
    return abs(errors.mere(y - case.exact, case.exact).value - float(np.mean(merits))) / max(spread, 1e-300)


def alarm_values(scale: str, seed: int) -> Values:
    """Right kernels that were taken for faulty ones, of all. More than a hundred at scale full."""
    plans = [(PAIRS[0], "float32")] if scale == "quick" else [
        (pair, dtype) for pair in (*PAIRS, ("mxfp8_e4m3",) * 2, ("fp8_tensorwise",) * 2, ("int8_rowwise",) * 2)
        for dtype in ("float32", "bfloat16")
    ] + [(PAIRS[0], "float16")]  # fmt: skip
    alarms, count, most = 0, 0, 0.0
    for schemes, dtype in plans:
        for kernel in RIGHT.values():
            report = probed(kernel, schemes, *operands(TYPICAL, scale, seed + count), dtype)
            alarms, count = alarms + (not report.ok), count + 1
            most = max(most, *(one.sigmas for one in report.findings))
    return {
        "right kernels": (float(count), ""),
        "false alarms": (float(alarms), ""),
        "largest difference": (most, "SE"),
    }


__all__ = ["ERRORS", "FAULTS", "alarm_values", "fault_values"]
