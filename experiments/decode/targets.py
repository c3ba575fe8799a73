"""Targets of our configurations in experiment `decode`, and which of them are missed.

Speedups over the fastest form of bfloat16 are compared with the published speedup; tokens a second with torchao's of the same
run, less what two timings of the same thing differ by; sizes with the published; quantization with a time and a peak of memory.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.decode.configs import BASELINE, BFLOAT16, DEPENDENT, LIBRARY, OURS, WITH_SPEED_TARGET
from experiments.harness.libraries import TORCHAO
from experiments.report import targets
from experiments.report.published import published
from experiments.report.results import Results
from experiments.report.targets import BASELINE_TOLERANCE, Target

RATE, SIZE = "tokens/s", "model size"
#: Forms of bfloat16, and metrics of other rows that hold a rate of the first.
FORMS, BFLOAT16_RATES = (BFLOAT16, LIBRARY, DEPENDENT), ("bfloat16 before", "bfloat16 after")
#: A size may exceed the published by this part; quantization may take so many seconds, and so many times the model's memory.
SIZE_TOLERANCE, QUANTIZE_SECONDS, QUANTIZE_PEAK = 0.01, 30.0, 1.1


def published_speedup(method: str) -> float | None:
    """The published speed over that of bfloat16 in the same table."""
    base, rate = published(BFLOAT16).get(RATE), published(method).get(RATE)
    return None if base is None or rate is None else rate / base


def fastest_bfloat16(results: Results) -> tuple[str, float | None]:
    """The form of bfloat16 with the most tokens a second in a run, and how many; (bfloat16, None) where none was measured."""
    rates = {form: results.value(BASELINE, form, RATE) or 0.0 for form in FORMS}
    # The baseline was timed beside every configuration, by each process that measured some.
    rates[BFLOAT16] = max(
        [rates[BFLOAT16], *(row.value for row in results.rows if row.metric in BFLOAT16_RATES)]
    )
    best = max(rates, key=lambda form: rates[form])
    return best, rates[best] or None


def over_fastest(results: Results, setting: str, method: str) -> float | None:
    """A configuration's tokens a second over those of the fastest bfloat16."""
    rate, base = results.value(setting, method, RATE), fastest_bfloat16(results)[1]
    return None if rate is None or base is None else rate / base


def targets_of(results: Results, method: str) -> list[Target]:
    """The targets of one of our configurations."""
    found = list[Target]()
    if method in WITH_SPEED_TARGET and (speedup := published_speedup(method)) is not None:
        found.append(Target("published speedup", over_fastest(results, OURS, method), speedup))
    if (rate := results.value(TORCHAO, method, RATE)) is not None:
        limit = rate * (1 - BASELINE_TOLERANCE)
        found.append(Target("torchao's tokens/s", results.value(OURS, method, RATE), limit))
    if (size := published(method).get(SIZE)) is not None:
        limit = size * (1 + SIZE_TOLERANCE)
        found.append(Target("published size", results.value(OURS, method, SIZE), limit, at_least=False))
    seconds, peak = (results.value(OURS, method, f"quantize {what}") for what in ("time", "peak memory"))
    found.append(Target("seconds to quantize", seconds, QUANTIZE_SECONDS, at_least=False))
    found.append(Target("peak of quantization", peak, QUANTIZE_PEAK, at_least=False))
    return [replace(target, day=results.day(OURS, method)) for target in found]


def missed(results: Results, method: str) -> list[str]:
    """The targets that a configuration misses, each with value and limit."""
    return [str(target) for target in targets.missed(targets_of(results, method))]
