"""What real models are evaluated on in a run (texts, windows, tokens of each), and which published rows are of that."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from experiments.data.texts import EvaluationText, evaluation_texts, prose_of
from experiments.harness.registry import WINDOWS, Windows
from experiments.harness.rows import Row, table_parts
from experiments.runs.settings import RealModels, Settings

#: Metrics that say on how many windows of a text a measurement is, how long they are, and how long the one is that it is on.
WINDOW_COUNT, WINDOW_TOKENS, TOKENS = "windows", "tokens of a window", "tokens"


def asked_of(settings: Settings) -> RealModels:
    """What was asked for, or the scale's own models."""
    return settings.asked or RealModels(models=settings.models)


def size_of(settings: Settings, windows: Windows) -> tuple[int, int]:
    """How many windows of a text, and tokens of each: the experiment's own, unless others were asked for."""
    asked, scale = asked_of(settings), settings.scale
    return asked.windows or windows.count[scale], asked.length or windows.length[scale]


def texts_of(settings: Settings, windows: Windows = WINDOWS) -> tuple[EvaluationText, ...]:
    """The texts of a run, as many as the experiment takes: the end of the user's own among them, or that text alone where it is
    to be."""
    own = asked_of(settings).own_text
    if own is not None and own.alone:
        return (own.evaluation,)
    texts = evaluation_texts(prose_of(settings.text, settings.cache))
    return (texts if own is None else (own.evaluation, *texts))[: windows.texts.get(settings.scale)]


def measured_on(rows: Sequence[Row], settings: Settings, windows: Windows) -> list[Row]:
    """Of published rows those that a run can take as measured: of real models those on its texts, in as many windows of as many
    tokens; a row of the model, as its speed, stands for a measurement on all texts. Rows without windows are taken."""
    count, length = size_of(settings, windows)
    wanted = {WINDOW_COUNT: count, WINDOW_TOKENS: length, TOKENS: length}
    numbers: dict[Hashable, dict[str, dict[str, float]]] = {}
    for row in filter(lambda row: row.metric in wanted, rows):
        numbers.setdefault(place_of(row), {}).setdefault(data_of(row), {})[row.metric] = row.value
    texts = {text.name for text in texts_of(settings, windows)} if numbers else set()
    right = {
        place: {text for text in texts & set(found) if found[text].items() <= wanted.items()}
        for place, found in numbers.items()
    }

    def taken(row: Row) -> bool:
        place, data = place_of(row), data_of(row)
        if place not in numbers:
            return True
        return data in right[place] if data in numbers[place] else right[place] == texts

    return [row for row in rows if taken(row)]


def place_of(row: Row) -> Hashable:
    """What tells a measurement on several texts."""
    kind, scale, _ = table_parts(row.table)
    return kind, scale, row.setting, row.method, row.seed


def data_of(row: Row) -> str:
    """The text of a row, or what stands for the model."""
    return table_parts(row.table)[2]
