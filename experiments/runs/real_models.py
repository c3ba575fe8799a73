"""Runs on real models, what experiments that measure them share: models, texts and windows, and how a run is driven.

Rows of a model are tables of their own, ``real NAME/scale/TEXT``; what is of no text is in ``real NAME/scale/model``.
`run_models` goes through the models, `Tables.measure` through what the journal lacks of one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from ao_lab.cli.terminal import Work, say, track_progress
from ao_lab.measure.folders import longest
from experiments.data.texts import (
    calibration_documents,
    drawn_sequences,
    prose_of,
)
from experiments.harness.measuring import Deadline, Late, Values, attempt, free, is_late, keep, status
from experiments.harness.registry import EXPERIMENTS, WINDOWS, Windows
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.causal_lm import (
    FILE,
    MODEL,
    Bench,
    RealModel,
    encoding_of,
    linears,
    not_tried,
    real_model,
)
from experiments.models.pretrained import check_task
from experiments.models.serving import EXAMPLES, task_values, tasks_of
from experiments.runs.settings import Settings
from experiments.runs.windows import asked_of, size_of, texts_of

#: Sequences of a batch that methods with data see, by device.
BATCH = {"cpu": 1, "cuda": 8}
Task = TypeVar("Task")


def real_subject(settings: Settings) -> str:
    """What rows of real models depend on, beside the code: which models, windows and tasks, and whether there is prose."""
    asked = asked_of(settings)
    texts = [text.name for text in texts_of(settings)]
    parts = [*asked.models, *map(str, (asked.windows, asked.length)), *asked.tasks, *texts]
    parts += ["execute"] if asked.execute else []
    parts += [] if asked.own_text is None else [repr(asked.own_text)]
    return f"real{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def subject(settings: Settings) -> str:
    """What a journal of trainings can be resumed for: corpus, seed, and the libraries that compile or are compared; real
    models, if asked for."""
    if settings.asked is not None:
        return real_subject(settings)
    return f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}"


def models_of(experiment: str, settings: Settings) -> Iterator[RealModel]:
    """The models that the settings name, one after the other, fetched where they are not in the cache.

    A model of the scale's own that cannot be had is said to be missing and passed over; ValueError for one that was asked for.
    """
    for given in settings.models:
        try:
            model = real_model(given, settings.cache, asked_of(settings).accept, step=say)
            check_task(model.task, EXPERIMENTS[experiment].tasks, model.name, experiment)
        except (ValueError, ModuleNotFoundError) as error:
            if settings.asked is not None:
                raise ValueError(str(error)) from error
            say(f"{experiment}: NOT MEASURED on {given}: {error}")
        else:
            yield model


def bench_of(settings: Settings, model: RealModel, windows: Windows = WINDOWS) -> Bench:
    """A model with the windows of a run."""
    count, length = size_of(settings, windows)
    return Bench.of(model, texts_of(settings, windows), length, count, settings.device)


def batches_of(
    settings: Settings, model: RealModel, length: int, count: int, seed: int, batch: int
) -> list[Tensor]:
    """Sequences that methods with data see: token ids (batch, length) on the device, of the user's own text but its end, or of
    prose that no evaluation holds.

    They are no longer than the model takes. ValueError for an own text that is too short.
    """
    encode, beginning = encoding_of(model)
    own, length = asked_of(settings).own_text, min(length, longest(model.folder))
    if own is not None:
        own.check_drawn(length)
        documents: tuple[str, ...] = (own.train,)
    else:
        documents = calibration_documents(prose_of(settings.text, settings.cache))
    ids = drawn_sequences(documents, encode, length, count, seed, beginning)
    return list(ids.to(settings.device).split(batch))


class HasModel(Protocol):
    """A loaded model, of whichever task."""

    @property
    def model(self) -> RealModel:
        """What was loaded."""

    @property
    def base(self) -> nn.Module:
        """The dense model."""


def facts(bench: HasModel) -> Values:
    """What is of the model's file: the grid of its weights, its parameters, and the published model that it is."""
    model = bench.model
    found: Values = {f"grid: {model.grid}": (1.0, "")}
    if model.published:
        found[f"published: {model.published}"] = (1.0, "")
    found["parameters"] = (sum(one.numel() for one in bench.base.parameters()), "")
    found["quantized layers"] = (len(linears(bench.base)), "")
    return {**found, **status("ok")}


def harness_values(settings: Settings, record: RealModel, model: nn.Module) -> Values:
    """Numbers of the tasks of lm-evaluation-harness that were asked for. record: of the folder whose tokenizer reads them."""
    asked = asked_of(settings)
    if not asked.tasks:
        return {}
    return task_values(model, tasks_of(asked.tasks, record.folder), EXAMPLES[settings.scale])


# How a run is driven.


class Place(NamedTuple):
    """Where the rows of a measurement stand in the tables of a model."""

    setting: str
    method: str
    seed: int


@dataclass
class Watch:
    """What is under way inside a measurement: `at` names it where progress is shown, and ends it (`Late`) after the deadline.

    doing: the measurement; work: where progress is shown, None before it is. kept: whether something was kept of this run, from
    which another goes on; held: whether nothing ends before that.
    """

    deadline: Deadline
    work: Work | None = None
    doing: str = ""
    kept: bool = False
    held: bool = False
    #: The layers of the measurement, whose pace says what is left of it.
    layers: Work = field(default_factory=lambda: Work(""))

    def begins(self, doing: str) -> None:
        """A measurement begins."""
        self.doing, self.layers = doing, Work("")
        self.tell(doing)

    @contextmanager
    def first(self, doing: str) -> Iterator[None]:
        """Something else is measured first, that a measurement takes."""
        before = self.doing
        self.begins(f"{doing}, for {before}")
        try:
            yield
        finally:
            self.begins(before)

    @contextmanager
    def until_kept(self) -> Iterator[None]:
        """Inside, nothing ends before something is kept (`keeps`), where this run has kept nothing: of seconds that are too few
        each run gets further than the one before."""
        self.held = not self.kept
        try:
            yield
        finally:
            self.held = False

    def keeps(self) -> None:
        """Something was kept."""
        self.kept, self.held = True, False

    def at(self, word: str, left: str = "") -> None:
        """So far it is; left: how long it takes still."""
        doing = ": ".join(filter(None, (self.doing, word)))
        self.tell(doing + f", {left} of it" * bool(left))
        if not self.held:
            self.deadline.check(doing)

    def tell(self, doing: str) -> None:
        """As a word about what is done so far."""
        if self.work is not None:
            self.work.at(self.work.done, doing)

    def progress(self, word: str, done: int, total: int) -> None:
        """As `quantize_` and `choose_` tell it."""
        self.layers.at(done, word, total)
        self.at(f"{word}, {done} of {total}", self.layers.left(time.monotonic()))


@dataclass(frozen=True)
class Tables:
    """The tables of one model, of this kind, in a journal; nothing is measured after the deadline, and what asks `watch` in
    between ends soon after it."""

    experiment: str
    settings: Settings
    kind: str
    journal: Journal
    deadline: Deadline

    @cached_property
    def watch(self) -> Watch:
        """What a measurement tells how far it is."""
        return Watch(self.deadline)

    def rows(self, data: str, place: Place, values: Values) -> list[Row]:
        """Rows of a measurement."""
        of_seed = replace(self.settings, seed=place.seed)
        return of_seed.rows(self.experiment, self.kind, data, place.setting, place.method, values)

    def left(self, tasks: Mapping[Place, Task]) -> dict[Place, Task]:
        """What the journal lacks."""
        table = table_name(self.kind, self.settings.scale, MODEL)
        return {place: task for place, task in tasks.items() if not self.journal.finished(table, *place)}

    def measure(
        self,
        title: str,
        tasks: Mapping[Place, Task],
        load: Callable[[], tuple[Values, Callable[[Task], dict[str, Values]]]],
        missing: Callable[[Task], str | None] = lambda task: None,
        *,
        even: bool = False,
        baseline: Place | None = None,
    ) -> list[Row]:
        """Measure what the journal lacks; returns rows of what failed.

        load: values of the model's file, and what measures a task, by the data of its tables; not called where nothing is
        left, nor time, and its seconds are not counted. missing: the status of a task that cannot be measured here. even: tasks
        take about as long each, so that none starts that would end after the deadline by the longest so far. baseline: what the
        others are compared with; where it fails they are not run.
        """
        todo, failed, most, broken = self.left(tasks), list[Row](), 0.0, ""
        if len(todo) < len(tasks):
            say(
                f"{title}: {len(tasks) - len(todo)} of {len(tasks)} measurements are kept, {len(todo)} missing"
            )
        if not todo:
            return failed
        with track_progress(title, len(todo)) as work:
            self.watch.work = work
            measure = self._loaded(load)
            for place, task in todo.items():
                started = time.perf_counter()
                self.watch.begins(word := f"{place.method}, {place.setting}, seed {place.seed}")
                reason = missing(task) or broken or self.deadline.reason(most if even else 0.0)
                found = {MODEL: status(reason)} if reason else measure(task)
                for data, values in found.items():
                    keep(self.journal, failed, self.rows(data, place, values))
                if "status: ok" in found[MODEL]:
                    self.watch.keeps()
                if place == baseline and not any(one == "status: ok" or is_late(one) for one in found[MODEL]):
                    broken = f"not run: {place.method} failed, with which this is compared"
                free()
                most = max(most, time.perf_counter() - started)
                work.step(word)
        return failed

    def _loaded(
        self, load: Callable[[], tuple[Values, Callable[[Task], dict[str, Values]]]]
    ) -> Callable[[Task], dict[str, Values]]:
        """What measures a task, with the rows of the model's file in the journal; where no time is left, what says so."""
        try:
            self.watch.at("loading")
            with self.deadline.paused():
                file, measure = load()
        except Late as error:
            late = str(error)
            return lambda task: {MODEL: status(late)}
        self.journal.add(self.anew(self.rows(MODEL, Place(FILE, FILE, self.settings.seed), file)))
        return measure

    def anew(self, rows: Sequence[Row]) -> list[Row]:
        """Of rows those that the journal has not yet with the same value: the others keep the date of their measurement."""
        known = {row.key: row.value for row in self.journal.rows}
        return [row for row in rows if known.get(row.key) != row.value]


def by_data(work: Callable[[dict[str, Values]], Values]) -> dict[str, Values]:
    """What `work` returns of a model and puts of each text into its argument; of a failure only the status."""
    found: dict[str, Values] = {}
    whole = not_tried(attempt(lambda: work(found)))
    return {**found, MODEL: whole} if "status: ok" in whole else {MODEL: whole}


#: Measures what a journal lacks of a model until a deadline; returns rows of what failed.
Measure = Callable[[Settings, RealModel, Journal, Deadline], list[Row]]


def run_models(experiment: str, settings: Settings, journal: Journal, measure: Measure) -> list[Row]:
    """Measure all models that the settings name, into the journal; returns rows of what failed."""
    deadline, failed = Deadline(settings.seconds), list[Row]()
    for model in models_of(experiment, settings):
        failed += measure(settings, model, journal, deadline)
    return failed
