"""The page of experiment `sparsity`: gaps to dense models first, then speed beside published tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from experiments.fp8_training.convergence import UNDECIDED
from experiments.harness.rows import Row
from experiments.models.encoders import VIT_H, VIT_L
from experiments.report.accuracies import how
from experiments.report.content import (
    PEER,
    Card,
    Comparison,
    Drawing,
    Headline,
    Section,
    Table,
    headlines_of,
    member,
    readable,
)
from experiments.report.plots import dots
from experiments.report.results import (
    FOLDER,
    STATUS,
    Columns,
    Published,
    Results,
    Where,
    best_run,
    by_run,
    failures,
    number,
    read,
    table,
)
from experiments.report.targets import RunTargets, Target, limit_of
from experiments.sparsity import accuracy_page, models, pairs, products
from experiments.sparsity.accuracy_page import TASKS, gap_of, real_findings, real_sections
from experiments.sparsity.pairs import METHODS, STORAGES, stored_as
from experiments.sparsity.products import kernel_state as kernel_state
from experiments.sparsity.timed import DENSE

# What others published about 2:4 sparsity, as tables, and as comparisons with measured rows of the same shape and method.

PUBLISHED_FILE = FOLDER / "sparsity.csv"


@dataclass(frozen=True)
class Place:
    """Where our row of a published value is: kind and data of its table, method, metric, settings, the first that is there."""

    kind: str
    data: str
    method: str
    metric: str
    settings: tuple[str, ...] = ()


#: Published methods by ours; SAM's mixture of INT8 and 2:4 is not measured here.
LINEAR = {"dense": DENSE, "semi-sparse 2:4": products.LINEAR_OWN}
#: Of a published method that is not measured here, why.
OTHER = {
    "prune + compress only": "the source prunes the layer's inputs (m x k, `s24_inp_sparsify24` of its benchmark); ours prunes "
    "the weight"
}
#: Single layers were published as CUDA graphs; where those were not measured, the same one by one.
LAUNCHED = {products.GRAPH: "CUDA graph", products.EAGER: "eager"}
TRAINED = {"dense": DENSE, "MLP 2:4": models.OWN}
ENCODED = {
    "baseline": DENSE,
    "int8 dynamic quant (attn+mlp)": models.INT8,
    "2:4 (mlp only)": models.MLP,
    "2:4 (attn+mlp)": models.ALL,
}
#: Published metrics by ours. Memory of SAM is in MiB and of the whole model, mIoU is of its trained weights: not compared.
METRICS = {
    ("time", "ms"): "time",
    ("speedup", "x"): "speed over dense",
    ("throughput", "img/s"): "images/s",
    ("memory", "GB"): "peak memory",
}


@lru_cache(maxsize=1)
def values() -> tuple[Published, ...]:
    """All rows."""
    return read(PUBLISHED_FILE)


def place_of(one: Published) -> Place | None:
    """Where ours is; None for what is not measured here."""
    metric = METRICS.get((one.metric, one.unit))
    if metric is None:
        return None
    if one.model == "single linear" and one.method in LINEAR:
        shape = one.setting.partition("(m,k,n) = (")[2].rstrip(")").split(",")
        return Place(products.LINEAR_KIND, "x".join(shape), LINEAR[one.method], metric, tuple(LAUNCHED))
    if one.model == "ViT-L":
        settings = (models.training_setting(),)
        return Place(models.TRAINING, VIT_L.name, TRAINED[one.method], metric, settings)
    if one.model == "SAM ViT-h" and one.method in ENCODED:
        return Place(models.INFERENCE, VIT_H.name, ENCODED[one.method], metric)
    return None


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every published value; ours beside it where a GPU measured the same shape by the same method at full scale."""
    return [compared(one, measured(rows, place_of(one))) for one in values()]


def measured(rows: Sequence[Row], place: Place | None) -> tuple[Where, Results, float] | None:
    """The value of a place, of the best run."""
    if place is None:
        return None
    runs = {
        where: found
        for where, found in by_run(rows, place.kind).items()
        if where.scale == "full" and where.device != "cpu" and where.data == place.data
    }
    best = best_run(runs)
    if best is None:
        return None
    where, results = best
    for setting in place.settings or results.settings:
        value = results.value(setting, place.method, place.metric)
        if value is not None:
            return where, results.with_setting(setting).of_method(place.method), value
    return None


def compared(one: Published, ours: tuple[Where, Results, float] | None) -> Comparison:
    """A published value with ours, or alone."""
    return Comparison(
        model=f"{one.model}, {one.setting}",
        method=one.method,
        metric=one.metric.replace("_", " "),
        unit=one.unit,
        published=one.value,
        published_on=one.hardware,
        source=f"{one.paper}, {one.source}",
        measured=None if ours is None else ours[2],
        measured_on="" if ours is None else measured_on(*ours[:2]),
        **({"reason": OTHER[one.method]} if one.method in OTHER else how(one)),
    )


def measured_on(where: Where, results: Results) -> str:
    """The device, of layers with how they were launched and whose kernels multiplied."""
    row = results.rows[0]
    words = [
        where.device,
        LAUNCHED.get(row.setting, ""),
        "own kernels" if row.method in (products.LINEAR_OWN, models.OWN) else "",
    ]
    return ", ".join(filter(None, words))


def published_table(model: str, setting: str = "") -> Table:
    """Published values of a model, those whose setting contains a text."""
    found = [one for one in values() if one.model == model and setting in one.setting]
    cells = [
        [one.method, one.hardware, one.setting, one.metric.replace("_", " "), number(one.value, 3), one.unit]
        for one in found
    ]
    return Table(f"Published: {model}", ["method", "on", "setting", "metric", "value", "unit"], cells)


# Sections of products alone and of blocks at the rows of decoding: a line for each shape, a column for each method.

PRODUCT_TITLES = {
    products.KIND: "Matmuls with a 2:4 weight",
    models.BLOCKS_KIND: "A block's layers in decoding",
}
PRODUCT_TEXTS = {
    products.KIND: (
        "Microseconds of a matmul of tokens x inputs x outputs; casts and compression are not included, scales of FP8 "
        "are. cuSPARSELt with the fastest of all its algorithms. Dense matmuls have weights without zeros: `dense` is torch's "
        "in bfloat16, `fp8` is `torch._scaled_mm`. Layers of this library in FP8, inputs included, are timed on another "
        "page, where a shape is outputs x inputs: [linear](linear.md)."
    ),
    models.BLOCKS_KIND: "Microseconds of all linear layers of a block of Llama-3.1-8B, weights read from memory. FP8 in 2:4 "
    "storage by the kernels that tuning chose.",
}
#: What shapes and names in findings of a kind are.
PRODUCT_NOTES = {
    products.KIND: ", tokens x inputs x outputs, torch's dense fp8 by `torch._scaled_mm`",
    models.BLOCKS_KIND: "",
}
#: By kind: names of ratios, the method whose speed they are of, and those whose best they are over.
PRODUCT_RATIOS = {
    products.KIND: (
        ("over dense bfloat16", products.OWN, (DENSE,)),
        ("over torch's dense fp8", products.OWN, (products.DENSE_FP8,)),
        ("over libraries' 2:4", products.OWN, (products.CUSPARSELT, products.CUTLASS)),
    ),
    models.BLOCKS_KIND: (
        ("int4 + 2:4 over int4", models.SPARSE_INT4, (models.INT4,)),
        ("fp8 + 2:4 over fp8", models.SPARSE_FP8, (models.FP8,)),
    ),
}
#: The shape of the first page: rows x inputs x outputs.
LARGEST = "16384x4096x14336"
Found = Mapping[Where, Results]


def product_findings(rows: Sequence[Row]) -> list[str]:
    """Ratios of all shapes that a GPU measured."""
    words = []
    for kind, title in PRODUCT_TITLES.items():
        for (device, setting), found in groups(products.current(rows), kind).items():
            said = [
                f"{', '.join(f'{value:.2f} {name}' for name, value in ratios.items())} at {readable(where.data)}"
                for where, results in found.items()
                if (ratios := ratios_of(kind, setting, results))
            ]
            if said:
                words.append(f"{title} ({device}; {setting}){PRODUCT_NOTES[kind]}, speed: {'; '.join(said)}.")
    return words


def product_headlines(rows: Sequence[Row]) -> list[Headline]:
    """A large FP8 product over dense bfloat16, beside dense FP8 and cuSPARSELt."""
    rows = products.current(rows)
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


def cards(rows: Sequence[Row]) -> list[Card]:
    """The speed of a large FP8 matmul by a 2:4 weight, beside cuSPARSELt's."""
    rows = products.current(rows)
    runs = {where: one for where, one in by_run(rows, products.KIND).items() if where.data == LARGEST}
    run = best_run({where: one for where, one in runs.items() if where.device != "cpu"})
    setting, metric = products.SETTINGS[products.FP8], "speed over dense"
    row = run[1].row(setting, products.OWN, metric) if run else None
    if run is None or row is None:
        return []
    dense, library = (run[1].value(setting, one, metric) for one in (products.DENSE_FP8, products.CUSPARSELT))
    bars = {f"matmul {readable(LARGEST)}, FP8, 2:4 weight": {"ao_lab": row.value, PEER: library}}
    what = f"speed of a matmul ({readable(LARGEST)}) in FP8 with a 2:4 weight"
    beside = f"bfloat16; dense FP8 {number(dense, 2)}x, cuSPARSELt {number(library, 2)}x"
    return [Card(row, f"{row.value:.2f}x", what, beside, bars, rows=run[1].rows)]


def product_main_finding(rows: Sequence[Row]) -> str:
    """What 2:4 gains of a block's layers at the rows of decoding, on the last device."""
    runs = [(key[1], one) for key, one in groups(rows, models.BLOCKS_KIND).items() if "CPU" not in key[0]]
    setting, found = runs[-1] if runs else ("", {})
    ratios, words = [ratios_of(models.BLOCKS_KIND, setting, results) for results in found.values()], []
    for name, *_ in PRODUCT_RATIOS[models.BLOCKS_KIND]:
        values = [one[name] for one in ratios if name in one]
        words += [f"{name} {min(values):.2f} to {max(values):.2f}"] if values else []
    return f"Layers of a block at 1 to 16 tokens, speed of {', '.join(words)}" if words else ""


def product_sections(rows: Sequence[Row]) -> list[Section]:
    """Of every device and setting."""
    return [
        product_section(kind, device, setting, found)
        for kind in PRODUCT_TITLES
        for (device, setting), found in groups(rows, kind).items()
    ]


def groups(rows: Sequence[Row], kind: str) -> dict[tuple[str, str], dict[Where, Results]]:
    """The runs of a kind by scale and device, and by setting."""
    found: dict[tuple[str, str], dict[Where, Results]] = {}
    for where, results in by_run(rows, kind).items():
        for setting in results.settings:
            name = where.run, setting
            found.setdefault(name, {})[where] = results.with_setting(setting)
    return found


def product_section(kind: str, device: str, setting: str, found: Found) -> Section:
    """What was not measured, then times."""
    said = dict.fromkeys(
        f"{readable(where.data)}: {word}" for where, one in found.items() for word in failures(one)
    )
    measured = any(times_of(setting, one) for one in found.values())
    tables = [times_table(kind, setting, found)] if measured else []
    other = products.outdated_words(row for one in found.values() for row in one.rows)
    text = [PRODUCT_TEXTS[kind], *other, *said]
    return Section(f"{PRODUCT_TITLES[kind]} ({device}; {setting})", text, [], tables)


def times_table(kind: str, setting: str, found: Found) -> Table:
    """Times and ratios."""
    methods = list(dict.fromkeys(name for one in found.values() for name in times_of(setting, one)))
    names = [
        name
        for name, *_ in PRODUCT_RATIOS[kind]
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
    for name, own, others in PRODUCT_RATIOS[kind]:
        best = min((times[other] for other in others if other in times), default=None)
        if own in times and best is not None:
            found[name] = best / times[own]
    return found


# Sections about time: layers, encoders and generation, with published tables beside ours.

TIMES: Columns = {
    "time": ("ms", 3, 1.0),
    "time, 20%": ("20% (ms)", 3, 1.0),
    "time, 80%": ("80% (ms)", 3, 1.0),
    "speed over dense": ("speed over dense", 3, 1.0),
    "images/s": ("images/s", 2, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
}
DECODING: Columns = {
    "tokens/s": ("tokens/s", 1, 1.0),
    "speedup over bfloat16": ("speed over bfloat16", 3, 1.0),
    "model size": ("model (GB)", 3, 1.0),
    "peak memory": ("peak (GB)", 3, 1.0),
}
TITLES = {
    products.LINEAR_KIND: "Linear layers in training",
    models.TRAINING: "A training step of SAM's ViT-L encoder",
    models.INFERENCE: "Images a second of SAM's ViT-h encoder",
    models.KIND: "Generating with Llama-3.1-8B's shapes",
}
TEXTS = {
    products.LINEAR_KIND: (
        "Forward and backward of one layer, dense weight gradient. The 2:4 layer finds transposable masks and "
        "compresses its weight in both directions in every step; 'masks kept' leaves the search out. It uses our own "
        "kernels, or cuSPARSELt, which runs in eager mode only. The published layer, which uses cuSPARSELt in a CUDA "
        "graph, stands beside the one with our own kernels. Layers have a bias; the 2:4 ones sum its gradient with our "
        "kernel, which takes 9 and 13 us (an H100) less than torch's sum in the dense one. 'prune + compress' is one "
        "read of the weight along its rows."
    ),
    models.TRAINING: "Forward and backward, random weights and images, no optimizer; the MLP layers are 2:4, with new masks "
    "in every step.",
    models.INFERENCE: "Forward passes, random weights and images. Published throughput is on photographs.",
    models.KIND: "Batch 1, 200 new tokens, random weights; layers inside the blocks are 2:4.",
}
#: Ratios of speed, and the method whose they are 1.
RATIOS = {"speed over dense": DENSE, "speedup over bfloat16": "bfloat16"}
#: The published table beside each kind, and what of it.
PUBLISHED = {
    products.LINEAR_KIND: ("single linear", "(m,k,n)"),
    models.TRAINING: ("ViT-L", ""),
    models.INFERENCE: ("SAM ViT-h", ""),
    models.KIND: ("Llama-3-8B", ""),
}


def speed_findings(rows: Sequence[Row]) -> list[str]:
    """Speeds over dense of the largest run; that nothing was timed where that is so."""
    words = []
    for kind, title in TITLES.items():
        run = best_run({where: found for where, found in by_run(rows, kind).items() if where.device != "cpu"})
        if run is not None:
            where, results = run
            base = "bfloat16" if kind == models.KIND else DENSE
            if said := ratios(results):
                words.append(f"{title} ({where}), speed over {base}: {said}.")
    timed = any(row.metric == "time" for row in rows)
    return words or ([] if timed else ["Nothing has been timed yet: times need a GPU."])


def ratios(results: Results) -> str:
    """Ratios of all methods but those they are over, by setting where there are several."""
    said = {}
    for setting in results.settings:
        found = [
            f"{member(row.method)} {number(row.value, 2)}"
            for row in results.with_setting(setting).rows
            if row.metric in RATIOS and row.method not in (*RATIOS.values(), products.PRUNING)
        ]
        if found:
            said[setting] = ", ".join(found)
    if len(said) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{setting}: {text}" for setting, text in said.items())


def speed_sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs of all kinds."""
    found, drawn = [], set[str]()
    for kind in TITLES:
        for where, results in by_run(rows, kind).items():
            one = section(kind, where, results, rows)
            # A figure is of all shapes of a device: it stands in the first of their sections.
            found.append(replace(one, drawings=[that for that in one.drawings if that.name not in drawn]))
            drawn.update(that.name for that in one.drawings)
    return found


def section(kind: str, where: Where, results: Results, rows: Sequence[Row]) -> Section:
    """Times, what was not measured, published values and a figure of both."""
    measured = any(not row.metric.startswith(STATUS) for row in results.rows)
    columns = DECODING if kind == models.KIND else TIMES
    tables: list[Table] = [table("Times", results, columns)] if measured else []
    drawings = [ratio_drawing(kind, where, rows)] if measured and kind != models.KIND else []
    text = [TEXTS[kind], *failures(results)]
    return Section(f"{TITLES[kind]} ({where})", text, drawings, [*tables, published_table(*PUBLISHED[kind])])


def ratio_drawing(kind: str, where: Where, rows: Sequence[Row]) -> Drawing:
    """Published speeds over dense beside those that a device measured."""
    model = PUBLISHED[kind][0]
    rows = [row for row in rows if row.device == where.device]
    found = [one for one in comparisons(rows) if one.model.startswith(model) and one.unit == "x"]
    labels = [f"{one.method}, {one.model.partition(', ')[2]}" for one in found]
    series = {
        "published": [one.published for one in found],
        f"measured, {where.device}": [one.measured for one in found],
    }
    figure = dots(labels, series, "speed over dense", base=1.0)
    return Drawing(
        f"sparsity-{kind}-ratios-{where.ending}", "Speeds over dense, published and measured.", figure
    )


# Targets of 2:4 sparsity: published speeds over dense, memory of a training step, and the margins of fine-tuned models.

SPEED, MEMORY = "speed over dense", "peak memory"
#: Methods that train on are held to the margin; pruning at once is what they are compared with.
TRAINED_ON = tuple(method for method in METHODS if method.startswith("fine-tuned"))


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of speed and memory on every GPU, then of accuracy in the largest run."""
    return [*speed_targets(rows), *gap_targets(rows)]


def speed_targets(rows: Sequence[Row]) -> Iterator[RunTargets]:
    """The published speed over dense of each place that was measured; a sparse training step takes no more memory."""
    for place, limit in limits():
        for where, results in by_run(rows, place.kind).items():
            if where.scale == "full" and where.device != "cpu" and where.data == place.data:
                targets = [speed_target(results, place, limit)]
                targets += [memory_target(results, place)] if place.kind == models.TRAINING else []
                yield RunTargets(where, targets, place.kind)


def limits() -> list[tuple[Place, float]]:
    """Where our row of each published speed over dense is, and that speed."""
    found = [(place_of(one), one.value) for one in values() if (one.metric, one.unit) == ("speedup", "x")]
    step = Place(models.TRAINING, VIT_L.name, models.OWN, SPEED, (models.training_setting(),))
    found += [(step, 1 + one.value / 100) for one in values() if is_step(one)]
    return [(place, limit) for place, limit in found if place is not None]


def is_step(one: Published) -> bool:
    """Whether a value is the speed of a training step, which was published in percent more than the dense one's."""
    return (one.model, one.metric, one.unit) == ("ViT-L", "speedup", "%")


def speed_target(results: Results, place: Place, limit: float) -> Target:
    """The published speed, at the first of the place's settings that was measured."""
    setting = setting_of(results, place)
    value = results.value(setting, place.method, place.metric)
    name = f"{place.method}, {setting}: {SPEED}"
    return limit_of(pairs.EXPERIMENT, place.kind, SPEED).target(
        name, value, limit, value_format=".3f", day=results.day(setting, place.method)
    )


def memory_target(results: Results, place: Place) -> Target:
    """The peak over the dense one's."""
    setting = setting_of(results, place)
    own, dense = (results.value(setting, method, MEMORY) for method in (place.method, DENSE))
    value = own / dense if own is not None and dense else None
    name, day = f"{place.method}, {setting}: {MEMORY} over dense", results.day(setting, place.method)
    return limit_of(pairs.EXPERIMENT, place.kind, MEMORY).target(name, value, value_format=".4f", day=day)


def setting_of(results: Results, place: Place) -> str:
    """The first of a place's settings that was measured."""
    settings = place.settings or results.settings
    return next(
        (one for one in settings if results.value(one, place.method, place.metric) is not None), settings[0]
    )


def gap_targets(rows: Sequence[Row]) -> Iterator[RunTargets]:
    """The mean gap to dense of what was trained on, in each storage: at most the margin, where that is decided."""
    for kind, (title, _, margin, unit, _) in TASKS.items():
        run = best_run(by_run(rows, pairs.gaps_kind(kind)))
        if run is not None and run[0].scale == "full":
            where, gaps = run
            yield RunTargets(where, list(gaps_of(gaps, margin, unit)), title)


def gaps_of(gaps: Results, margin: float, unit: str) -> Iterator[Target]:
    """Of one subject, with the interval in the name."""
    for method in (stored_as(one, storage) for one in TRAINED_ON for storage in STORAGES):
        gap = gap_of(gaps, method)
        if gap is not None and gap.verdict(margin) != UNDECIDED:
            day = max((gaps.day(setting, method) for setting in gaps.settings), default="")
            name = f"{method}: gap to dense (95% interval ± {gap.half:.2f})"
            yield Target(name, gap.mean, margin, False, unit, ".2f", day=day)


TITLE = "2:4 sparsity: accuracy and speed"
QUESTION = "What do weights with two zeros in every four cost in accuracy, and what do they gain in time?"
ABOUT = (
    (
        "Weights with two zeros in every four: the cost in accuracy, pruned by each score and after sparse fine-tuning,"
        " alone and with 4-bit integers and FP8; and the gain in time at the shapes of published tables."
    ),
    (
        "Accuracy is measured on proxy models trained here, a vision transformer on real digits and a byte-level "
        "language model, over five paired seeds; margins were named beforehand. Times need a GPU."
    ),
    (
        "The vision model of short runs was chosen after results were seen: a smaller one, tuned for fewer steps, did "
        "not come back to within the margin (LOG.md has what was tried). For full runs nothing was measured before."
    ),
)
FEATURED = ("sparsity-vision-gaps-full", "sparsity-vision-gaps-quick")


def findings(rows: Sequence[Row]) -> list[str]:
    """Gaps of the largest runs, and speeds."""
    return [
        *real_findings(rows),
        *accuracy_page.findings(rows),
        *product_findings(rows),
        *speed_findings(rows),
    ]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """A product, and gaps to dense."""
    return [*product_headlines(rows), *accuracy_page.headlines(rows)]


def main_finding(rows: Sequence[Row]) -> str:
    """What 2:4 costs in accuracy, and what it gains of int4 and FP8 layers in decoding."""
    costs = [one.text for one in accuracy_page.headlines(rows)]
    return ". ".join(filter(None, (*costs, product_main_finding(rows))))


def sections(rows: Sequence[Row]) -> list[Section]:
    """Real models, stand-ins, then products, then what they are parts of."""
    return [
        *real_sections(rows),
        *accuracy_page.sections(rows),
        *product_sections(rows),
        *speed_sections(rows),
    ]
