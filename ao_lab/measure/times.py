"""What `benchmark` returns: times of layers and of generate() as values and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ao_lab.install.extras import needed

OK = "ok"


@dataclass(frozen=True)
class Timed:
    """A time: of a call of a linear layer, or of a token of generate().

    what: "linear" or "generate". name: the configuration. mode: "eager", "CUDA graph" or "compiled". shape: (tokens, outputs,
    inputs), of generate() (sequences,). seconds, low, high: median and 20% and 80% quantiles over rounds. speed: over
    what is not quantized, the median of the rounds' ratios. kernel: what computes the layer. layers: how many of the model
    have the shape. status: "ok", or why there is no time.
    """

    what: str
    name: str
    mode: str
    shape: tuple[int, ...]
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    speed: float | None = None
    kernel: str = ""
    layers: int = 0
    status: str = OK


#: Columns of the two tables.
LAYERS = (
    "tokens x outputs x inputs",
    "configuration",
    "mode",
    "time, us",
    "20% to 80%",
    "speed",
    "kernel",
    "layers",
)
GENERATE = ("batch", "configuration", "mode", "ms a token", "20% to 80%", "tokens/s", "speed")


@dataclass(frozen=True)
class Benchmark:
    """Times of a model's layers and generate(), or of shapes. conditions: device, threads, versions."""

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
        """The rows of the table of layers, in the order of `LAYERS`."""
        return [
            [
                "x".join(map(str, row.shape)), row.name, row.mode, _number(row.seconds, 1e6), _range(row, 1e6), _speed(row),
                row.kernel or "-", str(row.layers or "-"),
            ]
            for row in self.of("linear")
        ]  # fmt: skip

    def generate_cells(self) -> list[list[str]]:
        """The rows of the table of generate(), in the order of `GENERATE`."""
        return [
            [
                str(row.shape[0]), row.name, row.mode, _number(row.seconds, 1e3), _range(row, 1e3),
                "-" if row.seconds is None else f"{row.shape[0] / row.seconds:.3g}", _speed(row),
            ]
            for row in self.of("generate")
        ]  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """What readers of the tables have to know."""
        threads = self.conditions.get("threads")
        plural = "thread" if threads == 1 else "threads"
        device = f"{self.conditions['device']}{f', {threads} {plural}' if threads else ''}"
        told = [
            f"On {device}; medians of rounds, all in turn, and their 20% and 80% quantiles. speed: over what is not quantized."
        ]
        failed = {
            f"{row.name}, {'x'.join(map(str, row.shape))}: {row.status}": None
            for row in self.rows
            if row.status != OK
        }
        return [*told, *failed]

    def __str__(self) -> str:
        lines = [f"{' '.join(cells[:3])}: {cells[3]} us, {cells[5]}" for cells in self.layer_cells()]
        lines += [
            f"generate(), batch {' '.join(cells[:3])}: {cells[3]} ms, {cells[6]}"
            for cells in self.generate_cells()
        ]
        return "\n".join([*lines, *self.notes])


def _number(seconds: float | None, unit: float) -> str:
    return "-" if seconds is None else f"{seconds * unit:.4g}"


def _range(row: Timed, unit: float) -> str:
    if row.low is None or row.high is None:
        return "-"
    return f"{row.low * unit:.3g} to {row.high * unit:.3g}"


def _speed(row: Timed) -> str:
    return "failed" if row.status != OK else "-" if row.speed is None else f"{row.speed:.2f}x"


__all__ = ["Benchmark", "Timed"]
