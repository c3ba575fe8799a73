"""The page of experiment `generate`: a table for each model, speeds over bfloat16 beside the times, and targets."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fp8_training.report.lines import failures
from experiments.generate.methods import BASE, METHODS
from experiments.generate.run import TITLE
from experiments.generate.stage import Stage
from experiments.generate.tables import KIND, LEAST
from experiments.generate.targets import targets_of
from experiments.generate.times import CHANGE, RATE, REPEAT, SPEED, TIME, WARM
from experiments.harness.rows import Row
from experiments.report.content import Drawing, Section, Table
from experiments.report.ratio_map import ratio_map
from experiments.report.results import Results, Where, by_run, number
from experiments.report.targets import missed

__all__ = ["ABOUT", "FEATURED", "TITLE", "findings", "sections"]

ABOUT = (
    "What a user of transformers gets: `ao_lab.quantize_(model, config)`, then `model.generate()` with a static cache, "
    "compiled as transformers does by itself, and not compiled; random weights in the shapes of Llama-3.1-8B.",
    "Prepared is after `ao_lab.prepare_for_generate_(model)`, frozen with `frozen=True`. torchao's configurations run in the "
    "same process. The generation loop of `decode`, which has less time outside of products, is a page of its own.",
    "One layer says what transformers' own loop takes on the host, below which no weights bring a step.",
)
FEATURED = ("generate-llama-3.1-8b-32-layers-full",)
TEXT = (
    "Milliseconds of a token are the median over the last three quarters of the steps of 8 to 16 calls of 16 to 64 tokens, "
    "the host's time in them, the prompt not; of a prefill, from the prompt to the first token. Models are copies of one "
    "bfloat16 model, called in turn; the speed over it is the median of that of each round.",
    "Warm-up is what the first two calls take: compilation and capture. Before that logits are compared with those of a"
    " bfloat16 model that has what is stored as its weights, at the rows that are timed, not compiled: they say that products "
    "are right, and nothing of quality.",
)
STAND_IN = (
    "**A stand-in**: one tiny layer on a CPU, whose times mean nothing; it shows that all of it runs.",
)
COLUMNS = {
    TIME: ("ms", 3), f"{TIME}, 20%": ("20%", 3), f"{TIME}, 80%": ("80%", 3), SPEED: ("over bfloat16", 2),
    RATE: ("tokens/s", 1), WARM: ("warm-up (s)", 1), CHANGE: ("change of logits", 3),
}  # fmt: skip


def findings(rows: Sequence[Row]) -> list[str]:
    """Targets, and speeds where most users are; nothing of stand-ins."""
    words = []
    for where, results in timed(rows):
        targets = targets_of(results) if is_asked(where) else []
        lost = missed(targets)
        rest = f"; missed: {'; '.join(map(str, lost))}" if lost else ""
        words += [speeds(where, results, setting) for setting in results.settings if where.scale == "full"]
        if not targets:
            continue
        words.append(
            f"{where.data}, {where.device}: {len(targets) - len(lost)} of {len(targets)} targets are met{rest}."
        )
    return words


def is_asked(where: Where) -> bool:
    """Whether a model has targets: not the one of a layer."""
    return where.data != Stage(LEAST, "").data


def timed(rows: Sequence[Row]) -> list[tuple[Where, Results]]:
    """Runs of real shapes."""
    return [
        (where, found)
        for where, found in by_run(rows, KIND).items()
        if where.scale == "full" and where.device != "cpu"
    ]


def speeds(where: Where, results: Results, setting: str) -> str:
    """All methods at one setting."""
    base = results.value(setting, BASE.name, TIME)
    found = [
        f"{one.name} {speed:.2f}"
        for one in METHODS
        if one is not BASE and (speed := results.value(setting, one.name, SPEED)) is not None
    ]
    return f"{where.data}, {setting}, {where.device}: bfloat16 {number(base, 2)} ms; speed over it: {', '.join(found)}."


def sections(rows: Sequence[Row]) -> list[Section]:
    """One for each model on each device."""
    return [section(where, results) for where, results in by_run(rows, KIND).items()]


def section(where: Where, results: Results) -> Section:
    """A model."""
    real = where.scale == "full" and where.device != "cpu"
    text = [*(TEXT if real else STAND_IN), *failures(results)]
    settings = [one for one in results.settings if results.value(one, BASE.name, TIME) is not None]
    targets = [target_table(results)] if real and is_asked(where) else []
    tables = [*targets, *(setting_table(results, one) for one in settings)]
    return Section(
        f"generate() ({where})",
        text,
        [drawing(where, results, settings)] if real and settings else [],
        tables,
    )


def drawing(where: Where, results: Results, settings: list[str]) -> Drawing:
    """Speeds over bfloat16, methods by settings."""
    names = [one.name for one in METHODS if one is not BASE]
    values = [[results.value(setting, name, SPEED) for setting in settings] for name in names]
    figure = ratio_map(names, settings, values, "speed over bfloat16")
    return Drawing(
        f"generate-{where.data}-{where.ending}",
        f"transformers' generate(), {where.data}, {where.device}: speed over bfloat16.",
        figure,
    )


def target_table(results: Results) -> Table:
    """Targets with values."""
    lines = [
        [one.name, f"at least {one.limit:g} times bfloat16", format(one.value, ".2f"), one.verdict]
        for one in targets_of(results)
        if one.value is not None
    ]
    return Table("Targets", ["model", "target", "measured", "reached"], lines)


def setting_table(results: Results, setting: str) -> Table:
    """All methods at one setting."""
    again = results.value(setting, BASE.name, REPEAT)
    lines = [
        [
            one.name,
            *(
                number(results.value(setting, one.name, metric), digits)
                for metric, (_, digits) in COLUMNS.items()
            ),
        ]
        for one in METHODS
        if results.value(setting, one.name, TIME) is not None
    ]
    caption = (
        setting
        if again is None
        else f"{setting} (bfloat16 at the end: {again:.3f} of its time at the beginning)"
    )
    return Table(caption, ["model", *(name for name, _ in COLUMNS.values())], lines, results.stale_methods)
