"""The page of experiment `generate`: a table for each model, speeds over bfloat16 beside the times, and targets.

Compiled decoding has targets for the whole model alone, and for what is measured of it; a prefill and steps that are not
compiled for eight layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ao_lab.measure.turns import REPEAT
from experiments.generate.run import (
    CHANGE,
    COMPILED_CHANGE,
    COMPILING,
    EAGERLY,
    PARTS,
    RATE,
    SPEED,
    TIME,
    WARM,
)
from experiments.generate.tables import (
    BASE,
    COMPILED,
    DEPTH,
    EAGER,
    KIND,
    LEAST,
    METHODS,
    PREFILL,
    WHOLE,
    Stage,
    stand_ins,
    tables_of,
)
from experiments.generate.tables import Table as Measured
from experiments.harness.rows import Row
from experiments.report.content import PEER, Card, Drawing, Headline, Section, Table, headlines_of, member
from experiments.report.phones import ratio_map_twice
from experiments.report.ratio_maps import Ratios
from experiments.report.results import Results, Where, best_run, by_run, failures, number
from experiments.report.targets import RunTargets, Target, counts, limits, missed, verdict_of

EXPERIMENT = "generate"


def targets_of(data: str, results: Results) -> list[Target]:
    """All of a model, by its name in rows; what was not measured has no value, and is open."""
    return [
        one.target(
            f"{method}, {setting}",
            results.value(setting, method, one.metric),
            value_format=".2f",
            day=results.day(setting, method),
        )
        for one in limits(EXPERIMENT)
        for model, setting, method in [one.parts]
        if model == data
    ]


TITLE = "transformers' generate() with quantized weights"
QUESTION = "How much faster does transformers' generate() get with quantized weights?"
ABOUT = (
    (
        "`ao_lab.quantize_(model, config)`, then `model.generate()` with a static cache, compiled as transformers does "
        "by default, and in eager mode; random weights in the shapes of Llama-3.1-8B."
    ),
    "'int4 g128' is symmetric, as `ao-lab quantize` writes it, 'int4 g128, zero points' the configuration in Python. "
    "'Prepared' is after `ao_lab.prepare_for_generate_(model)`, 'frozen' with `frozen=True`. torchao's "
    "configurations run in the same process. The page of `decode` has a generation loop with less overhead.",
    "The model of one layer shows the Python overhead of transformers' own loop, which no quantization removes.",
)
FEATURED = (
    "generate-by-batch-full",
    "generate-by-batch-full-nvidia-h100-80gb-hbm3",
    "generate-llama-3.1-8b-32-layers-full",
    "generate-llama-3.1-8b-32-layers-full-nvidia-h100-80gb-hbm3",
)
#: What is timed today, from which numbers of calls and tokens come.
ALL_TABLES = (*tables_of(PARTS, ""), *stand_ins(PARTS, ""))
NOT_MEASURED = "not measured"
#: What a table's bfloat16 may take at its end, of its time at the beginning; beyond, the host's speed has changed.
STEADY = (0.9, 1.1)
STEPS = (
    "Milliseconds of a token are the median over the steps of all calls of a table ({counts}), with Python "
    "overhead, without the prompt; the first quarter of a call's steps is left out."
)
PROMPTS = "Milliseconds of a prefill are from the prompt to the first token, of {counts}."
TEXT = (
    (
        "Models are made from one bfloat16 model and called in turn; the speed over it is the median of that of each "
        "round. Older tables may have had other numbers of calls and tokens."
    ),
    'Compiled steps are those of transformers\' own mode "reduce-overhead" (CUDA graphs), which a static cache starts; '
    "torchao's own `quantize_` sets Inductor's options (coordinate descent), as its users have them, for its own models.",
    (
        "torchao's int8 weight-only layers take a time that grows with the batch where steps are compiled with several "
        "tokens, far above that of their eager steps, which are the fair comparison there: two layers of 4096 x 14336 take "
        "0.20, 4.4 and 17.1 ms at 1, 16 and 64 tokens compiled, 0.39 ms eager, with torchao's options of Inductor, "
        "with Inductor's own and with max-autotune alike (torch 2.11)."
    ),
    (
        "Warm-up is the time of the calls before the timed ones: {compiling} where steps are compiled (compilation and "
        "capture), {eagerly} in eager mode. Before that, logits are compared with those of a bfloat16 model with the "
        "dequantized weights, at the batch sizes that are timed, in eager mode: they show that the matmuls are right, "
        "not how good the model is. By compiling: the change of the logits of a compiled call's last step from those of"
        " the same model in eager mode; empty where that was not compared."
    ),
)
STAND_IN = (
    "**A proxy model**: one tiny layer on a CPU, whose times mean nothing; a check that all of it runs.",
)
COLUMNS = {
    TIME: ("ms", 3), f"{TIME}, 20%": ("20% (ms)", 3), f"{TIME}, 80%": ("80% (ms)", 3),
    SPEED: ("over bfloat16 (median of rounds)", 2),
    RATE: ("tokens/s", 1), WARM: ("warm-up (s)", 1), CHANGE: ("change of logits", 3),
    COMPILED_CHANGE: ("by compiling", 3),
}  # fmt: skip


def findings(rows: Sequence[Row]) -> list[str]:
    """Targets, and speeds where most users are; nothing of stand-ins."""
    words = []
    for where, results in foremost(timed(rows)):
        words += [speeds(where, results, setting) for setting in measured(results)]
        if targets := targets_of(where.data, results):
            lost = [f"missed: {'; '.join(map(str, found))}" for found in [missed(targets)] if found]
            late = [one.name for one in targets if one.reached is None]
            lost += [f"not measured: {'; '.join(late)}"] if late else []
            said = "; ".join([counts(targets, " targets are met"), *lost])
            words.append(f"{where}: {said}.")
    return words


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Speeds of the whole model as transformers compiles it, on the last device."""
    run = best_run({where: one for where, one in timed(rows) if where.data == Stage(WHOLE, "").data})
    if run is None:
        return []
    text = (
        "transformers' own generate(), 32 layers of Llama-3.1-8B's shapes, compiled: int4 g128 (symmetric) "
        "{int4:.2f} and {int4_16:.2f} times "
        "as fast as bfloat16 at batch 1 and 16, int8 {int8:.2f} and {int8_16:.2f}"
    )
    one, sixteen = (f"batch {batch}, {COMPILED}" for batch in (1, 16))
    places = {
        "int4": (one, "int4 g128"), "int4_16": (sixteen, "int4 g128"), "int8": (one, "int8"), "int8_16": (sixteen, "int8"),
    }  # fmt: skip
    return headlines_of(text, **{name: run[1].row(*place, SPEED) for name, place in places.items()})


def cards(rows: Sequence[Row]) -> list[Card]:
    """The speed of the whole model with int4 weights; for the figure also eight layers, where torchao's run beside it."""
    runs = {where.data: one for where, one in timed(rows)}
    whole, part = runs.get(Stage(WHOLE, "").data), runs.get(Stage(DEPTH, "").data)
    alone, beside = f"batch 1, {COMPILED}", f"batch 1, {COMPILED}, beside torchao"
    row = whole.row(alone, "int4 g128", SPEED) if whole else None
    if whole is None or row is None:
        return []
    names = {"int4 g128": "int4wo", "int8": "int8wo"}
    bars = {
        f"generate(), Llama-3.1-8B, {name}": {"ao_lab": whole.value(alone, name, SPEED)} for name in names
    }
    bars |= {
        f"generate(), 8 of its 32 layers, {name}": {
            "ao_lab": part.value(beside, name, SPEED),
            PEER: part.value(beside, f"torchao {theirs}", SPEED),
        }
        for name, theirs in names.items()
        if part
    }
    what = (
        "speed of transformers' generate(), 32 layers of Llama-3.1-8B's shapes, int4 g128 weights (symmetric), batch 1, "
        "compiled"
    )
    target = verdict_of(targets_by_run(rows), row, f"int4 g128, {alone}")
    return [Card(row, f"{row.value:.2f}x", what, "bfloat16", bars, target, whole.rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """int4 by batch, of the whole model and of eight layers, and eight layers beside torchao's in one process; all compiled."""
    beside = ("int4 g128", "torchao int4wo", "int8", "torchao int8wo")
    found = [*(of_batches(rows, layers) for layers in (WHOLE, DEPTH))]
    found += [said_of(rows, DEPTH, f"batch 1, {COMPILED}, beside torchao", beside)]
    return f"compiled, over bfloat16: {'; '.join(filter(None, found))}" if any(found) else ""


def of_batches(rows: Sequence[Row], layers: int) -> str:
    """int4's speeds of so many layers by batch, on the last device that timed them; "" of none."""
    run = best_run({where: one for where, one in timed(rows) if where.data == Stage(layers, "").data})
    known = {
        batch: run[1].value(f"batch {batch}, {COMPILED}", "int4 g128", SPEED) if run else None
        for batch in (1, 16, 64)
    }
    words = [f"{speed:.2f} at batch {batch}" for batch, speed in known.items() if speed is not None]
    return f"int4 g128, {layers} layers ({run[0].device}) {', '.join(words)}" if run and words else ""


def said_of(rows: Sequence[Row], layers: int, setting: str, names: Sequence[str]) -> str:
    """Speeds of so many layers on the last device that timed them; "" of none."""
    run = best_run({where: one for where, one in timed(rows) if where.data == Stage(layers, "").data})
    found = {name: run[1].value(setting, name, SPEED) for name in names} if run else {}
    words = [f"{name} {speed:.2f}" for name, speed in found.items() if speed is not None]
    return f"{layers} layers at {setting} ({run[0].device}) {', '.join(words)}" if run and words else ""


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of all runs of real shapes."""
    return [
        RunTargets(where, targets_of(where.data, results), unit="times bfloat16")
        for where, results in timed(rows)
    ]


def timed(rows: Sequence[Row]) -> list[tuple[Where, Results]]:
    """Runs of real shapes."""
    return [(where, found) for where, found in by_run(rows, KIND).items() if is_real(where)]


def is_real(where: Where) -> bool:
    """Whether times mean something."""
    return where.scale == "full" and where.device != "cpu"


def measured(results: Results) -> list[str]:
    """Settings with times."""
    return [one for one in results.settings if results.value(one, BASE.name, TIME) is not None]


def speeds(where: Where, results: Results, setting: str) -> str:
    """All methods at one setting."""
    base = number(results.value(setting, BASE.name, TIME), 2) + " ms"
    found = {
        one.name: speed
        for one in METHODS
        if one is not BASE and (speed := results.value(setting, one.name, SPEED)) is not None
    }
    changed = unsteady(where, results, setting)
    again = noise_of(results, setting) if changed else 1.0
    told = [f"{member(name)} {speed:.2f}" for name, speed in found.items() if beyond(speed, again)]
    alike = [member(name) for name, speed in found.items() if not beyond(speed, again)]
    words = [f"speed over it: {', '.join(told)}"] if told else []
    words += [f"no difference beyond the host's of {', '.join(alike)}"] if alike else []
    return f"{where}, {setting}: bfloat16 {base}; {'; '.join([*words, *filter(None, [changed])])}."


def beyond(speed: float, again: float) -> bool:
    """Whether a speed over bfloat16 lies further from 1 than bfloat16's own times from each other (`noise_of`)."""
    return again == 1.0 or abs(math.log(speed)) > abs(math.log(again))


def unsteady(where: Where, results: Results, setting: str) -> str:
    """That the host's speed has changed during a table whose steps are the host's: what is not compiled, and one layer."""
    again = results.value(setting, BASE.name, REPEAT)
    of_host = COMPILED not in setting or EAGER in setting or where.data == Stage(LEAST, "").data
    if not is_real(where) or not of_host or again is None:
        return ""
    if not STEADY[0] <= again <= STEADY[1]:
        return (
            f"bfloat16's last call took {again:.2f} of the time of its first: the host's speed changed by that much during the "
            "table, and smaller differences are lost in it"
        )
    low, high = ends_of(results, setting)
    if high <= WIDE * low:
        return ""
    return (
        f"bfloat16's own steps took {low:.1f} to {high:.1f} ms (20% to 80%), of the host: differences of less than "
        f"{100 * (math.sqrt(high / low) - 1):.0f}% are lost in that"
    )


#: The 80% quantile of bfloat16's steps over the 20% one beyond which they say little of smaller differences.
WIDE = 1.25


def ends_of(results: Results, setting: str) -> tuple[float, float]:
    """The 20% and 80% quantiles of bfloat16's time; equal ones where a run has none."""
    low, high = (results.value(setting, BASE.name, f"{TIME}, {share}") for share in ("20%", "80%"))
    return (low, high) if low and high else (1.0, 1.0)


def noise_of(results: Results, setting: str) -> float:
    """What is told of bfloat16's own times, as a ratio: of its last call to its first where that changed, else half of what its
    steps spread."""
    again = results.value(setting, BASE.name, REPEAT) or 1.0
    if not STEADY[0] <= again <= STEADY[1]:
        return again
    low, high = ends_of(results, setting)
    return math.sqrt(high / low)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Speeds by batch, then one for each model on each device."""
    found = by_batch(rows)
    drawings, tables = [one.drawing for one in found], [one.table for one in found]
    batches = [Section("Speed over bfloat16, by batch", BY_BATCH, drawings, tables)] if found else []
    return [*batches, *(section(where, results) for where, results in foremost(by_run(rows, KIND).items()))]


#: What stands above the tables of speeds by batch.
BY_BATCH = (
    "**Each cell is of a table below**, over bfloat16 of that table: the median of the rounds in which all models were called "
    "in turn. torchao's compiled models ran in tables of their own, beside bfloat16 again. Empty: not measured.",
)
#: Batches by whether steps are compiled, as settings begin, in the order of columns.
BATCHES = tuple(f"batch {batch}, {how}" for how in (COMPILED, EAGER) for batch in (1, 16, 64))


@dataclass(frozen=True)
class Batches:
    """The speeds of a device: where each column is read, by its name, and the runs."""

    where: Where
    columns: Mapping[str, tuple[Results, str]]
    rows: Sequence[Row]

    @classmethod
    def of(cls, runs: Sequence[tuple[Where, Results]]) -> Batches:
        """Of the runs of a device, without the model whose step is the host's."""
        mine = [(where, one) for where, one in runs if where.data != Stage(LEAST, "").data]
        columns = {
            f"{layers_of(where)}, {setting}": (results, setting)
            for where, results in mine
            for setting in BATCHES
            if any(beside_too(results, setting, one.name) is not None for one in METHODS)
        }
        return cls(runs[0][0], columns, [row for _, one in mine for row in one.rows if row.metric == SPEED])

    @property
    def lines(self) -> dict[str, list[float | None]]:
        """The speeds of each model that has one."""
        found = {one.name: [beside_too(*cell, one.name) for cell in self.columns.values()] for one in METHODS}
        return {name: values for name, values in found.items() if any(one is not None for one in values)}

    @property
    def table(self) -> Table:
        """A line for each model, a column for each number of layers and batch, the whole model first."""
        lines = [[name, *(number(one, 2) for one in values)] for name, values in self.lines.items()]
        return Table(f"{self.where.device}: batch 1, 16 and 64", ["model", *self.columns], lines, self.rows)

    @property
    def drawing(self) -> Drawing:
        """The same as a figure."""
        lines = {name: values for name, values in self.lines.items() if name != BASE.name}
        figures = ratio_map_twice(Ratios([*lines], [*self.columns], [*lines.values()], "speed over bfloat16"))
        caption = (
            f"transformers' generate(), shapes of Llama-3.1-8B, {self.where.device}: speed over bfloat16 by batch; empty: not "
            "measured."
        )
        return Drawing(f"generate-by-batch-{self.where.ending}", caption, *figures)


def by_batch(rows: Sequence[Row]) -> list[Batches]:
    """Those of each device that has columns, the last first."""
    runs = foremost(timed(rows))
    devices = dict.fromkeys(where.device for where, _ in runs)
    found = [Batches.of([run for run in runs if run[0].device == device]) for device in devices]
    return [one for one in found if one.columns]


def layers_of(where: Where) -> str:
    """How many layers a run's model has, as "8 layers"."""
    return where.data.removeprefix("llama-3.1-8b-").replace("-", " ")


def beside_too(results: Results, setting: str, method: str) -> float | None:
    """A speed over bfloat16 at a setting, or at the same beside torchao, where torchao's compiled models are."""
    found = [setting, *(one for one in results.settings if one.startswith(f"{setting}, beside"))]
    speeds = (results.value(one, method, SPEED) for one in found)
    return next((speed for speed in speeds if speed is not None), None)


def foremost(runs: Iterable[tuple[Where, Results]]) -> list[tuple[Where, Results]]:
    """The whole model before parts of it, the last device before others."""
    whole = Stage(WHOLE, "").data
    last_first = list(runs)[::-1]
    return sorted(last_first, key=lambda run: run[0].data != whole)


def section(where: Where, results: Results) -> Section:
    """A model."""
    real, settings = is_real(where), measured(results)
    text = [*(real_text(where) if real else STAND_IN), *failures(results)]
    targets = targets_of(where.data, results) if real else []
    tables = [*target_table(targets, results.rows), *(setting_table(where, results, one) for one in settings)]
    drawings = [drawing(where, results, settings)] if real and settings else []
    return Section(f"generate() ({where})", text, drawings, tables)


def real_text(where: Where) -> list[str]:
    """What a section says first, with the numbers of today's tables of its model."""
    mine = [one for one in ALL_TABLES if one.stage.data == where.data]
    prefills = [one for one in mine if one.part == PREFILL]
    steps = [one for one in mine if one.part != PREFILL]
    said = [
        text.format(counts=calls_of(tables))
        for text, tables in ((STEPS, steps), (PROMPTS, prefills))
        if tables
    ]
    warm = {"compiling": times_word(COMPILING), "eagerly": times_word(EAGERLY)}
    return [*said, *(one.format(**warm) for one in TEXT)]


def calls_of(tables: Sequence[Measured]) -> str:
    """How many calls of how many tokens some tables have, as ranges."""
    calls = span([one.stage.calls for one in tables])
    if all(one.part == PREFILL for one in tables):
        return f"{calls} calls"
    return f"{calls} calls of {span([one.stage.new for one in tables])} tokens"


def short_calls(tables: Sequence[Measured]) -> str:
    """The same in a caption, where a number of tokens would be found by a search for a batch of so many: "12x64 tokens"."""
    calls = span([one.stage.calls for one in tables])
    if all(one.part == PREFILL for one in tables):
        return f"{calls} calls"
    return f"{calls}x{span([one.stage.new for one in tables])} tokens"


def span(values: Sequence[int]) -> str:
    """Numbers as a range."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def times_word(count: int) -> str:
    """A number of calls."""
    return f"{count} call{'s' * (count > 1)}"


def drawing(where: Where, results: Results, settings: list[str]) -> Drawing:
    """Speeds over bfloat16, methods by settings."""
    names = [one.name for one in METHODS if one is not BASE]
    order = [*BATCHES, *(one for one in settings if one not in BATCHES and ", beside" not in one)]
    shown = [one for one in order if any(beside_too(results, one, name) is not None for name in names)]
    values = [[beside_too(results, setting, name) for setting in shown] for name in names]
    figures = ratio_map_twice(Ratios(names, shown, values, "speed over bfloat16"))
    apart = any(", beside" in one for one in settings)
    return Drawing(
        f"generate-{where.data}-{where.ending}",
        f"transformers' generate(), {where}: speed over bfloat16{', torchao compiled in tables of its own' * apart}.",
        *figures,
    )


def target_table(targets: Sequence[Target], rows: Sequence[Row]) -> list[Table]:
    """All targets of a model, also of what was not measured; none where it has none."""
    lines = [
        [one.name, f"at least {one.texts[1]} times bfloat16", one.measured or NOT_MEASURED, one.verdict]
        for one in targets
    ]
    return [Table("Targets", ["model", "target", "measured", "reached"], lines, rows)] if lines else []


def setting_table(where: Where, results: Results, setting: str) -> Table:
    """All methods at one setting."""
    mine = results.with_setting(setting)
    lines = [
        [one.name, *(number(mine.value(setting, one.name, name), digits) for name, (_, digits) in COLUMNS.items())]
        for one in METHODS
        if mine.value(setting, one.name, TIME) is not None
    ]  # fmt: skip
    names = ["model", *(name for name, _ in COLUMNS.values())]
    return Table(caption(where, mine, setting), names, lines, mine.rows)


def caption(where: Where, results: Results, setting: str) -> str:
    """The setting; the calls of today's table; how far its time changed."""
    tables = [one for one in ALL_TABLES if (one.stage.data, one.setting) == (where.data, setting)]
    notes = [short_calls(tables)] if tables else []
    again = results.value(setting, BASE.name, REPEAT)
    changed = unsteady(where, results, setting)
    if again is not None:
        notes.append(changed or f"bfloat16 at the end: {again:.3f} of its time at the beginning")
    return f"{setting} ({'; '.join(notes)})" if notes else setting
