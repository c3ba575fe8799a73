"""What trainings found, as sentences: gaps to bfloat16 on each text, single trainings, the learning rate, faults.

A gap is told with its text. Held-out books are of the kind that models are trained on; wikitext2 is not, and there even two
trainings in bfloat16 lie far apart. What rare bytes have to do with it is told by trainings whose loss was split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.fp8_training import convergence, convergence_page
from experiments.fp8_training.convergence import BEYOND, GAPS, UNDECIDED, WITHIN, Gap
from experiments.fp8_training.convergence_page import rate_of
from experiments.fp8_training.methods import BASE_NAMES, LONG, MARGIN, PAIRED, PLANS, SWEEP
from experiments.harness.rows import Row
from experiments.pretraining.run import BITS, COMMON_BITS, LEFT_BITS, RARE
from experiments.report.content import QUICK, Headline, days_of
from experiments.report.results import Results, Where, best_run, by_run, seeds_in

#: The text that is unlike the training text, and the metric of speed.
OTHER_TEXT, RATE = "wikitext2-test", "tokens a second"
#: Recipes of the first page.
QUOTED = ("rowwise", "mxfp8", "mxfp4", "nvfp4")


def of_trainings(rows: Sequence[Row]) -> list[str]:
    """Of the largest run of each kind, in the order of the sections."""
    kinds = {GAPS: gaps_found, SWEEP: rates_found, LONG: larger_found, convergence.KIND: faults_found}
    found: list[str] = []
    for kind, function in kinds.items():
        best = best_run(by_run(rows, kind))
        if best is not None:
            found += function(*best)
            if kind == GAPS:
                found += [*base_found(rows, *best), *single_found(rows)]
            if kind == LONG:
                found += speeds_apart(rows)
    return found


def paired(rows: Sequence[Row]) -> tuple[Where, Results] | None:
    """The largest run of gaps; None where there are short ones alone."""
    run = best_run(by_run(rows, GAPS))
    return None if run is None or run[0].scale == QUICK else run


def loss_headlines(rows: Sequence[Row]) -> list[Headline]:
    """Gaps of some recipes on held-out text, and which are within the margin, undecided and beyond it on another text."""
    run = paired(rows)
    texts = texts_of(run[1]) if run else []
    if run is None or not texts:
        return []
    words = [f"on {name_of(texts[0])} {quoted(run[1], texts[0])}"]
    words += [
        f"on {name_of(one)}, unlike the training text ({verdicts_of(run[1], one)})" for one in texts[1:]
    ]
    used = [
        row for one in texts for row in run[1].rows if row.metric == f"gap, {one}" and row.method in QUOTED
    ]
    counts = [int(row.value) for row in run[1].rows if row.metric in {f"gap, {one}, seeds" for one in texts}]
    trained = f"paired trainings of a small Llama, {seeds_in(counts)}, margin {MARGIN}%"
    return [Headline(f"Loss over bfloat16's, {trained}: {'; '.join(words)}", used)]


def quoted(gaps: Results, metric: str) -> str:
    """Some recipes' gaps on a text, and those of others that are beyond the margin; what is not within it says so."""
    found = [
        f"{method} {shown(one, one.seeds, verdict=one.verdict(MARGIN) != WITHIN)}"
        for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows)
        if (one := convergence_page.gap_of(gaps, setting, method, metric)) is not None
        and (method in QUOTED or one.verdict(MARGIN) == BEYOND)
    ]
    return ", ".join(found)


def texts_of(gaps: Results) -> list[str]:
    """The metric of held-out text, then that of a text of another kind; none where nothing was held out."""
    totals = [one for one in convergence_page.totals(gaps) if "/" not in one and one.startswith(BITS)]
    main = held_out(totals)
    return [] if main is None else [main, *(one for one in totals if one.endswith(OTHER_TEXT))]


#: A training of one seed beside bfloat16's: its run, setting and recipe, and the percent of its loss over that, by text.
Single = tuple[Where, str, str, dict[str, float]]


def pairs_of(rows: Sequence[Row]) -> list[Single]:
    """All such trainings of full runs of the larger model, in the order of the runs."""
    found: list[Single] = []
    for where, results in by_run(rows, LONG).items():
        for setting in results.settings if where.scale != QUICK else []:
            mine = results.with_setting(setting)
            base = next((name for name in BASE_NAMES.values() if name in mine.methods), "")
            metrics = texts_in(mine)
            for method in (one for one in mine.methods if one != base):
                values = {
                    one: (mine.value(setting, method, one), mine.value(setting, base, one)) for one in metrics
                }
                gaps = {one: 100 * (own / known - 1) for one, (own, known) in values.items() if own and known}
                found += [(where, setting, method, gaps)] if gaps else []
    return found


def texts_in(results: Results) -> list[str]:
    """As `texts_of`, of trainings: the metrics that both have."""
    main = held_out(results.metrics)
    return [one for one in results.metrics if one == main or one == f"{BITS}, {OTHER_TEXT}"]


def largest_single(singles: Sequence[Single]) -> str:
    """The single trainings of the last setting, which is the longest, on each text."""
    _, last, *_ = singles[-1]
    mine = [one for one in singles if one[1] == last]
    texts = dict.fromkeys(text for *_, gaps in mine for text in gaps)
    words = [
        f"on {name_of(text)} {', '.join(f'{method} {gaps[text]:+.1f}%' for _, _, method, gaps in mine if text in gaps)}"
        for text in texts
    ]
    return f"one training each of {spoken(last)}: {', '.join(words)}"


#: Sizes that stand in for models on a CPU.
SMALL = ("micro", "tiny")


def spoken(setting: str) -> str:
    """A setting as pages say it that do not explain settings: "120m, 210 MB" is 120M parameters trained on 210 MB of text."""
    size, _, budget = setting.partition(", ")
    if budget and size in SMALL:
        return f"a tiny model on {budget} of text"
    known = size.endswith("m") and size[:-1].isdigit() and bool(budget)
    return f"{size[:-1]}M parameters on {budget} of text" if known else setting


def longest_training(rows: Sequence[Row]) -> list[str]:
    """`largest_single` of all rows; none without a single training."""
    singles = pairs_of(rows)
    return [largest_single(singles)] if singles else []


def single_found(rows: Sequence[Row]) -> list[str]:
    """Every single training on a text of another kind beside its books, and what is known of the difference."""
    words = [
        f"{method}, {setting}, {where.device} {' and '.join(f'{gap:+.2f}% on {name_of(text)}' for text, gap in gaps.items())}"
        for where, setting, method, gaps in pairs_of(rows)
        if len(gaps) > 1
    ]
    if not words:
        return []
    told = "; ".join([*words, *bases_apart(rows)])
    return [" ".join([f"Loss over bfloat16's of one training each, one seed: {told}.", *rare_bytes(rows)])]


# Which part of a loss is of bytes that the training text hardly has, and how far trainings lie apart with and without them.

#: The losses of a training that are told beside each other: of all bytes of OTHER_TEXT, of its common ones, of those where rare
#: ones are deleted, of books.
SPLIT = (*(f"{one}, {OTHER_TEXT}" for one in (BITS, COMMON_BITS, LEFT_BITS)), f"{BITS}, heldout")


@dataclass(frozen=True)
class SplitLosses:
    """Of one setting: the share of rare bytes in OTHER_TEXT, and the losses SPLIT by method and seed."""

    rare: float
    bits: dict[tuple[str, int], tuple[float, ...]]

    @classmethod
    def of(cls, results: Results, setting: str) -> SplitLosses:
        """Of the trainings whose loss was split."""
        found = {(row.method, row.seed, row.metric): row.value for row in results.with_setting(setting).rows}
        keys = [key[:2] for key in found if key[2] == SPLIT[1]]
        rare = next(value for key, value in found.items() if key[2] == f"{RARE}, {OTHER_TEXT}") / 100
        return cls(rare, {key: tuple(found[*key, one] for one in SPLIT) for key in keys})

    @property
    def base(self) -> str:
        """The method that others are compared with; "" where it was not trained."""
        return next((name for name, _ in self.bits if name in BASE_NAMES.values()), "")

    @property
    def share(self) -> float:
        """The share of rare bytes in the loss, mean over trainings."""
        return fmean(1 - (1 - self.rare) * common / bits for bits, common, *_ in self.bits.values())

    def apart(self) -> Iterator[str]:
        """How far seeds of the base lie apart, then how far above it each recipe is on the same seeds."""
        base = {seed: losses for (name, seed), losses in self.bits.items() if name == self.base}
        if len(base) > 1:
            found = [100 * (max(one) / min(one) - 1) for one in zip(*base.values(), strict=True)]
            yield f"{len(base)} seeds of {self.base} lie apart by {beside(found, '.1f')}"
        for method in dict.fromkeys(name for name, _ in self.bits if name != self.base):
            pairs = [
                (self.bits[method, seed], one) for seed, one in base.items() if (method, seed) in self.bits
            ]
            if pairs:
                found = [
                    fmean(100 * (mine[n] / theirs[n] - 1) for mine, theirs in pairs)
                    for n in range(len(SPLIT))
                ]
                yield f"{method} differs from {self.base} by {beside(found, '+.1f')}"


def beside(percents: Sequence[float], shown: str) -> str:
    """Of each of SPLIT."""
    wide, common, left, books = (f"{one:{shown}}%" for one in percents)
    return f"{wide} (not counting them {common}, with them deleted from the text {left}, on books {books})"


def rare_bytes(rows: Sequence[Row]) -> list[str]:
    """What rare bytes are in the loss on OTHER_TEXT, of the largest run that split it; nothing where none did."""
    runs = {
        where: found
        for kind in (PAIRED, LONG)
        for where, found in by_run(rows, kind).items()
        if set(SPLIT) <= set(found.metrics)
    }
    run = best_run(runs)
    if run is None:
        return []
    where, results = run
    setting = [row.setting for row in results.rows if row.metric == SPLIT[1]][-1]
    split = SplitLosses.of(results, setting)
    words = "; ".join(split.apart())
    known = any(SPLIT[1] in one.metrics for one in by_run(rows, LONG).values())
    later = "" if known or not pairs_of(rows) else " Losses of the longer trainings are not split yet."
    return [
        f"{100 * split.rare:.1f}% of the bytes of {OTHER_TEXT} are characters that the training text hardly has (less than "
        f"once in a million bytes: angle brackets, @, =, straight quotes). In trainings of {spoken(setting)} ({where}) they "
        f"are {100 * split.share:.0f}% of the loss there{f', and {words}' if words else ''}.{later}"
    ]


def bases_apart(rows: Sequence[Row]) -> Iterator[str]:
    """How far bfloat16 of the same seed and steps on two GPUs lies apart, on each text; nothing where one GPU trained it."""
    runs = {where: found for where, found in by_run(rows, LONG).items() if where.scale != QUICK}
    settings = dict.fromkeys(setting for found in runs.values() for setting in found.settings)
    for setting in settings:
        bases = {
            where.device: found.with_setting(setting).of_method(name)
            for where, found in runs.items()
            for name in BASE_NAMES.values()
            if name in found.with_setting(setting).methods
        }
        if len(bases) > 1:
            yield apart_words(setting, bases)


def apart_words(setting: str, bases: dict[str, Results]) -> str:
    """The largest over the smallest loss, on each text."""
    first = next(iter(bases.values()))
    words = []
    for text in texts_in(first):
        losses = [
            value
            for one in bases.values()
            for name in one.methods
            if (value := one.value(setting, name, text))
        ]
        words.append(f"{100 * (max(losses) / min(losses) - 1):.2f}% on {name_of(text)}")
    return f"bfloat16 itself, {setting}, the same seed on {' and '.join(bases)}, differs by {' and '.join(words)}"


#: Trainings whose speed was disturbed, by setting, recipe, device and commit, and what is known of why (``reports/LOG.md``).
DISTURBED = {
    ("120m, 60 MB", "rowwise", "NVIDIA H200", "ed354348"): "beside two other jobs",
    ("120m, 60 MB", "rowwise", "NVIDIA H100 80GB HBM3", "cc61b77c"): "beside two other jobs",
}


def disturbed(row: Row | None) -> str:
    """Why the speed of a training is no undisturbed one; "" where nothing is known of that."""
    return "" if row is None else DISTURBED.get((row.setting, row.method, row.device, row.commit), "")


def ratios_found(rows: Sequence[Row]) -> dict[str, list[tuple[Row, float]]]:
    """By recipe the speed of each whole training with its ratio to bfloat16's, on the last device."""
    run = best_run({where: one for where, one in by_run(rows, LONG).items() if where.scale != QUICK})
    found: dict[str, list[tuple[Row, float]]] = {}
    for setting in run[1].settings if run else []:
        mine = [row for row in run[1].with_setting(setting).rows if row.metric == RATE] if run else []
        base = next((row.value for row in mine if row.method in BASE_NAMES.values()), None)
        for row in sorted(mine, key=lambda one: one.method) if base else []:
            if base and row.method not in BASE_NAMES.values():
                found.setdefault(row.method, []).append((row, row.value / base))
    return found


def speeds_found(rows: Sequence[Row]) -> list[str]:
    """Tokens a second of whole trainings over bfloat16's, on the last device, with their days and what disturbed them."""
    found = ratios_found(rows)
    words = [
        f"{method} {' and '.join(f'{ratio:.2f} ({noted(row)})' for row, ratio in pairs)}"
        for method, pairs in found.items()
    ]
    days = days_of([row for pairs in found.values() for row, _ in pairs])
    return [f"Whole trainings ({days}), speed over bfloat16's: {'; '.join(words)}"] if words else []


def noted(row: Row) -> str:
    """A training with what disturbed it."""
    return ", ".join(filter(None, (row.setting, disturbed(row))))


def beside_card(rows: Sequence[Row], method: str) -> str:
    """What a card on the speed of layers says of whole trainings by the same recipe, undisturbed ones where there are any; ""
    without any."""
    found = ratios_found(rows).get(method, [])
    shown = [(row, ratio) for row, ratio in found if not disturbed(row)] or found
    words = [
        f"{ratio:.2f}x ({', '.join(filter(None, (spoken(row.setting), disturbed(row))))})"
        for row, ratio in shown
    ]
    return f"whole trainings {' and '.join(words)}" if words else ""


def speeds_apart(rows: Sequence[Row]) -> list[str]:
    """A sentence on recipes whose trainings differ in the number of steps alone, which their speed does not depend on."""
    words = []
    for method, pairs in ratios_found(rows).items():
        said = [f"{row.value / 1e3:.0f} ({noted(row)}, {row.date[:10]} at {row.commit})" for row, _ in pairs]
        if len({row.setting.partition(", ")[0] for row, _ in pairs}) < len(pairs):
            known = any(disturbed(row) for row, _ in pairs)
            words.append(f"{method} {' and '.join(said)}{'' if known else ', which nothing explains'}")
    if not words:
        return []
    return [
        "Trainings of one model differ in the number of steps alone, so their speeds are one quantity measured twice, thousand "
        f"tokens a second: {'; '.join(words)}."
    ]


def converged(rows: Sequence[Row]) -> list[str]:
    """Which recipes are within the margin of bfloat16's loss, undecided and beyond it, on each text."""
    run = paired(rows)
    return [
        f"Loss on {name_of(metric)}, margin {MARGIN}%: {verdicts_of(run[1], metric)}"
        for metric in (texts_of(run[1]) if run else [])
        if run
    ]


def verdicts_of(gaps: Results, metric: str) -> str:
    """The recipes that are within the margin, undecided and beyond it, on one text."""
    verdicts: dict[str, list[str]] = {WITHIN: [], UNDECIDED: [], BEYOND: []}
    for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows):
        one = convergence_page.gap_of(gaps, setting, method, metric)
        if one is not None:
            verdicts[one.verdict(MARGIN)].append(method)
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in verdicts.items() if found)


def base_found(rows: Sequence[Row], where: Where, gaps: Results) -> list[str]:
    """How far bfloat16 is from itself on another device: what one base can say at the margin."""
    known = {one: convergence_page.baseline_gap(rows, where, one) for one in texts_of(gaps)}
    found = {metric: one for metric, one in known.items() if one is not None}
    if not found:
        return []
    words = [f"{one.mean:+.2f} ± {one.half:.2f}% on {name_of(metric)}" for metric, (_, one) in found.items()]
    device = next(iter(found.values()))[0]
    return [
        f"bfloat16 trained again with the same seeds and text on {device} differs from bfloat16 here by {' and '.join(words)}: "
        f"a recipe closer to the margin of {MARGIN}% than that could be on its other side beside that bfloat16."
    ]


def held_out(metrics: Sequence[str]) -> str | None:
    """The metric of all text that was held out; None where there is none."""
    return next((one for one in metrics if one.startswith(f"{BITS}, held") and "/" not in one), None)


def gaps_found(where: Where, gaps: Results) -> list[str]:
    """The gap of each recipe on held-out text and on one of another kind; then further texts where one is beyond the margin."""
    metrics, told = [one for one in convergence_page.totals(gaps) if "/" not in one], texts_of(gaps)
    sentences = [f"Gap to bfloat16 on {name_of(one)}, {where}: {listed(gaps, one, where)}." for one in told]
    for metric in metrics:
        if told and metric not in told and metric.startswith(BITS):
            words = listed(gaps, metric, where, beyond=True)
            sentences += [f"Beyond the margin on {name_of(metric)}, {where}: {words}."] if words else []
    return sentences


def listed(gaps: Results, metric: str, where: Where, beyond: bool = False) -> str:
    """Every recipe with its gap, or those beyond the margin alone; seeds where some are missing."""
    words, planned = [], PLANS[where.scale].seeds
    for setting, method in dict.fromkeys((row.setting, row.method) for row in gaps.rows):
        one = convergence_page.gap_of(gaps, setting, method, metric)
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
    why = disturbed(results.row(setting, method, RATE))
    words += (
        [] if speed is None else [f"{speed / 1e3:.0f} thousand tokens a second{f' ({why})' if why else ''}"]
    )
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
    healthy = results.value(setting, convergence.HEALTHY, metric) if metric else None
    if metric is None or not healthy:
        return []
    words = [
        f"{name} {100 * (value / healthy - 1):+.2f}%"
        for name in dict.fromkeys(row.method for row in results.rows)
        if name != convergence.HEALTHY and (value := results.value(setting, name, metric)) is not None
    ]
    return (
        [f"Held-out loss over that without an injected error, {where}: {'; '.join(words)}."] if words else []
    )


#: What held-out texts are, by the names of metrics.
CALLED = {"heldout": "held-out books", "held out": "held-out text"}


def name_of(metric: str) -> str:
    """The text of a metric of bits per byte, in words."""
    name = metric.removeprefix(f"{BITS}, ")
    return CALLED.get(name, name)
