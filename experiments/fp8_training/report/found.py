"""Findings about trainings as sentences: gaps, the learning rate, the larger model, faults."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report import convergence
from experiments.fp8_training.report.convergence import rate_of
from experiments.fp8_training.training import planted
from experiments.fp8_training.training.convergence import GAPS
from experiments.fp8_training.training.gaps import BEYOND, Gap
from experiments.fp8_training.training.plans import BASE_NAMES, LONG, MARGIN, PLANS, SWEEP
from experiments.harness.rows import Row
from experiments.pretraining.run import BITS
from experiments.report.content import Headline
from experiments.report.results import Results, Where, best_run, by_run

#: Recipes of the first page.
QUOTED = ("rowwise", "mxfp8", "mxfp4", "nvfp4")


def of_trainings(rows: Sequence[Row]) -> list[str]:
    """Of the largest run of each kind, in the order of the sections."""
    kinds = {GAPS: gaps_found, SWEEP: rates_found, LONG: larger_found, planted.KIND: faults_found}
    found: list[str] = []
    for kind, function in kinds.items():
        best = best_run(by_run(rows, kind))
        if best is not None:
            found += function(*best)
            if kind == GAPS:
                found += base_found(rows, *best)
    return found


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Gaps of some recipes on held-out text, of the largest run."""
    run = best_run(by_run(rows, GAPS))
    metric = held_out(convergence.totals(run[1])) if run else None
    if run is None or metric is None or run[0].scale == "quick":
        return []
    gaps, words, used = run[1], [], list[Row]()
    for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows):
        one, row = (
            convergence.gap_of(gaps, setting, method, metric),
            gaps.row(setting, method, f"gap, {metric}"),
        )
        if method in QUOTED and one is not None and row is not None:
            words.append(f"{method} {one.mean:+.2f} ± {one.half:.2f}% ({one.verdict(MARGIN)})")
            used.append(row)
    text = (
        f"Loss on held-out books over bfloat16's, over paired trainings of a small Llama: {', '.join(words)}"
    )
    return [Headline(text, used)] if words else []


def base_found(rows: Sequence[Row], where: Where, gaps: Results) -> list[str]:
    """How far bfloat16 is from itself on another device: what one base can say at the margin."""
    main = held_out([one for one in convergence.totals(gaps) if "/" not in one])
    known = convergence.baseline_gap(rows, where, main) if main else None
    if known is None:
        return []
    device, one = known
    return [
        f"bfloat16 against itself, the same seeds and text on {device}: {one.mean:+.2f} ± {one.half:.2f}%. Gaps nearer to the "
        f"margin of {MARGIN}% than that would be judged otherwise with the other base."
    ]


def held_out(metrics: Sequence[str]) -> str | None:
    """The metric of all text that was held out; None where there is none."""
    return next((one for one in metrics if one.startswith(f"{BITS}, held") and "/" not in one), None)


def gaps_found(where: Where, gaps: Results) -> list[str]:
    """The gap of each recipe on held-out text; then the texts of other kinds where one is beyond the margin."""
    metrics = [one for one in convergence.totals(gaps) if "/" not in one]
    main = held_out(metrics)
    if main is None:
        return []
    sentences = [f"Gap to bfloat16 on {name_of(main)} text, {where}: {listed(gaps, main, where)}."]
    for metric in metrics:
        if metric != main and metric.startswith(BITS):
            words = listed(gaps, metric, where, beyond=True)
            sentences += [f"Beyond the margin on {name_of(metric)}, {where}: {words}."] if words else []
    return sentences


def listed(gaps: Results, metric: str, where: Where, beyond: bool = False) -> str:
    """Every recipe with its gap, or those beyond the margin alone; seeds where some are missing."""
    words, planned = [], PLANS[where.scale].seeds
    for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows):
        one = convergence.gap_of(gaps, setting, method, metric)
        if one is not None and (not beyond or one.verdict(MARGIN) == BEYOND):
            words.append(f"{method} {shown(one, planned, verdict=not beyond)}")
    return "; ".join(words)


def shown(one: Gap, planned: int, verdict: bool) -> str:
    """A gap as words."""
    notes = [one.verdict(MARGIN)] if verdict else []
    notes += [f"{one.seeds} of {planned} seeds"] if one.seeds < planned else []
    ending = f" ({', '.join(notes)})" if notes else ""
    return f"{one.mean:+.2f} ± {one.half:.2f}%{ending}"


def rates_found(where: Where, results: Results) -> list[str]:
    """The best learning rate of each size."""
    metric, words = held_out(results.metrics), []
    for setting in results.settings if metric else []:
        bits = {row.method: row.value for row in results.with_setting(setting).rows if row.metric == metric}
        best = min(bits, key=lambda method: bits[method])
        others = "; ".join(f"{rate_of(method)}: {bits[method]:.3f}" for method in sorted(bits, key=rate_of))
        words.append(f"{setting}: {rate_of(best):g} ({others})")
    return [f"Best learning rate by held-out bits per byte, {where}: {'. '.join(words)}."] if words else []


def larger_found(where: Where, results: Results) -> list[str]:
    """Each recipe beside bfloat16: one pair each, so without an interval."""
    sentences = []
    for setting in results.settings:
        mine = results.with_setting(setting)
        base = next((name for name in BASE_NAMES.values() if name in mine.methods), None)
        methods = sorted(mine.methods, key=lambda name: name != base)
        words = [larger_words(mine, setting, method, base) for method in methods]
        sentences.append(f"One training each of {setting}, {where}: {'; '.join(words)}.")
    return sentences


def larger_words(results: Results, setting: str, method: str, base: str | None) -> str:
    """Bits, their distance from the base, speed."""
    metric = held_out(results.metrics)
    bits = results.value(setting, method, metric) if metric else None
    words = [method] if bits is None else [f"{method} {bits:.4f} bits per byte held out"]
    known = results.value(setting, base, metric) if base and base != method and metric else None
    if bits is not None and known:
        words.append(f"{100 * (bits / known - 1):+.2f}%{elsewhere(results, setting, method, base)}")
    speed, share = (
        results.value(setting, method, one) for one in ("tokens a second", "share of the bfloat16 peak")
    )
    words += [] if speed is None else [f"{speed / 1e3:.0f} thousand tokens a second"]
    words += [] if share is None else [f"{share:.1f}% of the bfloat16 peak"]
    return ", ".join(words)


def elsewhere(results: Results, setting: str, method: str, base: str | None) -> str:
    """The distance from the base on texts of other kinds."""
    main = held_out(results.metrics)
    metrics = [
        one for one in results.metrics if one.startswith(f"{BITS}, ") and "/" not in one and one != main
    ]
    pairs = [
        (name_of(one), results.value(setting, method, one), results.value(setting, base, one))
        for one in metrics
        if base
    ]
    words = [f"{100 * (mine / known - 1):+.1f}% on {name}" for name, mine, known in pairs if mine and known]
    return f" ({', '.join(words)})" if words else ""


def faults_found(where: Where, results: Results) -> list[str]:
    """What each fault adds to the held-out loss, beside what quantization itself does."""
    metric, setting = held_out(results.metrics), results.settings[-1]
    healthy = results.value(setting, planted.HEALTHY, metric) if metric else None
    if metric is None or not healthy:
        return []
    words = [
        f"{name} {100 * (value / healthy - 1):+.2f}%"
        for name in dict.fromkeys(row.method for row in results.rows)
        if name != planted.HEALTHY and (value := results.value(setting, name, metric)) is not None
    ]
    return [f"Held-out loss over that without a fault, {where}: {'; '.join(words)}."] if words else []


def name_of(metric: str) -> str:
    """The text of a metric of bits per byte."""
    return metric.removeprefix(f"{BITS}, ")


__all__ = ["headlines", "of_trainings"]
