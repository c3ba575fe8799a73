"""What our quantization-aware training is to reach beside plain training, and what others published of theirs.

Published numbers are of whole fine-tuning runs, optimizer included, on other hardware: their ratios are beside ours, no more.
"""

from __future__ import annotations

from functools import lru_cache

from experiments.qat_overhead.variants import LORA, OURS
from experiments.report.published import FOLDER, Published, read
from experiments.report.results import Results

PUBLISHED = FOLDER / "qat_overhead.csv"
TIME, MEMORY = "time over plain", "peak memory over plain"
#: Largest overheads, in percent.
BARS = {TIME: 8.0, MEMORY: 5.0}
#: With adapters a step is to be faster and smaller than one of plain training of everything.
LORA_BARS = {TIME: 0.0, MEMORY: 0.0}
#: How published tables call plain training, and metrics of which a ratio is made; less throughput is more time.
PLAINLY, THROUGHPUT = "fine-tuning without QAT", "training_throughput"
PEAKS = ("training_peak_memory", "training_peak_reserved_memory")


def missed(results: Results) -> list[str]:
    """The bars that ours misses, each with both numbers; what was not measured misses nothing."""
    lines = dict.fromkeys((row.setting, row.method) for row in results.rows if row.method.startswith(OURS))
    made = []
    for setting, method in lines:
        for metric, bar in (LORA_BARS if method.endswith(LORA) else BARS).items():
            value = results.value(setting, method, metric)
            if value is not None and value > bar:
                made.append(f"{method}, {setting}: {metric} {value:.1f} of {bar:.0f} %")
    return made


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """Every published row about the cost of quantization-aware training."""
    return read(PUBLISHED)


def overheads() -> list[tuple[str, str, str, str, float | None, float | None]]:
    """(model, hardware, source, method, time over plain, memory over plain) in percent, of every published comparison."""
    found = {(one.model, one.hardware, one.source, one.method): {} for one in published()}
    for one in published():
        found[one.model, one.hardware, one.source, one.method][one.metric] = one.value
    made = []
    for (*where, method), values in found.items():
        if method == PLAINLY:
            continue
        plain = found[*where, PLAINLY]
        memory = next((over(values[peak], plain[peak]) for peak in PEAKS if peak in values), None)
        made.append((*where, method, over(plain[THROUGHPUT], values[THROUGHPUT]), memory))
    return made


def over(value: float, base: float) -> float:
    """How much more a value is than another, in percent of that."""
    return (value / base - 1) * 100


__all__ = ["BARS", "LORA_BARS", "MEMORY", "TIME", "missed", "over", "overheads", "published"]
