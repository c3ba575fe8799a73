"""What our configurations of experiment `decode` are to reach, and which of them miss it.

Speedups over the fastest form of bfloat16 are held against the published ones; those over the common baseline against
torchao's of the same run, less what two timings of the same thing differ by; sizes against the published; quantization
against a time and a peak of memory. A number that was not measured misses nothing: its line says why it is not there.
"""

from __future__ import annotations

from experiments.decode_configs import BASELINE, BFLOAT16, OURS, RACED, TORCHAO
from experiments.kernels.lines import PEER_TOLERANCE
from experiments.published_rows import published
from experiments.results import Results

SPEEDUP, SIZE = "speedup over bfloat16", "model size"
#: A size may be larger than the published by this part; quantization may take so many seconds, and so many models' memory.
SIZE_TOLERANCE, QUANTIZE_SECONDS, QUANTIZE_PEAK = 0.01, 30.0, 1.1


def published_speedup(method: str) -> float | None:
    """The published speed over that of bfloat16 in the same table."""
    base, rate = published(BFLOAT16).get("tokens/s"), published(method).get("tokens/s")
    return None if base is None or rate is None else rate / base


def fastest_bfloat16(results: Results) -> tuple[str, float]:
    """The fastest form of bfloat16 in a run, and its speed over the baseline's; without others the baseline."""
    forms = dict.fromkeys(row.method for row in results.rows if row.setting == BASELINE)
    speeds = {form: results.value(BASELINE, form, SPEEDUP) or 0.0 for form in forms} | {BFLOAT16: 1.0}
    best = max(speeds, key=lambda form: speeds[form])
    return best, speeds[best]


def bars(results: Results, method: str) -> dict[str, tuple[float | None, float, bool]]:
    """What one of our configurations is held against: (measured, bar, whether more is better) by name."""
    made: dict[str, tuple[float | None, float, bool]] = {}
    ours = results.value(OURS, method, SPEEDUP)
    if method in RACED and (speedup := published_speedup(method)) is not None:
        over_fastest = None if ours is None else ours / fastest_bfloat16(results)[1]
        made["published speedup"] = (over_fastest, speedup, True)
    if (theirs := results.value(TORCHAO, method, SPEEDUP)) is not None:
        made["torchao's speedup"] = (ours, theirs * (1 - PEER_TOLERANCE), True)
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
