"""What our configurations of experiment `decode` are to reach, and which of them miss it.

Tokens a second over those of the fastest form of bfloat16 are held against the published ratio; against torchao's of the same
run, less what two timings of the same thing differ by; sizes against the published; quantization against a time and a peak of
memory. A number that was not measured misses nothing: its line says why it is not there.
"""

from __future__ import annotations

from experiments.decode.configs import BASELINE, BFLOAT16, DEPENDENT, LIBRARY, OURS, RACED, TORCHAO
from experiments.kernels.report.lines import PEER_TOLERANCE
from experiments.report.published import published
from experiments.report.results import Results

RATE, SIZE = "tokens/s", "model size"
#: Forms of bfloat16, and rows that hold a rate of the first.
FORMS, BESIDE = (BFLOAT16, LIBRARY, DEPENDENT), ("bfloat16 before", "bfloat16 after")
#: A size may be larger than the published by this part; quantization may take so many seconds, and so many models' memory.
SIZE_TOLERANCE, QUANTIZE_SECONDS, QUANTIZE_PEAK = 0.01, 30.0, 1.1


def published_speedup(method: str) -> float | None:
    """The published speed over that of bfloat16 in the same table."""
    base, rate = published(BFLOAT16).get("tokens/s"), published(method).get("tokens/s")
    return None if base is None or rate is None else rate / base


def fastest_bfloat16(results: Results) -> tuple[str, float | None]:
    """The form of bfloat16 with the most tokens a second in a run, and how many; (bfloat16, None) where none was measured."""
    rates = {form: results.value(BASELINE, form, RATE) or 0.0 for form in FORMS}
    # The baseline was timed beside every configuration, by each process that measured some.
    rates[BFLOAT16] = max([rates[BFLOAT16], *(row.value for row in results.rows if row.metric in BESIDE)])
    best = max(rates, key=lambda form: rates[form])
    return best, rates[best] or None


def over_fastest(results: Results, setting: str, method: str) -> float | None:
    """A configuration's tokens a second over those of the fastest bfloat16."""
    rate, base = results.value(setting, method, RATE), fastest_bfloat16(results)[1]
    return None if rate is None or base is None else rate / base


def bars(results: Results, method: str) -> dict[str, tuple[float | None, float, bool]]:
    """What one of our configurations is held against: (measured, bar, whether more is better) by name."""
    made: dict[str, tuple[float | None, float, bool]] = {}
    if method in RACED and (speedup := published_speedup(method)) is not None:
        made["published speedup"] = (over_fastest(results, OURS, method), speedup, True)
    if (theirs := results.value(TORCHAO, method, RATE)) is not None:
        made["torchao's tokens/s"] = (results.value(OURS, method, RATE), theirs * (1 - PEER_TOLERANCE), True)
    if (size := published(method).get(SIZE)) is not None:
        made["published size"] = (results.value(OURS, method, SIZE), size * (1 + SIZE_TOLERANCE), False)
    seconds, peak = (results.value(OURS, method, f"quantize {what}") for what in ("time", "peak memory"))
    made["seconds to quantize"] = (seconds, QUANTIZE_SECONDS, False)
    made["peak of quantization"] = (peak, QUANTIZE_PEAK, False)
    return made


def missed(results: Results, method: str) -> list[str]:
    """The bars that a configuration misses, each with both numbers."""
    return [
        f"{name} {value:.3g} of {bar:.3g}"
        for name, (value, bar, more) in bars(results, method).items()
        if value is not None and (value < bar if more else value > bar)
    ]
