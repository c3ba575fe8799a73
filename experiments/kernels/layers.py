"""Plain weights beside layers: the same matmul by a weight as `fast.quantize` stores it, which this experiment times, and by a
layer, which experiment `linear` times. On a GPU `quantize_` preshuffles the weights of layers, and other kernels read those: a
kernel's time here is no layer's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from experiments.harness.rows import Row, table_parts
from experiments.kernels.results import ROWS as OF_ROWS
from experiments.kernels.results import CaseResult, results_of
from experiments.linear.current import current, named, recipe_of
from experiments.linear.run import SPEED, TIME
from experiments.linear.tables import SHAPES, WEIGHTS, setting_of
from experiments.report.content import Section, Table, readable
from experiments.report.results import Results, number

#: Cases of a plain weight, and the experiment and the kind of table that time layers with 16-bit inputs.
PREFIX, LINEAR, KIND = "linear.", "linear", "weights"
#: The weight that both experiments time.
WEIGHT = "x".join(map(str, SHAPES[0]))
TITLE = "Weights in the plain layout, and layers"
TEXT = (
    "A layer of `quantize_` on a GPU holds its weight preshuffled wherever its scheme and shape allow it, and other kernels "
    "multiply by it than by a weight in the plain layout, as `fast.quantize` stores it and this page times it. What a model "
    "gains is the layer's time: [linear](linear.md).",
)


@dataclass(frozen=True)
class Product:
    """A matmul by a plain weight, as it was measured."""

    line: CaseResult

    @property
    def tokens(self) -> int:
        """The rows of its inputs."""
        found = OF_ROWS.search(self.line.case)
        return int(found.group(1)) if found else 1

    @property
    def scheme(self) -> str:
        """The scheme of its weight."""
        return OF_ROWS.sub("", self.line.case.removeprefix(PREFIX)).removesuffix(".wrapped")

    @property
    def name(self) -> str:
        """The same, and that it was called through a `QuantizedTensor`."""
        return self.scheme + " (QuantizedTensor)" * self.line.case.endswith(".wrapped")

    @property
    def speed(self) -> float | None:
        """Dense bfloat16's time over its own; None where either is missing."""
        over = self.line.values.get("time over dense")
        return 1 / over if over else None


def products(lines: Iterable[CaseResult]) -> list[Product]:
    """Those that were timed at the weight that layers have, by tokens."""
    found = [Product(line) for line in lines if line.case.startswith(PREFIX) and line.shape == WEIGHT]
    return sorted((one for one in found if one.speed is not None), key=lambda one: one.tokens)


def sentences(lines: Iterable[CaseResult]) -> list[str]:
    """Of each number of tokens the times of plain weights and their speed, and where the times of layers are."""
    by_tokens: dict[int, list[str]] = {}
    for one in products(lines):
        text = f"{one.name} {one.line.values[TIME]:.1f} us ({one.speed:.2f}x)"
        by_tokens.setdefault(one.tokens, []).append(text)
    said = [
        f"{spelled(tokens)} by a {readable(WEIGHT)} weight in the plain layout, time and speed over dense bfloat16: "
        f"{', '.join(words)}."
        for tokens, words in by_tokens.items()
    ]
    where = (
        "Layers hold weights preshuffled on a GPU and run other kernels; their times: [linear](linear.md)."
    )
    return [*said, where] if said else []


def spelled(tokens: int) -> str:
    """As "1 token"."""
    return f"{tokens} token{'s' * (tokens > 1)}"


def layer_of(scheme: str) -> str:
    """The method of `linear` whose weight has a scheme, or the one that differs in rounding a power-of-two scale alone; "" for
    none."""
    methods = {recipe_of(one.name).weight.name: one.name for one in WEIGHTS}
    return methods.get(scheme) or methods.get(f"{scheme}_rceil", "")


def joined(rows: Sequence[Row], others: Callable[[str], Sequence[Row]]) -> list[Section]:
    """Of each GPU the section that sets plain weights beside layers; none where either was not timed there."""
    found = []
    for where, lines in results_of(rows).items():
        layers = timed_layers(others(LINEAR), where.device)
        plain = products(lines)
        if plain and layers.rows:
            found.append(Section(f"{TITLE} ({where.device})", TEXT, (), [table(plain, layers)]))
    return found


def timed_layers(rows: Iterable[Row], device: str) -> Results:
    """The rows of layers of the weight on a GPU, by the kernels that are chosen today."""
    mine = [row for row in rows if row.device == device and table_parts(row.table) == (KIND, "full", WEIGHT)]
    return Results(current(mine))


def table(plain: Sequence[Product], layers: Results) -> Table:
    """A line for each matmul by a plain weight."""
    columns = ["weight", "tokens", "plain layout (us)", "plain layout, over bfloat16", "layer (us)"]
    columns += ["layer, over bfloat16", "kernel of the layer"]
    lines, shown = [], list[Row]()
    for one in plain:
        setting, method = setting_of(one.tokens), layer_of(one.scheme)
        row = layers.row(setting, method, TIME)
        lines.append(
            [
                *(one.name, str(one.tokens), number(one.line.values[TIME], 1), number(one.speed, 2)),
                number(layers.value(setting, method, TIME), 1),
                number(layers.value(setting, method, SPEED), 2),
                "" if row is None else named(row.kernel)[1] or row.kernel,
            ]
        )
        shown += [*one.line.rows, *([] if row is None else [row])]
    return Table(f"{readable(WEIGHT)}: plain layout and layer", columns, lines, shown)
