"""What `compare` returns: a row a configuration, as values, tables and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ao_lab.install.extras import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Standard errors each side of an interval that holds 95% of normal values.
SIDES = 1.96
OK = "ok"


@dataclass(frozen=True)
class Compared:
    """One configuration, measured; None is what was not measured.

    status: "ok", or why there are no numbers. layers, of_layers: linear layers that are quantized, and all of them. bytes: of
    all weights as they are stored; bits: those of a parameter. loss: nats per token, mean over windows, with its standard
    error; difference: from the unquantized model on the same windows, with the standard error of the paired difference. kl:
    KL divergence from its predictions. A single window has no standard errors. agreement: share of tokens whose likeliest
    next token is the same. tokens_per_second: of generate() at batch 1; speed: over that of the unquantized model, timed in
    turn. peak_bytes: weights, and what generate() took beside them. seconds: what quantizing took.
    """

    name: str
    status: str = OK
    layers: int | None = None
    of_layers: int | None = None
    bytes: int | None = None
    bits: float | None = None
    loss: float | None = None
    loss_stderr: float | None = None
    difference: float | None = None
    difference_stderr: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None
    tokens_per_second: float | None = None
    speed: float | None = None
    peak_bytes: int | None = None
    seconds: float | None = None

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


#: Columns of the table: title, and the text of a row's cell.
COLUMNS = (
    "configuration", "layers", "MB", "bits", "perplexity", "95%", "loss", "KL", "tokens/s", "speed", "peak MB",
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
        known = Compared.__dataclass_fields__
        try:
            rows = [Compared(**{name: row[name] for name in known if name in row}) for row in given["rows"]]
            return cls(given["model"], tuple(rows), dict(given["conditions"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no comparison as Comparison.to_dict gives it: {error}") from error

    def to_frame(self) -> Any:
        """A pandas DataFrame, a row a configuration."""
        return needed("pandas").DataFrame(
            [{**asdict(row), "perplexity": row.perplexity} for row in self.rows]
        )

    def cells(self) -> list[list[str]]:
        """The table's rows of text, in the order of `COLUMNS`."""
        return [_cells(row) for row in self.rows]

    def to_markdown(self) -> str:
        """The table, and what it holds for."""
        lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *self.cells()]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"# {self.model}: configurations compared", table, *self.notes, ""])

    @property
    def notes(self) -> list[str]:
        """What readers of the table have to know."""
        told = self.conditions
        text = f"{told['text']}, {told['windows']} windows of {told['length']} tokens, on {told['device']}."
        found = [
            f"Loss (nats per token), its difference from the unquantized model and KL divergence on {text} ± is one standard "
            "error over windows, 95% the interval of the perplexity."
        ]
        if told.get("new_tokens"):
            found.append(
                f"tokens/s: transformers' generate(), batch 1, {told['new_tokens']} new tokens, not compiled; speed: over the "
                "unquantized model, timed in turn. peak MB: weights and what generate() took beside them. MB are 10^6 bytes."
            )
        if told.get("calibration"):
            found.append(f"Methods {', '.join(told['methods'])}, calibrated on {told['calibration']}.")
        failed = [f"{row.name} failed: {row.status}" for row in self.rows if row.status != OK]
        return [*failed, *found, *told.get("notes", ())]

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
        return _aligned([list(COLUMNS), *self.cells()])


def _cells(row: Compared) -> list[str]:
    """A row as text; "-" for what was not measured, "failed" where nothing could be (`Comparison.notes` say why)."""
    if row.status != OK:
        return [row.name, "failed", *["-"] * (len(COLUMNS) - 2)]
    loss = _with_error("{:.4f}", row.loss, row.loss_stderr)
    change = _with_error("{:+.4f}", row.difference, row.difference_stderr)
    return [
        row.name,
        _text("{}/{}", row.layers, row.of_layers),
        _text("{:.1f}", None if row.bytes is None else row.bytes / 1e6),
        _text("{:.2f}", row.bits),
        _text("{:.4g}", row.perplexity),
        _text("{:.4g} to {:.4g}", *(row.interval or (None, None))),
        loss if row.difference is None else change,
        _text("{:.4f}", row.kl),
        _text("{:.3g}", row.tokens_per_second),
        _text("{:.2f}x", row.speed),
        _text("{:.1f}", None if row.peak_bytes is None else row.peak_bytes / 1e6),
    ]


def _text(form: str, *values: Any) -> str:
    return "-" if any(value is None for value in values) else form.format(*values)


def _with_error(form: str, value: float | None, error: float | None) -> str:
    return _text(form, value) + ("" if error is None else f" ± {error:.4f}")


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells under each other."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    first, *others = widths
    rows = ("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)
    return "\n".join(rows)


__all__ = ["Compared", "Comparison"]
