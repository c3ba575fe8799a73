"""The page of experiment `ladder`: rungs of each model, levers alone and left out, operators, idle time, acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.harness.rows import Row
from experiments.ladder import acceptance, summary
from experiments.ladder.run import BATCH, CHANGE, IDLE, KIND, LARGEST, ONE, ROUND, TRACE
from experiments.ladder.rungs import ALONE, EAGER, GRAPHS, LEFT_OUT, Levers, ladder, of_model
from experiments.ladder.subjects import MODELS, STAND_INS, Subject
from experiments.ladder.summary import COUNT, MEAN, PUBLISHED, TIME, last_rung, speedup, times
from experiments.ladder.trace import OPERATORS
from experiments.report.content import Drawing, Headline, Section, Table, readable
from experiments.report.phones import ratio_map_twice
from experiments.report.ratio_maps import Ratios
from experiments.report.results import Results, Where, best_run, by_run, failures, number
from experiments.report.targets import RunTargets, Target, limit_of

EXPERIMENT = "ladder"
TITLE = "Inference optimisations, from eager bfloat16 to all of them"
QUESTION = "How much do inference optimisations gain on models of several modalities?"
NOTE = "its text could not be read: never called a match"
ABOUT = (
    (
        "Llama-3.1-8B, Code Llama 34B, Chameleon 7B (text; images with guidance), Seamless M4T v2 and HSTU in their "
        "exact shapes with random weights. The first rung is eager bfloat16 with a dynamic cache; each further rung of the "
        "ladder adds one optimisation, and sections say which of them were measured. Tokens come from a loop without host "
        "synchronisation, in the first rung too, where transformers' own generate() takes longer."
    ),
    f"A study of such models (arXiv 2410.00215) reports {PUBLISHED} times its baseline with all of its levers; {NOTE}. Which "
    "models, batches and GPUs that is, and whether it is a mean, is not known here.",
)
FEATURED = ("ladder-batch-1-full", "ladder-batch-1-quick")
ENDS_ALONE = (
    "**First and last rung only were measured**: the last one has all optimisations at once, so what each of them gains, "
    "weights in fewer bits among them, is not known here."
)
FIRST_ALONE = "**The first rung only was measured.**"
STAND_IN = "**Proxy models**: tiny models on a CPU, whose times and shares mean nothing; a check that all of it runs."
TEXT = (
    "Milliseconds of a unit are the median of the runs. Idle is 1 - B / T: B the length of the union of the intervals in which "
    "a kernel or a copy ran, in a trace, T the time without the profiler. Shares are of the sum of the kernels' times.",
    "Outputs (logits) of each configuration are compared with those of the same weights by fused attention and a cache in "
    "bfloat16, not compiled: their change is the norm of the difference over the norm of the latter. Weights are rounded in "
    "both, so it is of the cache, of compilation and of the order of sums, which alone makes that of eager bfloat16; with "
    "random weights it says nothing of a trained model. Each lever is checked to have changed what it is to change.",
)
SPECULATION = (
    "With random weights no number of accepted drafts means anything: a round is timed, and a token's time follows for "
    "acceptances a of one draft, (1 - a^(k + 1)) / (1 - a) tokens a round of k drafts."
)
ACCEPTANCE = (
    "Models of bytes, trained here; a byte is easier to draft than a word. The share of drafts counts those behind the first "
    "wrong one of a round as wrong. All tokens are compared with those of greedy decoding without drafts.",
)
#: Bits a byte from which on a model has hardly learned: its drafts are constant, and all of them are accepted. A byte of
#: English prose takes some 4.5 bits by the frequencies of bytes alone, 3.5 by those of pairs.
UNTRAINED = 3.5
BY_NAME = {one.name: one for one in (*MODELS, *STAND_INS)}


def real(where: Where) -> bool:
    """Whether times mean something."""
    return where.scale == "full" and where.device != "cpu"


def findings(rows: Sequence[Row]) -> list[str]:
    """Each model's ladder, the mean over models, idle shares after graphs, acceptance."""
    words = [
        text
        for where, results in by_run(rows, KIND).items()
        if real(where)
        for setting in (ONE, LARGEST)
        if (text := ladder_words(where, results, setting))
    ]
    return [*means(rows), *words, *idle_words(rows), *acceptance_words(rows)]


def means(rows: Sequence[Row]) -> list[str]:
    """The geometric means of the best run over all models, with the published number beside; none of a part of the models."""
    best = best_run({where: one for where, one in by_run(rows, summary.KIND).items() if real(where)})
    if best is None:
        return []
    parts = [
        f"{setting} {number(best[1].value(setting, summary.METHOD, MEAN), 2)} over "
        f"{number(best[1].value(setting, summary.METHOD, COUNT), 0)} models"
        for setting in best[1].settings
        if (best[1].value(setting, summary.METHOD, COUNT) or 0) >= len(MODELS)
    ]
    if not parts:
        return []
    return [
        f"Speed with all optimisations over eager bfloat16 ({best[0].device}), geometric mean: {', '.join(parts)}; "
        f"published {PUBLISHED} ({NOTE})."
    ]


def ladder_words(where: Where, results: Results, setting: str) -> str:
    """First and last rung of a model."""
    found = times(results.with_setting(setting).rows)
    one = BY_NAME.get(where.data)
    last = None if one is None else last_rung(one, found)
    if one is None or last is None or EAGER.name not in found:
        return ""
    batch = f" ({number(results.value(setting, EAGER.name, BATCH), 0)})" if setting == LARGEST else ""
    unit = f"{'an' if one.unit[0] in 'aeiou' else 'a'} {one.unit}"
    return (
        f"{where.data}, {setting}{batch}, {where.device}: {number(found[EAGER.name], 2)} ms {unit} in eager bfloat16, "
        f"{number(found[last.name], 2)} ms with {last.name}, {number(speedup(one, found), 2)} times as fast"
        f"{changed_words(results.value(setting, last.name, CHANGE))}."
    )


def changed_words(change: float | None) -> str:
    """How far outputs are from those of the same weights, behind a speed; nothing where it was not measured."""
    return (
        ""
        if change is None
        else f"; outputs differ from those of the same weights by {number(change, 3)} of their norm"
    )


def idle_words(rows: Sequence[Row]) -> list[str]:
    """The first rung's and the largest idle share after graphs."""
    words = []
    for where, results in by_run(rows, TRACE).items():
        before, after = results.value(ONE, EAGER.name, IDLE), after_graphs(results)
        if real(where) and before is not None and after is not None:
            words.append(
                f"{where.data}, {where.device}: idle {number(before, 1, 100)}% of the time at batch 1 on the first rung, "
                f"at most {number(after, 1, 100)}% with CUDA graphs."
            )
    return words


def after_graphs(results: Results) -> float | None:
    """The largest idle share of rungs with CUDA graphs."""
    found = [row.value for row in results.rows if row.metric == IDLE and "graphs" in row.method.split(", ")]
    return max(found, default=None)


def acceptance_words(rows: Sequence[Row]) -> list[str]:
    """The best exit of each arm."""
    best = best_run(learned(rows))
    if best is None:
        return []
    parts = [
        f"{method} {number(row.value, 2)}"
        for method in best[1].methods
        for row in [best[1].row(best[1].settings[0], method, acceptance.PER_ROUND)]
        if row is not None
    ]
    return [f"Tokens a round of self-speculation, models of bytes trained here: {'; '.join(parts)}."]


def learned(rows: Sequence[Row]) -> dict[Where, Results]:
    """Acceptances at full scale of models that have learned; a model near the frequencies of bytes drafts what is constant."""
    found = {}
    for where, results in by_run(rows, acceptance.KIND).items():
        bits = {(row.setting, row.method): row.value for row in results.rows if row.metric == acceptance.BITS}
        kept = [
            row for row in results.rows if bits.get((row.setting, row.method), UNTRAINED) < UNTRAINED
        ]  # fmt: skip
        if where.scale == "full" and kept:
            found[where] = Results(kept)
    return found


def main_finding(rows: Sequence[Row]) -> str:
    """One line of the first page."""
    otherwise = "Only tiny proxy models have been measured so far, whose times mean nothing" if rows else ""
    return next((f"{one.rstrip('.')}{ends_note(rows)}" for one in [*means(rows), *single(rows)]), otherwise)


def ends_note(rows: Sequence[Row]) -> str:
    """What follows a speed with all optimisations where no model has more than its first and its last rung."""
    models = {
        where: found for where, found in by_run(rows, KIND).items() if real(where) and where.data in BY_NAME
    }
    alone = models and all(ends_alone(BY_NAME[where.data], found) for where, found in models.items())
    return "; first and last rung only were measured" if alone else ""


def single(rows: Sequence[Row]) -> list[str]:
    """Each model's last rung over the first at batch 1, where there is no mean yet."""
    ratios = {
        where.data: speedup(BY_NAME[where.data], times(results.with_setting(ONE).rows))
        for where, results in by_run(rows, KIND).items()
        if real(where) and where.data in BY_NAME
    }
    parts = [f"{name} {number(ratio, 2)}" for name, ratio in ratios.items() if ratio is not None]
    return (
        [
            f"Speed with all optimisations over eager bfloat16, {ONE}: {', '.join(parts)} "
            f"({len(parts)} of {len(MODELS)} models)"
        ]
        if parts
        else []
    )


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Means over all models, and idle shares after graphs."""
    found = []
    for where, results in by_run(rows, summary.KIND).items():
        if real(where):
            targets = [mean_target(results, setting) for setting in (ONE, LARGEST)]
            found.append(RunTargets(where, targets, MEAN, "times the first rung"))
    for where, results in by_run(rows, TRACE).items():
        if real(where):
            limit = limit_of(EXPERIMENT, where.data, IDLE)
            value = after_graphs(results)
            target = limit.target(
                "idle share with CUDA graphs", value, value_format=".3f", limit_format=".2f"
            )
            found.append(RunTargets(where, [target], IDLE, "of the time"))
    return found


def mean_target(results: Results, setting: str) -> Target:
    """A mean counts where all models are in it."""
    value, count = (results.value(setting, summary.METHOD, metric) for metric in (MEAN, COUNT))
    whole = count is not None and count >= len(MODELS)
    limit = limit_of(EXPERIMENT, setting, MEAN)
    return limit.target(
        setting, value if whole else None, value_format=".2f", day=results.day(setting, summary.METHOD)
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """All models, then each, then acceptance."""
    traces = by_run(rows, TRACE)
    return [
        *summary_sections(rows),
        *(model_section(where, results, traces.get(where)) for where, results in by_run(rows, KIND).items()),
        *(acceptance_section(where, results) for where, results in learned(rows).items()),
    ]


def summary_sections(rows: Sequence[Row]) -> Iterator[Section]:
    """Speeds over the first rung of all models of a run, and their mean beside the published number where there is one."""
    means = {(where.scale, where.device): found for where, found in by_run(rows, summary.KIND).items()}
    runs: dict[tuple[str, str], dict[str, Results]] = {}
    for where, results in by_run(rows, KIND).items():
        runs.setdefault((where.scale, where.device), {})[where.data] = results
    for run in dict.fromkeys([*means, *runs]):
        where, tables_of = Where(*run, summary.DATA), runs.get(run, {})
        settings = dict.fromkeys(setting for one in tables_of.values() for setting in one.settings)
        drawings = [one for setting in settings for one in picture(where, tables_of, setting)]
        tables = [mean_table(means[run])] if run in means else []
        yield Section(f"All models ({where.run})", [] if real(where) else [STAND_IN], drawings, tables)


def mean_table(results: Results) -> Table:
    """Geometric means over models by setting."""
    lines = []
    for setting in results.settings:
        mean, count = (results.value(setting, summary.METHOD, metric) for metric in (MEAN, COUNT))
        lines.append([setting, number(mean, 2), number(count, 0), number(PUBLISHED, 2), NOTE])
    columns = ["setting", "last rung over first", "models", "published", "of the published"]
    return Table("Geometric mean over models", columns, lines, results.rows)


def picture(where: Where, tables_of: dict[str, Results], setting: str) -> list[Drawing]:
    """Speed over the first rung, rungs by models; nothing where no model has a second one."""
    names = [
        one
        for one, results in tables_of.items()
        if one in BY_NAME and last_rung(BY_NAME[one], times(results.with_setting(setting).rows))
    ]
    if not names:
        return []
    rungs = [
        one
        for one in ladder()
        if not one.speculation
        and any(over_first(BY_NAME[name], tables_of[name], setting, one) is not None for name in names)
    ]
    values = [[over_first(BY_NAME[name], tables_of[name], setting, rung) for name in names] for rung in rungs]
    lines = [rung_name(one, own_weights(names, line)) for one, line in zip(rungs, values, strict=True)]
    ratios = Ratios(lines, list(map(titled, names)), values, "speed over the first rung", end=16.0)
    figures = ratio_map_twice(ratios)
    for figure, rotation in zip(figures, (30, 90), strict=True):
        figure.axes[0].tick_params(axis="x", rotation=rotation)
    ends = all(ends_alone(BY_NAME[name], tables_of[name]) for name in names)
    name = f"ladder-{setting.replace(' ', '-')}-{where.ending}"
    caption = (
        f"Speed over the first rung, eager bfloat16, {setting}, {where.device}: a column a model, a line a rung, "
        f"{'the first and the last only' if ends else 'which adds one optimisation'}. Models of which the first rung alone was "
        "measured are left out."
    )
    return [Drawing(name, caption, *figures)]


def ends_alone(one: Subject, results: Results) -> bool:
    """Whether of a model's ladder no rung between the first and the last measured one has a time in any setting."""
    return len(timed_rungs(one, results)) <= 2


def timed_rungs(one: Subject, results: Results) -> list[Levers]:
    """The rungs of a model that have a time in any setting, without self-speculation."""
    found = {row.method for row in results.rows if row.metric == TIME}
    return [rung for rung in ladder(one.weights) if not rung.speculation and rung.name in found]


def extent(one: Subject, results: Results) -> list[str]:
    """That a model's first and last rung alone were measured, or its first; nothing where there are more."""
    if not ends_alone(one, results):
        return []
    return [FIRST_ALONE if timed_rungs(one, results) == [EAGER] else ENDS_ALONE]


def own_weights(names: Sequence[str], line: Sequence[float | None]) -> list[tuple[str, str]]:
    """The weights in 8 and in 4 bits of the models that have a value in a line."""
    return [
        BY_NAME[name].weights for name, value in zip(names, line, strict=True) if value is not None
    ]  # fmt: skip


def rung_name(rung: Levers, weights: Sequence[tuple[str, str]]) -> str:
    """A rung as a line of a figure whose models have these weights in 8 and in 4 bits: all that the line stands for."""
    own = dict.fromkeys(of_model(rung, one).weights for one in weights)
    return rung.name.replace(rung.weights, " or ".join(own)) if rung.weights else rung.name


def titled(name: str) -> str:
    """A model's name in a figure of rungs, with its weights where those of 8 bits are no int8."""
    weights = BY_NAME[name].weights[0]
    return name if weights == "int8" else f"{name} ({weights} weights)"


def over_first(one: Subject, results: Results, setting: str, rung: Levers) -> float | None:
    """A rung's speed over the first, with the model's own weights."""
    first = results.value(setting, EAGER.name, TIME)
    value = results.value(setting, of_model(rung, one.weights).name, TIME)
    return None if first is None or not value else first / value


def model_section(where: Where, results: Results, traces: Results | None) -> Section:
    """Rungs, single levers, operators, self-speculation."""
    one = BY_NAME.get(where.data)
    if one is None:
        return Section(f"{readable(where.data)} ({where.run})", ["This model is no longer measured."])
    text = [*extent(one, results), *TEXT]
    text += [*([] if real(where) else [STAND_IN]), *failures(results)]
    tables = [table for table in (rungs_table(one, results), levers_table(one, results)) if table.lines]
    if traces is not None:
        tables.append(operators_table(traces))
        text += failures(traces)
    rounds = Results([row for row in results.rows if row.metric == ROUND])
    if rounds.rows:
        text.append(SPECULATION)
        tables.append(speculation_table(results, rounds))
    return Section(f"{readable(where.data)} ({where.run})", text, [], tables)


def rungs_table(one: Subject, results: Results) -> Table:
    """Time and speed of each rung at each batch."""
    lines = []
    for setting in results.settings:
        for rung in ladder(one.weights):
            time = results.value(setting, rung.name, TIME)
            if time is not None:
                batch = number(results.value(setting, rung.name, BATCH), 0)
                speed = number(over_first(one, results, setting, rung), 2)
                over = results.value(setting, GRAPHS.name, TIME)
                graphs = number(None if over is None else over / time, 2)
                change = number(results.value(setting, rung.name, CHANGE), 3)
                lines.append([rung.name, batch, number(time, 3), speed, graphs, change])
    columns = [
        "rung",
        "batch",
        f"ms {'an' if one.unit[0] in 'aeiou' else 'a'} {one.unit}",
        "over the first",
        "over bfloat16 with graphs",
        "change of outputs (of their norm)",
    ]
    return filled("Rungs", columns, lines, results.rows)


def filled(
    caption: str, columns: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Row]
) -> Table:
    """A table without the columns that no line has a value in."""
    kept = [place for place in range(len(columns)) if not lines or any(line[place] for line in lines)]
    return Table(
        caption, [columns[place] for place in kept], [[line[place] for place in kept] for line in lines], rows
    )


def levers_table(one: Subject, results: Results) -> Table:
    """Each lever alone over the first rung, and what the last loses without it."""
    lines = []
    for setting in results.settings:
        found = times(results.with_setting(setting).rows)
        last = last_rung(one, found)
        for name, levers in ALONE.items():
            own = of_model(levers, one.weights).name
            if own in found and EAGER.name in found:
                lines.append([f"{name}, alone", setting, number(found[EAGER.name] / found[own], 2), ""])
        for name, levers in LEFT_OUT.items():
            own = of_model(levers, one.weights).name
            if last is not None and own in found and own != last.name:
                lines.append([f"{name}, left out", setting, "", number(found[own] / found[last.name], 2)])
    columns = ["lever", "setting", "speed over the first rung", "the last rung's speed over this"]
    return filled("Levers alone and left out", columns, lines, results.rows)


def operators_table(traces: Results) -> Table:
    """Idle time and shares of operators, in percent."""
    metrics = [IDLE, *(f"share, {name}" for name in OPERATORS)]
    lines = []
    for setting in traces.settings:
        for method in traces.with_setting(setting).methods:
            cells = [number(traces.value(setting, method, metric), 1, 100) for metric in metrics]
            lines += [[method, setting, *cells]] if any(cells) else []
    columns = ["rung", "setting", "idle", *OPERATORS]
    return filled("Idle time and operators (%)", columns, lines, traces.rows)


def speculation_table(results: Results, rounds: Results) -> Table:
    """A round's time, and a token's by acceptance."""
    metrics = [name for name in results.metrics if name.startswith("time at acceptance")]
    lines = [
        [
            row.method,
            number(row.value, 3),
            *(number(results.value(row.setting, row.method, name), 3) for name in metrics),
        ]
        for row in rounds.rows
    ]
    names = [name.removeprefix("time at ") for name in metrics]
    return Table(
        "Self-speculation: milliseconds of a round, and of a token",
        ["configuration", "round", *names],
        lines,
        rounds.rows,
    )


def acceptance_section(where: Where, results: Results) -> Section:
    """Acceptance by arm and exit."""
    shown = {acceptance.RATE: 3, acceptance.PER_ROUND: 2, acceptance.EQUAL: 4, acceptance.BITS: 4}
    lines = [
        [
            method,
            *(number(results.value(setting, method, metric), digits) for metric, digits in shown.items()),
        ]
        for setting in results.settings
        for method in results.methods
        if results.value(setting, method, acceptance.RATE) is not None
    ]
    table = Table("Drafts that were accepted", ["training, exit", *shown], lines, results.rows)
    return Section(f"Acceptance of drafts ({where})", [*ACCEPTANCE, *failures(results)], [], [table])
