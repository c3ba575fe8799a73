"""What `compare` returns: a row a configuration, as values, tables and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ao_lab.install.extras import WrongInput, needed
from ao_lab.measure.times import FAILED, NOISY, OK, busy_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Standard errors each side of an interval that holds 95% of normal values.
SIDES = 1.96
#: What lm-evaluation-harness calls the standard error of a metric, behind its name.
STDERR = "_stderr"
#: What it calls the number of a task's examples.
EXAMPLES = "sample_len"


@dataclass(frozen=True)
class Compared:
    """One configuration, measured; None is what was not measured.

    status: "ok", or "failed", and why (reason). layers, of_layers: linear layers that are quantized, and all of them. bytes:
    of all weights as they are stored; bits_per_parameter: these over all parameters. loss: nats per token, mean over windows,
    with its standard error; difference: from the unquantized model on the same windows, with the standard error of the paired
    difference. kl: KL divergence from its predictions. A single window has no standard errors. agreement: share of tokens
    whose likeliest next token is the same. tokens_per_second: of generate() at batch 1; baseline_tokens_per_second: of the
    unquantized model, timed anew in turn with this one; speedup: the median of the rounds' ratios of the two; doubt: why it
    cannot be trusted, "" where nothing speaks against it; load: the host's of the last minute then, and its cores. peak_bytes:
    weights, and what generate() took beside them. seconds: what quantizing took. tasks: numbers by task of
    lm-evaluation-harness and by metric ("acc", "acc_stderr"). left: how many linear layers stayed unquantized, by reason.
    changes: in what the configuration differs from the one that the name says.
    """

    name: str
    status: str = OK
    layers: int | None = None
    of_layers: int | None = None
    bytes: int | None = None
    bits_per_parameter: float | None = None
    loss: float | None = None
    loss_stderr: float | None = None
    difference: float | None = None
    difference_stderr: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    doubt: str = ""
    load: float | None = None
    cores: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    changes: str = ""
    reason: str = ""

    @property
    def perplexity(self) -> float | None:
        """Per token."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the perplexity, from the loss's standard error over windows."""
        if self.loss is None or self.loss_stderr is None:
            return None
        reach = SIDES * self.loss_stderr
        return math.exp(min(self.loss - reach, 700.0)), math.exp(min(self.loss + reach, 700.0))


#: Columns of the table; those in which nothing was measured are left out, and columns of tasks stand behind.
COLUMNS = (
    "configuration", "layers", "MB", "bits/param", "perplexity", "95% interval", "loss change", "KL", "tokens/s",
    "baseline tokens/s", "speedup", "peak MB",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Configurations of a model side by side; the first row is the model as it is.

    conditions: what all numbers hold for: text, windows, device, versions, methods.
    """

    model: str
    rows: tuple[Compared, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `ao-lab compare --json` prints them."""
        rows = [
            {**asdict(row), "perplexity": row.perplexity, "perplexity_95": row.interval} for row in self.rows
        ]
        return {"model": self.model, "conditions": dict(self.conditions), "rows": rows}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Comparison:
        """What `to_dict` gave; ValueError for anything else."""
        try:
            rows = tuple(_row_of(row) for row in given["rows"])
            return cls(given["model"], rows, dict(given["conditions"]))
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

    def to_markdown(self) -> str:
        """The table, and what it holds for."""
        head, *rows = self.table()
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"# {self.model}: configurations compared", table, *self.notes, ""])

    @property
    def notes(self) -> list[str]:
        """What readers of the table have to know."""
        told = self.conditions
        text = f"{told['text']}, {told['windows']} windows of {told['length']} tokens, on {told['device']}."
        found = [
            f"Perplexity and KL divergence from the unquantized model on {text} loss change: nats per token over the "
            "unquantized model on the same windows, ± half of its 95% interval (1.96 standard "
            "errors over windows). layers: quantized linear layers of all. "
            "bits/param: stored bits over all parameters of the model, embeddings and unquantized layers too."
        ]
        if tasks := told.get("tasks"):
            options = ("num_fewshot", "batch_size", "apply_chat_template")
            given = [f"{name} {tasks[name]}" for name in options if tasks.get(name) not in (None, "False")]
            found.append(
                f"Tasks of lm-evaluation-harness: at most {tasks['limit']} examples of each{', '.join(['', *given])}; "
                "± one standard error."
            )
        if told.get("new_tokens"):
            found.append(
                f"tokens/s: transformers' generate(), batch 1, {told['new_tokens']} new tokens, not compiled (ao-lab bench "
                "times it compiled too, and batches); baseline tokens/s: of the unquantized model, timed anew in turn with "
                "each configuration; speedup: over that baseline. peak MB: weights and what generate() took "
                "beside them. MB are 10^6 bytes."
            )
        if told.get("calibration"):
            found.append(f"Methods {', '.join(told['methods'])}, calibrated on {told['calibration']}.")
        why = ((row.name, row.reason) for row in self.rows if row.status != OK)
        loads = [(row.load, row.cores) for row in self.rows if row.load is not None]
        found += busy_notes(*max(loads, default=(None, None)))
        found += [
            f"{', '.join(names)}: the speedup is noisy: {doubt}."
            for doubt, names in _grouped((row.name, row.doubt) for row in self.rows if row.doubt).items()
        ]
        failed = [f"{', '.join(names)} failed: {reason}" for reason, names in _grouped(why).items()]
        return [*failed, *self.changed(), *self.left(), *found, *told.get("notes", ())]

    def changed(self) -> list[str]:
        """A sentence for each change of configurations that are others than their names say, with these names."""
        said = _grouped((row.name, row.changes) for row in self.rows if row.changes)
        return [
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} measured as ao-lab quantize writes "
            f"{'it' if len(names) == 1 else 'them'} for transformers and vLLM (--layout ao_lab: unchanged); {changes}."
            for changes, names in said.items()
        ]

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

    def plot(self, ax: Axes | None = None, theme: str | None = None) -> Figure:
        """Loss against size, with what nothing beats: differences from the unquantized model, which is the line at 0.

        Intervals are those of the paired differences, which are far narrower than those of losses. `ao_lab.plot.tradeoff`
        draws it.
        """
        from ao_lab.plot.tradeoff import Point, tradeoff

        points = [
            Point(
                row.name, float(row.bytes), row.difference or 0.0, row.difference_stderr or 0.0, number == 0
            )
            for number, row in enumerate(self.rows)
            if row.bytes is not None and row.loss is not None
        ]
        title = f"{self.model} on {self.conditions.get('text', 'a text')}"
        labels = "size of the model, MB (10^6 bytes)", "loss over the unquantized model, nats per token"
        return tradeoff(points, *labels, title=title, ax=ax, theme=theme)

    def __str__(self) -> str:
        return _aligned(self.table())


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
    return Compared(**{name: named[name] for name in Compared.__dataclass_fields__ if name in named})


def _cells(row: Compared) -> list[str]:
    """A row as text; "-" for what was not measured, "failed" where nothing could be (`Comparison.notes` say why)."""
    if row.status != OK:
        return [row.name, "failed", *["-"] * (len(COLUMNS) - 2)]
    return [
        row.name,
        _text("{}/{}", row.layers, row.of_layers),
        _text("{:.1f}", None if row.bytes is None else row.bytes / 1e6),
        _text("{:.2f}", row.bits_per_parameter),
        _text("{:.4g}", row.perplexity),
        _text("{:.4g} to {:.4g}", *(row.interval or (None, None))),
        _with_error("{:+.4f}", row.difference, _half(row.difference_stderr)),
        _text("{:.3g}", row.kl),
        _text("{:.3g}", row.tokens_per_second),
        _text("{:.3g}", row.baseline_tokens_per_second),
        _text("{:.2f}x", row.speedup) + (NOISY if row.doubt else ""),
        _text("{:.1f}", None if row.peak_bytes is None else row.peak_bytes / 1e6),
    ]


def _metric(row: Compared, task: str, name: str) -> str:
    """A number of a task of the harness, with its standard error where it has one."""
    found = row.tasks.get(task, {})
    error = found.get(f"{name}{STDERR}")
    return _with_error("{:.4g}", found.get(name), error if isinstance(error, float) else None)


def _text(form: str, *values: Any) -> str:
    return "-" if any(value is None for value in values) else form.format(*values)


def _half(error: float | None) -> float | None:
    """Half of a 95% interval."""
    return None if error is None else SIDES * error


def _with_error(form: str, value: float | None, error: float | None) -> str:
    return _text(form, value) + ("" if error is None else f" ± {error:.4f}")


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells under each other."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    first, *others = widths
    rows = ("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)
    return "\n".join(rows)


__all__ = ["Compared", "Comparison"]
