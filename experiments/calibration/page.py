"""The page of experiment `calibration`: what methods win over rounding, at which size, in how many minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ao_lab.intervals import rounded
from experiments.calibration import accuracy_targets, choice, peers_page, shapes_page
from experiments.calibration.cases import EXPERIMENT, ROUNDING, planned
from experiments.calibration.drawings import (
    bytes_drawing,
    cases,
    is_choice,
    methods,
    minutes_drawing,
    seconds_of,
)
from experiments.calibration.encoders import encoder_sections
from experiments.harness.rows import Row, interval
from experiments.models.causal_lm import BASE
from experiments.report import accuracies
from experiments.report.content import Card, Comparison, Section, Table, member
from experiments.report.real_runs import (
    CHANGE,
    KL,
    LOSS,
    LOSS_ERROR,
    PERPLEXITY,
    RECOVERED,
    RECOVERED_ERROR,
    RealRun,
    about_of,
    best_runs,
    quality_cells,
    real_runs,
    relative,
    title_of,
    windows_of,
)
from experiments.report.results import Results, failures, interval_cell, number
from experiments.report.targets import RunTargets

TITLE = "Quantization with data: what calibration methods win over rounding, on real models"
QUESTION = "How much of the loss of rounding do methods with data take away, in how many minutes?"
ABOUT = (
    "Every method in every scheme that it is defined for, on pretrained language models that pip packages carry or on anyone's "
    "folder (`ao-lab reproduce calibration --model DIR`). Methods see sequences of books; two other texts judge.",
    "Recovered is the share of rounding's KL divergence from the dense model that a method takes away, paired by window.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = (
    "calibration-minutes-smollm2-135m-instruct-full",
    "calibration-minutes-smollm2-135m-instruct-quick",
)
TEXT = (
    "Weights of all linear layers are quantized but those of a tied head; where a setting names inputs, these are quantized "
    "too, with dynamic scales. Rounding uses the scheme's own scales. KL is of the next-token distribution from the dense "
    "model's; after ± stands half of the 95% interval, over windows of a text of one document and over documents where there "
    "are several. Minutes hold the choosing, of all budgets, where schemes were chosen.",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """The method that recovers most in each scheme, of each model, and the automatic choice beside rules by hand."""
    return [sentence for run in best_runs(rows) for sentence in [*best_of(run), *choices_of(run)]]


def main_finding(rows: Sequence[Row]) -> str:
    """The first of the findings, and how long the best methods take."""
    found, runs = findings(rows), best_runs(rows)
    return "; ".join([found[0].removesuffix("."), *minutes_of(runs[0])]) if found else ""


def minutes_of(run: RealRun) -> list[str]:
    """How many minutes the best method of a scheme takes on the model, the least and the most over schemes."""
    best = [(one.scheme, one.method) for one in bests(run, next(iter(run.texts)))]
    minutes = [value / 60 for one in best if (value := seconds_of(run, *one)) is not None]
    if not minutes:
        return []
    least, most = (number(limit(minutes), 1) for limit in (min, max))
    which = (
        "these methods"
        if len(minutes) == len(best)
        else f"those {len(minutes)} of {len(best)} that were timed"
    )
    return [f"{which} take {least if least == most else f'{least} to {most}'} minutes on this model"]


#: Bits of a weight, scales and all, and how many times rounding's are more than its rounding of this number.
BITS, MORE_BITS = "bits per weight", 1.02
#: The scheme of the first page's number.
QUOTED = "int4_g64"


def cards(rows: Sequence[Row]) -> list[Card]:
    """What the best method leaves of the loss of 4-bit weights, beside rounding, on the first model's first text."""
    for run in best_runs(rows):
        text, results = next(iter(run.texts.items()))
        name = next((one.method for one in bests(run, text) if one.scheme == QUOTED), "")
        row = results.row(QUOTED, name, PERPLEXITY)
        rounded = relative(results, QUOTED, ROUNDING)
        if row is not None and rounded:
            what = (
                f"change of the perplexity of {run.model} on {text} ({windows_of(results)}) with int4 weights (symmetric), "
                f"groups of 64, by {name}"
            )
            beside = f"{rounded} by rounding; 0 is bfloat16{quantized_before(run)}"
            return [Card(row, relative(results, QUOTED, name), what, beside, rows=results.rows)]
    return []


def quantized_before(run: RealRun) -> str:
    """What follows "bfloat16" where its weights are a quantized file's; nothing of weights that were on no grid."""
    grid = run.fact("grid: ")
    return "" if grid.startswith(("none", "not stated")) else f" of a file quantized before ({grid})"


class Best(NamedTuple):
    """The method of a scheme that does best on the other text, of those that store no more bits than rounding, the share that
    it removes, and how many were compared."""

    scheme: str
    method: str
    share: float
    half: float | None
    compared: int


def bests(run: RealRun, text: str) -> list[Best]:
    """Of each scheme, where it was measured."""
    found, results = [], run.texts[text]
    for setting in (one for one in cases(run) if not is_choice(one)):
        names = [one for one in methods(results, setting) if not is_larger(run, setting, one)]
        name = run.chosen(text, setting, names, RECOVERED, most=True)
        value, half = results.value(setting, name, RECOVERED), results.half(setting, name, RECOVERED_ERROR)
        if value is not None and math.isfinite(value):
            tried = [one for one in names if results.value(setting, one, RECOVERED) is not None]
            found.append(Best(setting, name, value, half, len({*tried} - {ROUNDING})))
    return found


def is_larger(run: RealRun, setting: str, method: str) -> bool:
    """Whether a method stores more bits a weight than rounding in this scheme, as low-rank factors are."""
    mine, plain = (run.whole.value(setting, one, BITS) for one in (method, ROUNDING))
    return mine is not None and plain is not None and mine > plain * MORE_BITS


def best_of(run: RealRun) -> list[str]:
    """A sentence for each text on which a method was measured."""
    return [sentence(run, text, found) for text in run.texts if (found := bests(run, text))]


def sentence(run: RealRun, text: str, found: Sequence[Best]) -> str:
    """Of one text: the share of each scheme and what is left of its loss, the least first, its method, and where no other was
    measured."""
    results = run.texts[text]
    changes = {one.scheme: results.value(one.scheme, one.method, PERPLEXITY) for one in found}
    words = [
        f"{one.scheme} {number(one.share, 0)}% by {one.method}{' (the only one measured)' * (one.compared <= 1)}, "
        f"{signed(changes[one.scheme])}"
        for one in sorted(found, key=lambda one: changes[one.scheme] or math.inf)
    ]
    by = "the method that is best on the other text" if len(run.texts) > 1 else "the best method"
    return (
        f"{run.model}, {text} ({run.where.run}), share of rounding's KL divergence that {by} removes, and change of perplexity "
        f"that is left: {'; '.join(words)}."
    )


def signed(value: float | None) -> str:
    """A change in percent."""
    return "" if value is None else f"{value:+.1f}%"


def choices_of(run: RealRun) -> list[str]:
    """A sentence for each text on which the automatic choice was measured: its KL over that of each rule under its budget, both
    quantized by the last method that was measured."""
    sentences = []
    for text, lines in rule_lines(run).items():
        last = lines[-1][1]
        words = [
            f"within {budget} KL {kl}, {over} times that of {name} ({bits} bits)"
            for budget, method, kl, name, bits, _, over in lines
            if method == last
        ]
        sentences.append(
            f"{run.model}, {text} ({run.where.run}), schemes of layers by the automatic choice, {last}: {'; '.join(words)}."
        )
    return sentences


def best_table(run: RealRun, text: str) -> list[Table]:
    """The best method of each scheme; none where no method was measured."""
    lines = [
        [one.scheme, one.method, rounded(one.share, one.half, unit="%"), str(one.compared)]
        for one in bests(run, text)
    ]
    by = " at rounding's size" + (", chosen on the other text" if len(run.texts) > 1 else "")
    columns = ["scheme", f"best method{by}", "of rounding's KL removed", "methods compared with rounding"]
    return (
        [Table(f"{run.model}, {text}: best method of each scheme", columns, lines, run.texts[text].rows)]
        if lines
        else []
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run, and published accuracies of methods with data."""
    board = accuracies.sections(EXPERIMENT, rows)
    return [*map(section, real_runs(rows)), *encoder_sections(rows), *shapes_page.sections(rows), *board]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Accuracy on language models; seconds and memory at large shapes."""
    return [*accuracy_targets.targets_by_run(rows), *shapes_page.targets_by_run(rows)]


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Published accuracies of methods with data beside ours of the same model."""
    return accuracies.comparisons(EXPERIMENT, rows)


def section(run: RealRun) -> Section:
    """What the methods win on one model."""
    tables = [table(run, name, results) for name, results in run.texts.items()]
    tables += [one for name in run.texts for one in best_table(run, name)]
    tables += [one for one in (draws_table(run), choice_table(run), rules_table(run)) if one.lines]
    tables += peers_page.tables(run)
    drawings = [bytes_drawing(run), minutes_drawing(run)] if run.texts else []
    return Section(
        title_of(run),
        [*about_of(run), *peers_page.about(run), *missing(run), *TEXT, *failures(run.whole)],
        [one for one in drawings if one],
        tables,
    )


def missing(run: RealRun) -> list[str]:
    """What the scale asks for and no row holds, as a sentence; none where all of it was measured."""
    measured = {(row.setting, row.method) for row in run.whole.rows}
    wanted = planned(run.where.scale)
    told = []
    for setting in dict.fromkeys(one for one, _ in wanted):
        arms = [arm for one, arm in wanted if one == setting]
        absent = [arm for arm in arms if (setting, arm) not in measured]
        if absent:
            names = [member(arm) for arm in absent]
            told.append(setting if len(absent) == len(arms) else f"{setting} by {', '.join(names)}")
    return [f"**Not measured yet at this scale**: {'; '.join(told)}."] if told else []


#: Columns of a table's values.
COLUMNS = (
    "bits per weight", "perplexity", CHANGE, KL, "KL recovered (%)", "loss recovered (%)", "layers' error over rounding's",
    "minutes",
)  # fmt: skip


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line per scheme and method."""
    lines = [
        [setting, method, *cells(run, results, setting, method)]
        for setting in cases(run)
        for method in methods(results, setting)
    ]
    columns = ["scheme", "method", *COLUMNS]
    return Table(f"{run.model}, {text}", columns, lines, [*results.rows, *run.whole.rows])


def cells(run: RealRun, results: Results, setting: str, method: str) -> list[str]:
    """The values of one method in one scheme."""
    seconds = seconds_of(run, setting, method)
    return [
        number(run.whole.value(setting, method, "bits per weight"), 2),
        *quality_cells(results, setting, method),
        percent(results, setting, method, RECOVERED, RECOVERED_ERROR),
        percent(results, setting, method, LOSS, LOSS_ERROR),
        number(run.whole.value(setting, method, "output error over rounding's"), 3),
        number(seconds, 2, 1 / 60),
    ]


def draws_table(run: RealRun) -> Table:
    """Methods that were measured on several draws: recovered KL of each text, mean and 95% interval over draws, and by how much
    each differs from the first method of its scheme, paired by draw."""
    lines = []
    for text, results in run.texts.items():
        found = recovered_by_seed(results)
        for (setting, method), values in found.items():
            base = next(one for one in found if one[0] == setting)
            others = found[base]
            gains = (
                []
                if base[1] == method
                else [values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())]
            )
            paired = f"{over_draws(gains)} over {base[1]}" if len(gains) > 1 else ""
            cells = [str(len(values)), over_draws(list(values.values())), paired]
            lines.append([setting, method, text, *cells])
    columns = [
        "scheme", "method", "text", "draws", "KL recovered (%), mean ± 95% interval over draws", "paired difference (points)",
    ]  # fmt: skip
    return Table(f"{run.model}: draws of the sequences that methods see", columns, lines, run.whole.rows)


def recovered_by_seed(results: Results) -> dict[tuple[str, str], dict[int, float]]:
    """Recovered KL by seed, of each scheme and method that several seeds were measured of."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in results.rows:
        if row.metric == RECOVERED and math.isfinite(row.value):
            found.setdefault((row.setting, row.method), {})[row.seed] = row.value
    return {key: values for key, values in found.items() if len(values) > 1}


def over_draws(values: Sequence[float]) -> str:
    """The mean and half of Student's 95% interval."""
    found = interval(values)
    return f"{found.mean:.1f} ± {found.half:.1f}"


def choice_table(run: RealRun) -> Table:
    """Choices: what was predicted and measured on sequences like those that methods see, beside one scheme for all layers."""
    lines = []
    for setting in cases(run):
        if setting.startswith(choice.NAME):
            value = partial(run.whole.value, setting, ROUNDING)
            uniform = [
                f"{name} {known:.3f}"
                for name in choice.OPTIONS
                if (known := value(f"uniform {name}: KL measured")) is not None
            ]
            words = (
                "predicted",
                "measured",
                "of one scheme at this size",
                f"of {choice.BY_HAND} at this size",
            )
            kls = [number(value(f"choice: KL {word}"), 3) for word in words]
            ranks = number(value("choice: rank correlation of layers alone"), 3)
            alone = number(value("choice: layers measured alone"), 0)
            ranked = f"{ranks} ({alone} layers)" if ranks else ""
            tokens = number(value("choice: tokens of scores and measurements"), 0)
            lines.append(
                [setting, number(value("bits per weight"), 2), tokens, *kls, ranked, ", ".join(uniform)]
            )
    columns = [
        "budget", "bits per weight", "tokens", "KL predicted", "KL measured", "one scheme at this size: KL",
        f"{choice.BY_HAND}, at this size: KL", "rank correlation of layers alone", "one scheme for all layers: KL",
    ]  # fmt: skip
    return Table(
        f"{run.model}: the automatic choice, on other sequences of its own text",
        columns,
        lines,
        run.whole.rows,
    )


def rules_table(run: RealRun) -> Table:
    """Choices on the evaluation texts beside one scheme for all layers and a rule by hand, quantized by the same methods."""
    lines = [[text, *line] for text, found in rule_lines(run).items() for line in found]
    columns = [
        "text", "budget", "method", "KL of the choice", "held against", "its bits per weight", "its KL",
        "choice / this",
    ]  # fmt: skip
    return Table(f"{run.model}: the automatic choice against rules by hand", columns, lines, run.whole.rows)


def rule_lines(run: RealRun) -> dict[str, list[list[str]]]:
    """By text a line for each budget, method and rule that was measured; texts without any are left out."""
    found: dict[str, list[list[str]]] = {}
    for text, results in run.texts.items():
        for bits in choice.BUDGETS:
            for method in choice.RULE_ARMS:
                ours = results.value(choice.setting(bits), method, KL)
                for rule in choice.RULES if ours is not None else ():
                    cells = rule_cells(run, results, choice.setting(bits, rule), method)
                    if cells:
                        found.setdefault(text, []).append([f"{bits:g} bits", method, number(ours, 3), *cells])
    return found


def rule_cells(run: RealRun, results: Results, setting: str, method: str) -> list[str]:
    """Which form of a rule was measured, its size and KL, and the choice's KL over that; empty where it was not measured."""
    words = (KL, choice.OVER)
    kl, over = (results.value(setting, method, word) for word in words)
    half = results.half(setting, method, choice.OVER_ERROR)
    if kl is None or over is None or half is None:
        return []
    told = (row.metric for row in run.whole.rows if (row.setting, row.method) == (setting, method))
    name = next(word.removeprefix("rule: ") for word in told if word.startswith("rule: "))
    bits = number(run.whole.value(setting, method, "bits per weight"), 2)
    return [name, bits, number(kl, 3), interval_cell(over, half)]


def percent(results: Results, setting: str, method: str, metric: str, error: str) -> str:
    """A percentage and half of its 95% interval; nothing for rounding, which recovers nothing of itself."""
    return "" if method in (ROUNDING, BASE) else results.with_half(setting, method, metric, error)
