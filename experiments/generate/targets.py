"""Targets of `generate()`, as data: speeds over bfloat16 in the same table.

Compiled decoding has targets for the whole model alone, and for what is measured of it; a prefill and steps that are not
compiled for eight layers.
"""

from __future__ import annotations

from experiments.generate.stage import Stage
from experiments.generate.tables import COMPILED, DEPTH, EAGER, LONG, WHOLE
from experiments.generate.times import SPEED
from experiments.report.results import Results
from experiments.report.targets import Target

WEIGHTS = ("int4 g128", "int4 g128, zero points", "int8", "mxfp4")
PREFILL = f"prefill of {LONG} tokens"
#: By layers: methods, settings, the least speed.
LIMITS = {
    WHOLE: (
        (("int4 g128",), (f"batch 1, {COMPILED}",), 1.45),
        (("int8",), (f"batch 1, {COMPILED}",), 1.35),
        (("int4 g128",), (f"batch 16, {COMPILED}",), 1.3),
        (("int8",), (f"batch 16, {COMPILED}",), 1.2),
        (("int4 g128, prepared",), (f"batch 1, {COMPILED}",), 1.7),
    ),
    DEPTH: (
        (("fp8 dynamic, rows",), (PREFILL,), 1.3),
        (WEIGHTS, (PREFILL,), 0.97),
        (WEIGHTS, tuple(f"batch {batch}, {EAGER}" for batch in (1, 16, 64)), 1.0),
    ),
}


def targets_of(data: str, results: Results) -> list[Target]:
    """All of a model, by its name in rows; what was not measured has no value, and is open."""
    asked = next((limits for layers, limits in LIMITS.items() if Stage(layers, "").data == data), ())
    return [
        Target(
            f"{method}, {setting}",
            results.value(setting, method, SPEED),
            limit,
            value_format=".2f",
            day=results.day(setting, method),
        )
        for methods, settings, limit in asked
        for setting in settings
        for method in methods
    ]


__all__ = ["LIMITS", "targets_of"]
