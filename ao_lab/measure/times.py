"""What `benchmark` returns: times of layers and of generate() as values and tables, and how far they can be trusted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any

from ao_lab.checkpoint.io.files import write_text
from ao_lab.install.extras import WrongInput, needed
from ao_lab.install.revision import commit, utc_now

OK, FAILED = "ok", "failed"
#: The file of a benchmark's folder.
FILE = "benchmark.json"
#: A ratio whose 20% and 80% quantiles are further apart than this is noisy.
SPREAD = 1.5
#: What stands behind a speedup that cannot be trusted.
NOISY = " (noisy)"
#: What is said of rows whose own rounds disagree.
DISAGREE = "its rounds disagree (how far: --json); end other work, or time more (bench --rounds, compare --new-tokens)"
#: The mode of layers that one thread of a CPU computes far faster than all of them together, and how doubts begin that are
#: of the baseline.
EAGER, ALONE, DRIFT = (
    "eager",
    "eager, 1 thread",
    "the unquantized layer, timed once more at the end of each round",
)
#: What is said of all doubts of a kind, by their beginnings.
KINDS = {
    "the baseline took": "the baseline took far longer in its rounds than beside another configuration; end other work",
    "the rounds' ratios": DISAGREE,
    "the medians' ratio": DISAGREE,
    DRIFT: "the unquantized layer took another time at the end of its rounds than at their beginning; end other work",
}
#: Conditions that say how the machine was, and may differ between a stopped call and the one that goes on.
STATE = ("load", "cores", "configurations")
#: How a failure's reason begins that another try may not have, such as full memory; a refusal stays one.
PASSING = re.compile(r"(?!TypeError|NotImplementedError)\w*Error: ")


@dataclass(frozen=True)
class Timed:
    """A time: of a call of a linear layer, or of a token of generate().

    what: "linear" or "generate". name: the configuration. mode: "eager", "CUDA graph" or "compiled". shape: (tokens, outputs,
    inputs), of generate() (sequences,). seconds, seconds_20, seconds_80: median and 20% and 80% quantiles over rounds.
    baseline_seconds: the median of what is not quantized in the same rounds. speedup, speedup_20, speedup_80: median and
    quantiles of the rounds' ratios, baseline over this one. kernel: what computes the layer. layers: how many of the model have
    the shape. doubt: why the speedup cannot be trusted, "" where nothing speaks against it. status: "ok", or "failed", and the
    reason then. date (UTC), commit: when it was timed, and which code ("" where nothing says it, as in an installed package).
    """

    what: str
    name: str
    mode: str
    shape: tuple[int, ...]
    seconds: float | None = None
    seconds_20: float | None = None
    seconds_80: float | None = None
    baseline_seconds: float | None = None
    speedup: float | None = None
    speedup_20: float | None = None
    speedup_80: float | None = None
    kernel: str = ""
    layers: int = 0
    doubt: str = ""
    status: str = OK
    reason: str = ""
    date: str = ""
    commit: str = ""

    @property
    def place(self) -> str:
        """The shape as tables have it: "16x4096x4096"."""
        return "x".join(map(str, self.shape))


def doubt_of(seconds: float, baseline: float, low: float, high: float) -> str:
    """Why a speedup is noisy: its 20% and 80% quantiles, or the ratio of the medians beside them; "" where it is not."""
    if high > SPREAD * low:
        return f"the rounds' ratios spread from {low:.2f} to {high:.2f}"
    ratio = baseline / seconds
    # Medians of two and more rounds lie between rounds: the ratio of medians may pass the quantiles by rounding.
    if not low * (1 - 1e-9) <= ratio <= high * (1 + 1e-9):
        return f"the medians' ratio is {ratio:.2f}, the rounds' ratios are {low:.2f} to {high:.2f}"
    return ""


#: Why a speedup is noisy whose baseline was slower than that of the same beside others.
SLOWER = "the baseline took"


def drift_of(baseline: float | None, all_of: Iterable[float | None]) -> str:
    """Why a speedup is noisy: its baseline took more than SPREAD times that of the quickest of the same, beside other
    configurations; "" where it did not."""
    known = [one for one in all_of if one is not None]
    if baseline is None or not known or baseline <= SPREAD * min(known):
        return ""
    return f"{SLOWER} {baseline / min(known):.1f} times as long as beside another configuration"


def drifted(rows: Sequence[Timed]) -> list[Timed]:
    """Rows of times, those noisy too whose baseline was slower than the same baseline beside others (`drift_of`)."""
    by: dict[tuple[str, str, tuple[int, ...]], list[float | None]] = {}
    for row in rows:
        by.setdefault((row.what, row.mode, tuple(row.shape)), []).append(row.baseline_seconds)
    return [
        row
        if row.doubt
        else replace(row, doubt=drift_of(row.baseline_seconds, by[row.what, row.mode, tuple(row.shape)]))
        for row in rows
    ]


def crowded(load: float | None, cores: int | None) -> str:
    """Why any speedup of a CPU is noisy that was timed while the host had far more to do than it has cores; "" for nothing."""
    if load is None or not cores or load <= SPREAD * cores:
        return ""
    return f"the host had more than {SPREAD * cores:g} processes to run on {cores} cores"


def busy_notes(load: float | None, cores: int | None) -> list[str]:
    """What to say where the host had more to do than it has cores."""
    busy = load is not None and cores is not None and load > cores
    return (
        [f"Load {load:.1f} on {cores} cores: times are not reliable, end other work first."] if busy else []
    )


def noisy_notes(doubts: Iterable[tuple[str, str]]) -> list[str]:
    """Names whose speedups cannot be trusted, by the kind of their doubts ("": none), in one paragraph; nothing without any."""
    kinds: dict[str, list[str]] = {}
    for name, doubt in doubts:
        if doubt:
            kind = next((text for begin, text in KINDS.items() if doubt.startswith(begin)), doubt)
            kinds.setdefault(kind, []).append(name)
    each = [f"{_first(names)}: {kind}" for kind, names in kinds.items()]
    return [f"Noisy: {'. '.join(each)}."] * bool(each)


#: What conditions are called that an option gives, and those that are hashes.
OPTIONS = {
    "windows": "--limit", "length": "--length", "new_tokens": "--new-tokens", "rounds": "--rounds", "device": "--device",
    "methods": "--method", "calibration": "--calibration", "tasks": "--tasks", "model": "the model",
}  # fmt: skip
HASHES = {"weights": "the model's weights differ", "token_ids": "the text's tokens differ"}
#: What follows from others, and is told where nothing else differs.
FOLLOWING = ("token_ids", "tokens", "notes", "comparable")
#: Letters of a value.
SHOWN = 60


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which conditions are others now, as "--limit was 8, now 4"; "" where all of `now` are as before."""
    other = [key for key, value in now.items() if before.get(key) != value]
    first = [key for key in other if key not in FOLLOWING]
    told = []
    for key in first or other:
        was, new = (shorten(str(one), SHOWN, placeholder="...") for one in changed(before.get(key), now[key]))
        told.append(HASHES.get(key) or f"{OPTIONS.get(key, key)} was {was}, now {new}")
    return "; ".join(told)


def changed(before: Any, now: Any) -> tuple[Any, Any]:
    """Two values, of mappings those entries alone that differ."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return before, now
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    was, new = ({name: one.get(name) for name in names} for one in (before, now))
    return was, new


def dated(rows: Iterable[Timed]) -> list[Timed]:
    """Rows that are timed now, with the date and the commit."""
    return [replace(row, date=utc_now(), commit=commit()) for row in rows]


def host_of(conditions: Mapping[str, Any]) -> str:
    """The device, of a CPU with the processor's name: "cpu (AMD EPYC 9654)"."""
    device, processor = conditions["device"], conditions.get("processor")
    return f"{device} ({processor})" if processor and str(device).startswith("cpu") else str(device)


def cpu_notes(device: object) -> list[str]:
    """What to expect of times on a CPU, in a line; nothing of other devices."""
    return [ON_CPU] if str(device).startswith("cpu") else []


#: What quantization changes there, and which configuration gains most (docs/faq.md has the times).
ON_CPU = (
    "On a CPU memory and files shrink, and most configurations are slower than bfloat16 but for one token at a time: the "
    "documented speeds are of GPU kernels. Quickest here, at several tokens: "
    "'Int8DynamicActivationInt8WeightConfig kernel=int8' (docs/faq.md#why-is-my-model-not-faster)."
)


def generate_of(conditions: Mapping[str, Any]) -> str:
    """Of which tokens times of generate() are, in words."""
    prompt, new = conditions.get("prompt_tokens"), conditions.get("new_tokens")
    return (
        f"a prompt of {prompt} tokens and {new} new ones, prefill in the time"
        if prompt
        else f"{new} new tokens"
    )


def load_of_host() -> float | None:
    """Processes that wanted a core in the last minute, on average; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def speedup_of(rounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of rounds of a few calls, seconds of the baseline and of what is compared: the median of the ratios, why it cannot be
    trusted, and what else the host had to do."""
    ratios = [baseline / seconds for baseline, seconds in rounds]
    baseline, seconds = (median(column) for column in zip(*rounds, strict=True))
    return {
        "speedup": median(ratios),
        "doubt": doubt_of(seconds, baseline, min(ratios), max(ratios)),
        "load": load_of_host(),
        "cores": os.cpu_count(),
    }


def told_threads(count: int, every: int) -> str:
    """How many threads of a CPU timed something, and why not all of them."""
    if count < every:
        why = "they wait for each other or for other programs"
        return f"timed with one thread, as {every} threads take more than twice as long: {why}"
    return f"timed with {count} thread{'s' * (count != 1)}"


#: Columns of the two tables.
LAYERS = ("tokens x outputs x inputs", "configuration", "mode", "time", "speedup", "kernel", "layers")
GENERATE = ("batch", "configuration", "mode", "time a token", "baseline", "tokens/s", "speedup")


@dataclass(frozen=True)
class Benchmark:
    """Times of a model's layers and generate(), or of shapes. conditions: device, processor, threads, versions, tokens of the
    prompt and new ones of generate()."""

    model: str | None
    rows: tuple[Timed, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def of(self, what: str) -> list[Timed]:
        """The rows of "linear" or "generate"."""
        return [row for row in self.rows if row.what == what]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `ao-lab bench --json` prints them."""
        return {
            "model": self.model,
            "conditions": dict(self.conditions),
            "rows": [asdict(row) for row in self.rows],
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame, a row a time."""
        return needed("pandas").DataFrame([asdict(row) for row in self.rows])

    def layer_cells(self) -> list[list[str]]:
        """The rows of the table of layers, in the order of `LAYERS`; all times in one unit."""
        rows, unit = self.of("linear"), self.unit("linear")
        return [
            [
                row.place, row.name, row.mode, duration(row.seconds, unit), _speed(row), row.kernel or "-",
                str(row.layers or "-"),
            ]
            for row in rows
        ]  # fmt: skip

    def generate_cells(self) -> list[list[str]]:
        """The rows of the table of generate(), in the order of `GENERATE`; all times in one unit."""
        rows, unit = self.of("generate"), self.unit("generate")
        return [
            [
                str(row.shape[0]), row.name, row.mode, duration(row.seconds, unit), duration(row.baseline_seconds, unit),
                "-" if row.seconds is None else f"{row.shape[0] / row.seconds:.3g}", _speed(row),
            ]
            for row in rows
        ]  # fmt: skip

    def tables(self, width: int = 24) -> list[tuple[str, list[list[str]]]]:
        """Titles and tables, each with its head, as a terminal of 80 columns shows them.

        A shape and a batch stand in their first line alone, a mode where there are several, and a name of more than `width`
        letters goes on in a line of its own.
        """
        layers, made = self.layer_cells(), self.generate_cells()
        counted = [
            [f"{line[0]} ({line[-1]})" if line[-1] != "-" else line[0], *line[1:-1]] for line in layers
        ]
        head = "tokens x outputs x inputs (layers)", *LAYERS[1:-1]
        given = (("Linear layers", head, counted), (f"generate() of {self.model}", GENERATE, made))
        return [(title, folded(_narrow(names, lines), width, 1)) for title, names, lines in given if lines]

    def unit(self, what: str) -> tuple[str, float] | None:
        """The unit of a table's times: that of their median; None without times."""
        times = [row.seconds for row in self.of(what) if row.seconds is not None]
        return unit_of(median(times)) if times else None

    @property
    def notes(self) -> list[str]:
        """What readers of the tables have to know."""
        threads = self.conditions.get("threads")
        plural = "thread" if threads == 1 else "threads"
        device = f"{host_of(self.conditions)}{f', {threads} {plural}' if threads else ''}"
        told = (
            f"On {device}: medians of rounds, all in turn (20% and 80% quantiles: --json). speedup: of what is not quantized "
            "(baseline) over this one, the median of the rounds' ratios."
        )
        told += (
            f" generate(): {generate_of(self.conditions)}; a token's time is all of it over the new tokens."
            if self.of("generate") and "prompt_tokens" in self.conditions
            else ""
        )
        slow = [row for row in self.rows if row.mode == ALONE]
        alone = list(
            dict.fromkeys(
                row.place if row.what == "linear" else f"generate() of batch {row.place}" for row in slow
            )
        )
        told += (
            f" {', '.join(alone)}: timed with one thread, as {threads} threads take more than twice as long there: they wait "
            "for each other or for other programs."
        ) * bool(alone)
        failed = {f"{row.name}, {row.place}: {row.reason}": None for row in self.rows if row.status != OK}
        return [*self.warnings, *cpu_notes(self.conditions.get("device")), told, *failed]

    @property
    def warnings(self) -> list[str]:
        """Why times are not to be trusted: other work on the machine, and speedups that are noisy, each with its reason."""
        told = busy_notes(self.conditions.get("load"), self.conditions.get("cores"))
        return told + noisy_notes((f"{row.name} {row.place} {row.mode}", row.doubt) for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{' '.join(cells[:3])}: {cells[3]}, {cells[4]}" for cells in self.layer_cells()]
        lines += [
            f"generate(), batch {' '.join(cells[:3])}: {cells[3]} a token, {cells[6]}"
            for cells in self.generate_cells()
        ]
        return "\n".join([*lines, *self.notes])


#: Where a name may be broken: behind a space, and before a word with a capital.
BREAKS = re.compile(r"(?<= )|(?<=[a-z0-9])(?=[A-Z])")


def folded(lines: Sequence[Sequence[str]], width: int, column: int = 0) -> list[list[str]]:
    """Lines of cells of which one, where it is longer than `width`, goes on in lines without other cells."""
    found = list[list[str]]()
    for cells in lines:
        pieces = [""]
        for word in filter(None, BREAKS.split(cells[column])):
            fits = not pieces[-1].strip() or len((pieces[-1] + word).rstrip()) <= width
            pieces = [*pieces[:-1], pieces[-1] + word] if fits else [*pieces, "  " + word]
        empty = [""] * len(cells)
        for place, piece in enumerate(pieces):
            line = empty if place else list(cells)
            found.append([*line[:column], piece.rstrip(), *line[column + 1 :]])
    return found


#: Units of times, the largest first.
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time has one to three digits before its point, and its seconds."""
    return next((one for one in UNITS if seconds >= 0.9995 * one[1]), UNITS[-1])


def digits(value: float) -> str:
    """Three significant digits, never with an exponent: 0.0512, 24.0, 1200."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def duration(seconds: float | None, given: tuple[str, float] | None = None) -> str:
    """A time with its unit, the given one or its own: "24.0 ms"; "-" for none."""
    if seconds is None:
        return "-"
    name, unit = given or unit_of(seconds)
    return f"{digits(seconds / unit)} {name}"


def _first(names: Sequence[str]) -> str:
    """Up to three names, and how many more there are."""
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return ", ".join(names[:3]) + more


def _narrow(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """A table without its column of modes where there is one mode, and first cells where they change."""
    kept = [at for at, name in enumerate(head) if name != "mode" or len({line[at] for line in lines}) > 1]
    firsts = ["", *(line[0] for line in lines)]
    shown = [[line[0] * (line[0] != before), *line[1:]] for line, before in zip(lines, firsts, strict=False)]
    return [[line[at] for at in kept] for line in (head, *shown)]


def _speed(row: Timed) -> str:
    if row.status != OK or row.speedup is None:
        return "failed" if row.status != OK else "-"
    return f"{row.speedup:.2f}x{NOISY * bool(row.doubt)}"


@dataclass
class KeptTimes:
    """Times as they are measured, in a folder where one was given: a stopped call goes on from there.

    What was timed in turn is kept and taken together: the rows of a shape, and of a configuration's generate().
    """

    model: str | None
    conditions: dict[str, Any]
    folder: Path | None = None
    rows: list[Timed] = field(default_factory=list)

    @classmethod
    def of(cls, model: str | None, conditions: Mapping[str, Any], folder: str | Path | None) -> KeptTimes:
        """The rows of a folder; WrongInput for a file of that name, and for times of another model or other conditions."""
        found = cls(model, json.loads(json.dumps(conditions)), None if folder is None else Path(folder))
        if found.folder is None:
            return found
        if found.folder.exists() and not found.folder.is_dir():
            raise WrongInput(f"--out {folder} is a file; choose a folder")
        if (found.folder / FILE).is_file():
            found.rows = found.before(found.folder / FILE)
        return found

    def before(self, file: Path) -> list[Timed]:
        """What a stopped call has measured."""
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            rows = [Timed(**{**row, "shape": tuple(row["shape"])}) for row in kept["rows"]]
            then = {"model": kept["model"], **kept["conditions"]}
            made = dict(then["configurations"])
        except (ValueError, KeyError, TypeError) as error:
            raise WrongInput(
                f"{file} holds no times of ao-lab bench: {error}; choose another folder"
            ) from error
        now = {"model": self.model, **self.conditions}
        if other := differing(then, {key: value for key, value in now.items() if key not in STATE}):
            raise WrongInput(
                f"--out {self.folder} holds times of other conditions: {other}; choose another folder, or remove {file}"
            )
        # Times of a busy machine stay doubtful when the rest is measured on an idle one.
        loads = [one for one in (then.get("load"), self.conditions.get("load")) if one is not None]
        self.conditions["load"] = max(loads, default=None)
        wanted = self.conditions["configurations"]
        self.conditions["configurations"] = {**made, **wanted}
        return [row for row in rows if wanted.get(row.name) in (None, made.get(row.name))]

    def measured(self, rows: Iterable[Timed]) -> list[Timed]:
        """Keep rows that were timed together, in the place of older ones; returns them with their date."""
        found = dated(rows)
        here = {(row.what, row.name, row.mode, row.shape) for row in found}
        self.rows = [
            row for row in self.rows if (row.what, row.name, row.mode, row.shape) not in here
        ] + found
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(Benchmark(self.model, tuple(self.rows), self.conditions).to_dict(), indent=2)
            write_text(self.folder / FILE, text + "\n")
        return found

    def layer(self, shape: Sequence[int], names: Iterable[str]) -> list[Timed]:
        """The rows of a shape, where all of these names were timed, or refused for good; else none."""
        found = [row for row in self.rows if row.what == "linear" and row.shape == tuple(shape)]
        wanted = set(names)
        settled = {row.name for row in found if row.status == OK or not PASSING.match(row.reason)}
        return [row for row in found if row.name in wanted] if wanted <= settled else []

    def generated(self, batch: int, mode: str, name: str) -> list[Timed]:
        """The row of a configuration's generate(), where it was timed."""
        modes = (mode, ALONE) if mode == EAGER else (mode,)
        key = ("generate", name, (batch,), OK)
        return [
            row
            for row in self.rows
            if (row.what, row.name, row.shape, row.status) == key and row.mode in modes
        ]

    def generated_alone(self, batch: int) -> bool | None:
        """Whether generate() of this batch was timed with one thread of a CPU, by what is kept of it; None for nothing kept."""
        modes = {
            row.mode
            for row in self.rows
            if row.what == "generate" and row.shape == (batch,) and row.status == OK
        }
        return ALONE in modes if modes & {EAGER, ALONE} else None


__all__ = ["Benchmark", "Timed"]
