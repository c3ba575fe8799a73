"""Targets of our quantization-aware training relative to bfloat16 training, and published overheads.

Published numbers are of whole fine-tuning runs, optimizer included, on other hardware: only their ratios stand beside ours.
"""

from __future__ import annotations

from functools import lru_cache

from experiments.qat_overhead.variants import LORA, OURS
from experiments.report import targets
from experiments.report.published import FOLDER, Published, read
from experiments.report.results import Results
from experiments.report.targets import Target, percent_over

PUBLISHED = FOLDER / "qat_overhead.csv"
TIME, MEMORY = "time over plain", "peak memory over plain"
#: Largest overheads, in percent.
TARGETS = {TIME: 8.0, MEMORY: 5.0}
#: With LoRA a step is to be faster and smaller than one of bfloat16 training of all weights.
LORA_TARGETS = {TIME: 0.0, MEMORY: 0.0}
#: Names in published tables: training without QAT, and the metrics that ratios are taken of; less throughput is more time.
WITHOUT_QAT, THROUGHPUT = "fine-tuning without QAT", "training_throughput"
PEAKS = ("training_peak_memory", "training_peak_reserved_memory")


def targets_of(results: Results) -> list[Target]:
    """The targets of all our variants that have rows."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows if row.method.startswith(OURS))
    return [
        Target(
            name=f"{method}, {setting}: {metric}",
            value=results.value(setting, method, metric),
            limit=limit,
            at_least=False,
            unit="%",
            value_format=".1f",
            limit_format=".0f",
            day=results.day(setting, method),
        )
        for setting, method in found
        for metric, limit in (LORA_TARGETS if method.endswith(LORA) else TARGETS).items()
    ]


def missed(results: Results) -> list[str]:
    """The targets that ours misses, each with value and limit."""
    return [str(target) for target in targets.missed(targets_of(results))]


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """Every published row about the cost of quantization-aware training."""
    return read(PUBLISHED)


def overheads() -> list[tuple[str, str, str, str, float | None, float | None]]:
    """(model, hardware, source, method, time over plain, memory over plain) in percent, of every published comparison."""
    values = {(one.model, one.hardware, one.source, one.method): {} for one in published()}
    for one in published():
        values[one.model, one.hardware, one.source, one.method][one.metric] = one.value
    found = []
    for (*run, method), metrics in values.items():
        if method == WITHOUT_QAT:
            continue
        plain = values[*run, WITHOUT_QAT]
        memory = next((percent_over(metrics[peak], plain[peak]) for peak in PEAKS if peak in metrics), None)
        found.append((*run, method, percent_over(plain[THROUGHPUT], metrics[THROUGHPUT]), memory))
    return found


__all__ = ["LORA_TARGETS", "MEMORY", "TARGETS", "TIME", "missed", "overheads", "published", "targets_of"]
