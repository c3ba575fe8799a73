"""What `compare` returns: a row a configuration, as values, tables and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ao_lab.install.extras import WrongInput, needed
from ao_lab.intervals import ENOUGH, MEANING, half_interval, rounded
from ao_lab.measure.times import (
    FAILED,
    NOISY,
    OK,
    busy_notes,
    cpu_notes,
    digits,
    folded,
    generate_of,
    host_of,
    noisy_notes,
    told_threads,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ao_lab.plot.tradeoff import Point

#: What lm-evaluation-harness calls the standard error of a metric, behind its name.
STDERR = "_stderr"
#: What it calls the number of a task's examples.
EXAMPLES = "sample_len"


@dataclass(frozen=True)
class Compared:
    """One configuration, measured; None is what was not measured.

    status: "ok", or "failed", and why (reason). layers, of_layers: linear layers that are quantized, and all of them. bytes:
    of all tensors in the files that `save_pretrained` writes; layout: that of the files, "" of the unquantized model;
    unserved: what vLLM lists no kernel for in compressed-tensors' layout, "" where it lists one for each weight;
    bits_per_parameter: these bytes over all parameters. loss: nats per token, mean over windows, with its standard error;
    difference: from the unquantized model on the same windows, with the standard error of the paired difference; differences:
    of each window. kl: KL divergence from its predictions. A single window has no standard errors. agreement: share of tokens
    whose likeliest next token is the same. windows: how many these are means over. tokens_per_second: of generate() at batch
    1; baseline_tokens_per_second: of the unquantized model, timed anew in turn with this one; speedup: the median of the
    rounds' ratios of the two; doubt: why it cannot be trusted, "" where nothing speaks against it; threads: of a CPU that both
    were timed with, of the all_threads that torch uses (`ao_lab.measure.turns.timed_threads`); load: the host's of the
    last minute then, and its cores. peak_bytes: weights as they are in memory, and the most that tensors of
    generate() took beside them (`ao_lab.measure.memory.most_allocated`). seconds: what quantizing took. tasks:
    numbers by task of lm-evaluation-harness and by metric ("acc", "acc_stderr"). left: how many linear layers stayed
    unquantized, by reason. differs: that weights of a folder are others than the unquantized model's. changes: in what the
    configuration differs from the one that the name says. vocabulary: tokens of the unquantized model, in its row alone. date
    (UTC), commit: when the row was measured and by which code ("" where nothing says it, as in an installed package).
    methods: names of those that found its values (gptq, ...), "" for rounding to the nearest.
    """

    name: str
    status: str = OK
    layers: int | None = None
    of_layers: int | None = None
    bytes: int | None = None
    layout: str = ""
    unserved: str = ""
    bits_per_parameter: float | None = None
    loss: float | None = None
    loss_stderr: float | None = None
    difference: float | None = None
    difference_stderr: float | None = None
    differences: tuple[float, ...] = ()
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None
    windows: int | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    doubt: str = ""
    threads: int | None = None
    all_threads: int | None = None
    load: float | None = None
    cores: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    changes: str = ""
    differs: str = ""
    reason: str = ""
    vocabulary: int | None = None
    date: str = ""
    commit: str = ""
    methods: str = ""

    @property
    def label(self) -> str:
        """The name as tables have it, with methods: "nvfp4 + gptq"."""
        return " + ".join(filter(None, (self.name, self.methods)))

    @property
    def perplexity(self) -> float | None:
        """Per token."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the perplexity, by Student's t from the loss's standard error over windows."""
        reach = half_interval(self.loss_stderr, self.windows)
        if self.loss is None or reach is None:
            return None
        return math.exp(min(self.loss - reach, 700.0)), math.exp(min(self.loss + reach, 700.0))

    @property
    def half_difference(self) -> float | None:
        """Half of the 95% interval of the paired difference from the unquantized model, by Student's t."""
        return half_interval(self.difference_stderr, self.windows)

    @property
    def percent(self) -> tuple[float, float] | None:
        """By how many percent the perplexity is higher than the unquantized model's, and half of its 95% interval (0 without
        one); its ends are those of `difference_interval`, in the middle between which the change need not lie."""
        if self.difference is None:
            return None
        change = 100 * math.expm1(min(self.difference, 700.0))
        return change, (self.half_difference or 0.0) * (100 + change)

    @property
    def difference_interval(self) -> tuple[float, float] | None:
        """The 95% interval of the paired difference from the unquantized model."""
        half = self.half_difference
        if self.difference is None or half is None:
            return None
        return self.difference - half, self.difference + half


def is_far(row: Compared) -> bool:
    """Whether a row predicts something else than the unquantized model: the lower end of its KL's 95% interval is over FAR."""
    return row.kl is not None and row.kl - (half_interval(row.kl_stderr, row.windows) or 0.0) > FAR


def worst(row: Compared) -> float:
    """The upper end of the 95% interval of a row's difference, in nats per token; infinity where there is none."""
    interval = row.difference_interval
    return math.inf if interval is None or math.isnan(interval[1]) else interval[1]


#: The two layouts of `save_pretrained`, and who reads each.
COMPRESSED, OWN = "compressed-tensors", "ao_lab"
READERS = {
    COMPRESSED: "loads in transformers (with compressed-tensors installed){}, without ao_lab",
    OWN: "loads with ao_lab.load_pretrained, and in transformers after `import ao_lab`; transformers alone refuses it",
}


def clients_of(layout: str, refused: str = "") -> str:
    """Who reads a layout; refused: what of the weights vLLM lists no kernel for, "" where it lists one for each."""
    told = READERS.get(layout, "of another program")
    end = f"; vLLM lists no kernel for {refused}" if refused and layout == COMPRESSED else ""
    return told.format("" if end else " and in vLLM") + end


#: Columns of the table; those in which nothing was measured are left out, and columns of tasks stand behind.
COLUMNS = (
    "configuration", "layers", "layout", "MB", "bits/param", "perplexity", "95% interval", "perplexity change", "loss change",
    "KL", "tokens/s", "baseline tokens/s", "speedup", "peak MB",
)  # fmt: skip
#: Those of the two tables of a terminal; how many letters fit there, and how long a name is, at most and at least.
LOSSES = ("MB", "perplexity", "perplexity change", "KL")
COSTS = ("layers", "bits/param", "tokens/s", "baseline tokens/s", "speedup", "peak MB")
WIDTH, NARROW, NARROWER = 80, 28, 16
#: Short names of columns there.
SHORT = {"baseline tokens/s": "baseline", "perplexity change": "change"}
#: By how many percent a configuration's perplexity may be known to be higher at most, where it is to be called best.
TOLERANCE = 1.0
#: So many times its vocabulary is a perplexity that tells nothing; models that are not trained have about once.
GUESSING = 2
#: Nats of KL divergence beyond which loss alone does not make a configuration the best: its predictions are other ones.
FAR = 0.5
#: What stands between a change of a configuration and its first reason.
BECAUSE = ", because "


@dataclass(frozen=True)
class Comparison:
    """Configurations of a model side by side; the first row is the model as it is.

    conditions: what all numbers hold for: text, windows, device, processor, versions, methods, tokens of the prompt and new
    ones of generate(). tolerance: see `choice`.
    """

    model: str
    rows: tuple[Compared, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `ao-lab compare --json` prints them; of each 95% interval its two ends."""
        rows = [
            {
                **asdict(row), "perplexity": row.perplexity, "perplexity_95": row.interval,
                "difference_95": row.difference_interval,
            }
            for row in self.rows
        ]  # fmt: skip
        found, why = self.choice
        best = {"name": None if found is None else found.name, "reason": why}
        best |= {"layout": None if found is None else found.layout, "readable": self.readable}
        told = {"model": self.model, "conditions": dict(self.conditions), "tolerance": self.tolerance}
        return {**told, "rows": rows, "best": best}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Comparison:
        """What `to_dict` gave; ValueError for anything else."""
        try:
            told = dict(given["conditions"])
            rows = tuple(_row_of({"windows": told.get("windows"), **row}) for row in given["rows"])
            return cls(given["model"], rows, told, float(given.get("tolerance", TOLERANCE)))
        except (KeyError, TypeError) as error:
            raise WrongInput(f"this is no comparison as Comparison.to_dict gives it: {error}") from error

    def to_frame(self) -> Any:
        """A pandas DataFrame, a row a configuration."""
        return needed("pandas").DataFrame(
            [{**asdict(row), "perplexity": row.perplexity} for row in self.rows]
        )

    def table(self) -> list[list[str]]:
        """The table as text: the titles of `COLUMNS` and of tasks, then a line a row; without columns that are empty."""
        metrics = dict.fromkeys(
            (task, name)
            for row in self.rows
            for task, found in row.tasks.items()
            for name in found
            if not name.endswith(STDERR) and name != EXAMPLES
        )
        lines = [[*COLUMNS, *(f"{task} {name}" for task, name in metrics)]]
        lines += [[*_cells(row), *(_metric(row, *one) for one in metrics)] for row in self.rows]
        kept = [
            at
            for at in range(len(lines[0]))
            if at < 2 or any(line[at] not in ("-", "") for line in lines[1:])
        ]
        return [[line[at] for at in kept] for line in lines]

    def tables(self, width: int = NARROW) -> list[list[list[str]]]:
        """The same in two tables of at most 80 columns, losses and then sizes and speeds, and one of tasks where there are any.

        A name of more than `width` letters, or than there is room for, goes on in a line of its own.
        """
        head, *rows = self.table()
        own = [name for name in head if name not in COLUMNS]
        parts = [[head[0], *(name for name in names if name in head)] for names in (LOSSES, COSTS, own)]
        at = {name: number for number, name in enumerate(head)}
        short = [SHORT.get(name, name) for name in head]
        made = [
            [[line[at[name]] for name in names] for line in (short, *rows)]
            for names in parts
            if len(names) > 1
        ]
        return [folded(lines, max(NARROWER, min(width, WIDTH - _beside(lines)))) for lines in made]

    def to_markdown(self) -> str:
        """The table, which configuration is best, and what the table holds for."""
        head, *rows = self.table()
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"# {self.model}: configurations compared", table, *self.notes, ""])

    @property
    def choice(self) -> tuple[Compared | None, str]:
        """The row that is best as far as the measurement tells, and why; None, and why none is. (None, "") without rows.

        It is the smallest of those whose perplexity is higher than the unquantized model's by at most `tolerance` percent at
        the upper end of the 95% interval of the paired difference, so that a wide interval is no merit; where there is none,
        that whose upper end is lowest. Of fewer than `ENOUGH` windows none is named, nor where the unquantized model guesses,
        and none whose predictions are other ones (`is_far`).
        """
        return self._best_of(self.rows[1:])

    @property
    def readable(self) -> str | None:
        """The name of the best row among those that transformers and vLLM load without this library; None where none is."""
        found, _ = self._best_of(
            [row for row in self.rows[1:] if row.layout == COMPRESSED and not row.unserved]
        )
        return None if found is None else found.name

    def _best_of(self, rows: Sequence[Compared]) -> tuple[Compared | None, str]:
        """`choice` among some rows."""
        base = next(iter(self.rows), Compared(""))
        if base.loss is not None and base.vocabulary and base.loss > math.log(GUESSING * base.vocabulary):
            return None, (
                f"the unquantized model's perplexity is {base.perplexity:.3g}, worse than guessing among {base.vocabulary} "
                "tokens, so that losses tell nothing; give a text that it knows, or look at its weights and tokenizer"
            )
        finite = [one for one in rows if math.isfinite(worst(one))]
        known = [one for one in finite if not is_far(one)]
        windows = min((one.windows or 0 for one in rows if one.difference is not None), default=None)
        if windows is None:
            return None, ""
        if windows < ENOUGH:
            return None, (
                f"{windows} window{'s' * (windows != 1)} cannot tell; measure {ENOUGH} or more (a longer text, --limit, or a "
                "shorter --length)"
            )
        if finite and not known:
            return None, (
                f"all predict something else than the unquantized model (KL surely over {FAR:g} nats), so that "
                "a low loss says nothing"
            )
        bound = f"{self.tolerance:g}% of perplexity"
        if within := [one for one in known if worst(one) <= math.log1p(self.tolerance / 100)]:
            found = min(within, key=lambda one: (one.bytes or math.inf, worst(one)))
            return found, f"the smallest that surely loses no more than {bound}"
        if not known:
            return None, "no loss is finite"
        return min(known, key=worst), f"none surely loses no more than {bound}; this one loses least for sure"

    @property
    def best(self) -> str:
        """`choice` as a line, with the bound of its loss and who reads it; "" where nothing was measured."""
        found, why = self.choice
        if found is None:
            return f"No best configuration: {why}." if why else ""
        loss = rounded(found.difference, found.half_difference, sign=True)
        none = f"None surely loses no more than {self.tolerance:g}% of perplexity (--tolerance)"
        head = (
            f"Best: {found.name} ({why}; --tolerance)"
            if worst(found) <= math.log1p(self.tolerance / 100)
            else f"{none}; {found.name} loses least for sure"
        )
        told = (
            f"{head}: {(found.bytes or 0) / 1e6:.3g} MB, loss {loss} nats per token, "
            f"perplexity at most {100 * math.expm1(min(worst(found), 700.0)):+.3g}%."
        )
        return f"{told} {self._of_readers(found)}".rstrip()

    def _of_readers(self, found: Compared) -> str:
        """Who reads the best row, where not every client does; and the best of those that they read."""
        if found.layout in ("", COMPRESSED) and not found.unserved:
            return ""
        who = clients_of(found.layout, found.unserved)
        other = next((row for row in self.rows if row.name == self.readable), None)
        more = (
            ""
            if other is None
            else f" Of those that vLLM loads: {other.name}, {(other.bytes or 0) / 1e6:.3g} MB."
        )
        return f"Its layout is {found.layout}: {who}.{more}"

    @property
    def notes(self) -> list[str]:
        """What readers of the table have to know, the answer first."""
        told = self.conditions
        loads = [(row.load, row.cores) for row in self.rows if row.load is not None]
        why = ((row.name, row.reason) for row in self.rows if row.status != OK)
        failed = [f"{', '.join(names)} failed: {reason}" for reason, names in _grouped(why).items()]
        return [
            *filter(None, [self.best]),
            *failed,
            *busy_notes(*max(loads, default=(None, None))),
            *noisy_notes((row.name, row.doubt) for row in self.rows),
            *(cpu_notes(told["device"]) if told.get("new_tokens") else ()),
            *self.changed(),
            *self.layouts(),
            *self.left(),
            *(f"{row.name}: {row.differs}." for row in self.rows if row.differs),
            f"{told['text']}, {told['windows']} windows of {told['length']} tokens, on {host_of(told)}. change: of the "
            f"perplexity, on the same windows; {MEANING} (Student's t). KL: from the unquantized model's predictions. "
            "MB: 10^6 bytes of files.",
            *self._of_tasks(),
            *self._of_speed(),
            *self._of_methods(),
            *told.get("notes", ()),
        ]  # fmt: skip

    def _of_methods(self) -> list[str]:
        """What was calibrated, and on what."""
        told = self.conditions
        if not told.get("calibration"):
            return []
        return [f"Methods {', '.join(told['methods'])}, calibrated on {told['calibration']}."]

    def _of_tasks(self) -> list[str]:
        """What numbers of the harness are of."""
        if not (tasks := self.conditions.get("tasks")):
            return []
        options = ("num_fewshot", "batch_size", "apply_chat_template")
        given = [f"{name} {tasks[name]}" for name in options if tasks.get(name) not in (None, "False")]
        limit = f"at most {tasks['limit']} examples of each{', '.join(['', *given])}"
        return [f"Tasks of lm-evaluation-harness: {limit}; {MEANING} over examples."]

    def _of_speed(self) -> list[str]:
        """How generate() was timed."""
        if not (told := self.conditions).get("new_tokens"):
            return []
        peak = any(row.peak_bytes is not None for row in self.rows)
        used = {(row.threads, row.all_threads) for row in self.rows if row.threads and row.all_threads}
        # That all threads are one says nothing beside that fewer than all were better.
        fewer = {count for count, every in used if count < every}
        shown = [(count, every) for count, every in sorted(used) if count < every or count not in fewer]
        threads = "".join(f", {told_threads(count, every)}" for count, every in shown)
        return [
            "bits/param: of the files, embeddings too. tokens/s: generate(), batch 1, "
            f"{generate_of(told)}, not compiled{threads}; baseline: the unquantized model, in turn; speedup: the median of "
            "the rounds' ratios, not that of the columns." + " peak MB: weights and generate()." * peak
        ]

    def changed(self) -> list[str]:
        """What is measured in place of configurations that are others than their names say; then each reason, with names."""
        changed = [(row.name, one) for row in self.rows for one in filter(None, row.changes.split("; "))]
        parts = [(name, *one.partition(BECAUSE)[::2]) for name, one in changed]
        made = _grouped((name, what) for name, what, why in parts if why)
        if not changed:
            return []
        what = "; ".join(f"{', '.join(names)}: {one}" for one, names in made.items())
        reasons = _grouped((name, why or what) for name, what, why in parts)
        return [
            f"As ao-lab quantize writes them (--layout ao_lab: unchanged){': ' * bool(what)}{what}.",
            *(f"Because {why}: {', '.join(dict.fromkeys(names))}." for why, names in reasons.items()),
        ]

    def layouts(self) -> list[str]:
        """Who loads the files of which configurations."""
        by: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.layout:
                by.setdefault((row.layout, row.unserved), []).append(row.name)
        return [f"Layout {one[0]}, {clients_of(*one)}: {', '.join(names)}." for one, names in by.items()]

    def left(self) -> list[str]:
        """A sentence for each reason why layers stayed unquantized, with the configurations that it holds for."""
        made = [row for row in self.rows[1:] if row.status == OK]
        groups: dict[tuple[str, int], list[Compared]] = {}
        for row in made:
            for reason, count in row.left.items():
                groups.setdefault((reason, count), []).append(row)
        return [
            f"{', '.join(row.name for row in rows) if len(rows) < len(made) or len(made) == 1 else 'Every configuration'}: "
            f"{count} of {rows[0].of_layers} linear layers stay{'s' * (count == 1)} unquantized: {reason}."
            for (reason, count), rows in groups.items()
        ]

    def points(self) -> list[Point]:
        """What `plot` draws: of each measured row its bytes, its difference with half of its interval, and by window.

        Behind a name stands how many layers it quantizes where another quantizes more: "int4_g128 (3 of 22 layers)".
        """
        from ao_lab.plot.tradeoff import Point

        most = max((row.layers or 0 for row in self.rows), default=0)
        names = [
            f"{row.name} ({row.layers} of {row.of_layers} layers)"
            if 0 < (row.layers or 0) < most
            else row.name
            for row in self.rows
        ]
        return [
            Point(
                names[number],
                float(row.bytes),
                row.difference or 0.0,
                row.half_difference or 0.0,
                number == 0,
                row.differences or (0.0,) * (row.windows or 0) * (number == 0),
            )
            for number, row in enumerate(self.rows)
            if row.bytes is not None and row.loss is not None
        ]

    def plot(self, ax: Axes | None = None, theme: str | None = None) -> Figure:
        """Loss against size, with what nothing beats: differences from the unquantized model, which is the line at 0.

        Bars are the intervals of differences from the unquantized model. Two configurations are compared by their difference
        from each other on the same windows, whose interval is its own: one that is better by less is not drawn as better.
        Behind a name stands how many of the linear layers it quantizes, where others quantize more. `ao_lab.plot.tradeoff`
        draws it.
        """
        from ao_lab.plot.tradeoff import tradeoff

        title = f"{self.model} on {self.conditions.get('text', 'a text')}"
        labels = "size of the model, MB (10^6 bytes)", "loss over the unquantized model, nats per token"
        return tradeoff(self.points(), *labels, title=title, ax=ax, theme=theme)

    def __str__(self) -> str:
        return "\n\n".join([*(_aligned(lines) for lines in self.tables()), *filter(None, [self.best])])


def _grouped(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what is said of them."""
    found: dict[str, list[str]] = {}
    for name, what in said:
        found.setdefault(what, []).append(name)
    return found


#: Fields of files that earlier versions wrote, and their names now.
RENAMED = {"bits": "bits_per_parameter", "speed": "speedup"}


def _row_of(given: Mapping[str, Any]) -> Compared:
    """A row of a file; one of an earlier version has other names, and the reason as its status."""
    named = {RENAMED.get(name, name): value for name, value in given.items()}
    if named.get("status", OK) not in (OK, FAILED):
        named |= {"reason": named["status"], "status": FAILED}
    # What is not finite is null in a file.
    named["differences"] = tuple(math.nan if one is None else one for one in named.get("differences") or ())
    return Compared(**{name: named[name] for name in Compared.__dataclass_fields__ if name in named})


def _cells(row: Compared) -> list[str]:
    """A row as text; "-" for what was not measured, "failed" where nothing could be (`Comparison.notes` say why)."""
    if row.status != OK:
        return [row.label, "failed", *["-"] * (len(COLUMNS) - 2)]
    return [
        row.label,
        _text("{}/{}", row.layers, row.of_layers),
        row.layout or "-",
        "-" if row.bytes is None else digits(row.bytes / 1e6),
        _text("{:.2f}", row.bits_per_parameter),
        _text("{:.4g}", row.perplexity),
        _text("{:.4g} to {:.4g}", *(row.interval or (None, None))),
        "-" if row.percent is None else rounded(*row.percent, sign=True, unit="%"),
        rounded(row.difference, row.half_difference, sign=True),
        rounded(row.kl, half_interval(row.kl_stderr, row.windows)),
        "-" if row.tokens_per_second is None else digits(row.tokens_per_second),
        "-" if row.baseline_tokens_per_second is None else digits(row.baseline_tokens_per_second),
        _text("{:.2f}x", row.speedup) + (NOISY if row.doubt else ""),
        "-" if row.peak_bytes is None else digits(row.peak_bytes / 1e6),
    ]


def _metric(row: Compared, task: str, name: str) -> str:
    """A number of a task of the harness, with half of its 95% interval where it has a standard error."""
    found = row.tasks.get(task, {})
    error, count = found.get(f"{name}{STDERR}"), found.get(EXAMPLES)
    half = half_interval(error if isinstance(error, float) else None, None if count is None else int(count))
    return rounded(found.get(name), half)


def _beside(lines: Sequence[Sequence[str]]) -> int:
    """Letters that a table needs beside its first column, two between columns."""
    return sum(2 + max(map(len, column)) for column in list(zip(*lines, strict=True))[1:])


def _text(form: str, *values: Any) -> str:
    return "-" if any(value is None for value in values) else form.format(*values)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells under each other."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    first, *others = widths
    rows = ("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)
    return "\n".join(rows)


__all__ = ["Compared", "Comparison"]
