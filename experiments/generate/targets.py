"""Targets of `generate()`, those of the issue "Fast where people are", as data: speeds over bfloat16 in the same table."""

from __future__ import annotations

from experiments.generate.tables import COMPILED, EAGER, LONG
from experiments.generate.times import SPEED
from experiments.report.results import Results
from experiments.report.targets import Target

INT4, BITS8 = ("int4 g128", "int4 g128, zero points"), ("int8",)
WEIGHTS = (*INT4, *BITS8, "mxfp4")
PREFILL = f"prefill of {LONG} tokens"
#: Methods, settings, the least speed.
LIMITS = (
    (INT4, (f"batch 1, {COMPILED}",), 1.45),
    (BITS8, (f"batch 1, {COMPILED}",), 1.35),
    (INT4, (f"batch 16, {COMPILED}",), 1.3),
    (BITS8, (f"batch 16, {COMPILED}",), 1.2),
    (("int4 g128, prepared",), (f"batch 1, {COMPILED}",), 1.7),
    (("fp8 dynamic, rows",), (PREFILL,), 1.3),
    (WEIGHTS, (PREFILL,), 0.97),
    (WEIGHTS, tuple(f"batch {batch}, {EAGER}" for batch in (1, 16, 64)), 1.0),
)


def targets_of(results: Results) -> list[Target]:
    """Those of a model whose methods were measured."""
    return [
        Target(f"{method}, {setting}", results.value(setting, method, SPEED), limit, value_format=".2f")
        for methods, settings, limit in LIMITS
        for setting in settings
        for method in methods
        if results.value(setting, method, SPEED) is not None
    ]


__all__ = ["LIMITS", "targets_of"]
