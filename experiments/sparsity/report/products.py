"""Sections of products alone and of blocks at the rows of decoding: a line for each shape, a column for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.fp8_training.report.lines import failures
from experiments.harness.rows import Row
from experiments.report.content import Headline, Section, Table, headlines_of
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.sparsity.speed import blocks, products
from experiments.sparsity.speed.sides import DENSE

TITLES = {products.KIND: "Products with a 2:4 weight", blocks.KIND: "A block's layers in decoding"}
TEXTS = {
    products.KIND: "Microseconds of a product of rows x inputs x outputs; casts and compression are not in them, scales of FP8 "
    "are. cuSPARSELt by the quickest of all its algorithms. Dense products are of weights without zeros.",
    blocks.KIND: "Microseconds of all linear layers of a block of Llama-3.1-8B, weights read from memory. FP8 in 2:4 storage "
    "by the kernels that tuning chose.",
}
#: By kind: names of ratios, the method whose speed they are of, and those whose best they are over.
RATIOS = {
    products.KIND: (
        ("over dense", products.OWN, (DENSE,)),
        ("over dense fp8", products.OWN, (products.DENSE_FP8,)),
        ("over libraries' 2:4", products.OWN, (products.CUSPARSELT, products.CUTLASS)),
    ),
    blocks.KIND: (
        ("int4 + 2:4 over int4", blocks.SPARSE_INT4, (blocks.INT4,)),
        ("fp8 + 2:4 over fp8", blocks.SPARSE_FP8, (blocks.FP8,)),
    ),
}
#: The shape of the first page: rows x inputs x outputs.
LARGEST = "16384x4096x14336"
Found = Mapping[Where, Results]


def findings(rows: Sequence[Row]) -> list[str]:
    """Ratios of all shapes that a GPU measured."""
    words = []
    for kind, title in TITLES.items():
        for (device, setting), found in groups(rows, kind).items():
            said = [
                f"{where.data} {', '.join(f'{value:.2f} {name}' for name, value in ratios.items())}"
                for where, results in found.items()
                if (ratios := ratios_of(kind, setting, results))
            ]
            if said:
                words.append(f"{title} ({device}; {setting}), speed: {'; '.join(said)}.")
    return words


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """A large FP8 product over dense bfloat16, beside dense FP8 and cuSPARSELt."""
    runs = {where: one for where, one in by_run(rows, products.KIND).items() if where.data == LARGEST}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    if run is None:
        return []
    text = (
        f"A 2:4 weight in FP8 multiplies {{own:.2f}} times as fast as dense bfloat16 at {LARGEST.replace('x', ' x ')}; dense "
        "FP8 {dense:.2f} times, cuSPARSELt's best algorithm {library:.2f}"
    )
    setting = products.SETTINGS[products.FP8]
    names = {"own": products.OWN, "dense": products.DENSE_FP8, "library": products.CUSPARSELT}
    found = {name: run[1].row(setting, one, "speed over dense") for name, one in names.items()}
    return headlines_of(text, **found)


def main_finding(rows: Sequence[Row]) -> str:
    """What 2:4 gains of a block's layers at the rows of decoding, on the last device."""
    runs = [(key[1], one) for key, one in groups(rows, blocks.KIND).items() if "cpu" not in key[0]]
    setting, found = runs[-1] if runs else ("", {})
    ratios, words = [ratios_of(blocks.KIND, setting, results) for results in found.values()], []
    for name, *_ in RATIOS[blocks.KIND]:
        values = [one[name] for one in ratios if name in one]
        words += [f"{name} {min(values):.2f} to {max(values):.2f}"] if values else []
    return f"layers of a block at 1 to 16 rows, speed of {', '.join(words)}" if words else ""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of every device and setting."""
    return [
        section(kind, device, setting, found)
        for kind in TITLES
        for (device, setting), found in groups(rows, kind).items()
    ]


def groups(rows: Sequence[Row], kind: str) -> dict[tuple[str, str], dict[Where, Results]]:
    """The runs of a kind by scale and device, and by setting."""
    found: dict[tuple[str, str], dict[Where, Results]] = {}
    for where, results in by_run(rows, kind).items():
        for setting in results.settings:
            name = f"{where.scale} scale, {where.device}", setting
            found.setdefault(name, {})[where] = results.with_setting(setting)
    return found


def section(kind: str, device: str, setting: str, found: Found) -> Section:
    """What was not measured, then times."""
    said = dict.fromkeys(f"{where.data}: {word}" for where, one in found.items() for word in failures(one))
    measured = any(times_of(setting, one) for one in found.values())
    tables = [times_table(kind, setting, found)] if measured else []
    return Section(f"{TITLES[kind]} ({device}; {setting})", [TEXTS[kind], *said], [], tables)


def times_table(kind: str, setting: str, found: Found) -> Table:
    """Times and ratios."""
    methods = list(dict.fromkeys(name for one in found.values() for name in times_of(setting, one)))
    names = [
        name
        for name, *_ in RATIOS[kind]
        if any(name in ratios_of(kind, setting, one) for one in found.values())
    ]
    cells = []
    for where, one in found.items():
        times, ratios = times_of(setting, one), ratios_of(kind, setting, one)
        values = [number(times.get(name), 1) for name in methods] + [
            number(ratios.get(name), 3) for name in names
        ]
        cells.append([where.data, *values])
    rows = [row for one in found.values() for row in one.rows]
    return Table("Microseconds, and speed over others", ["shape", *methods, *names], cells, rows)


def times_of(setting: str, results: Results) -> dict[str, float]:
    """Microseconds by method."""
    values = {name: results.value(setting, name, "time") for name in results.methods}
    return {name: 1e3 * value for name, value in values.items() if value is not None}


def ratios_of(kind: str, setting: str, results: Results) -> dict[str, float]:
    """The best time of others over ours, by the ratio's name."""
    times = times_of(setting, results)
    found = {}
    for name, own, others in RATIOS[kind]:
        best = min((times[other] for other in others if other in times), default=None)
        if own in times and best is not None:
            found[name] = best / times[own]
    return found


__all__ = ["findings", "headlines", "main_finding", "sections"]
