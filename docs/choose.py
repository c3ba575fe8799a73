"""The tables by which a configuration is chosen, in docs/choose.md and README.md: size, loss, speed, which programs read it.

``python docs/choose.py`` writes them between the marks of both pages; a test compares them with the committed results under
``reports/data`` and with docs/clients.csv. A cell whose value was not measured is empty.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ao_lab  # noqa: E402
from ao_lab.intervals import half_interval, rounded  # noqa: E402
from experiments.harness.paths import Paths  # noqa: E402
from experiments.harness.rows import Row, read  # noqa: E402
from experiments.linear.current import outdated  # noqa: E402

#: Marks of each table, by the name of its function.
MARK = "<!-- {0}: python docs/choose.py -->\n", "<!-- end of {0} -->\n"
#: Tables of each page.
PAGES = {
    "docs/choose.md": ("four_bits", "configurations", "calibration", "generation"),
    "docs/limits.md": ("four_bits_by_layer",),
    "README.md": ("summary", "limits"),
}
#: A weight of Llama-3.1-8B.
WEIGHT = (14336, 4096)
GPUS = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}
TOKENS = (1, 16, 1024)
#: Layers that are measured with 4-bit weights, those weights by what one calls them, and the numbers of tokens told.
LAYERS = ((1024, 4096), (4096, 4096), (4096, 14336), WEIGHT)
OF_FOUR_BITS = {
    "INT4": ("int4 g128", "int4 g128, zero points", "int4 g32"),
    "NF4": ("nf4",),
    "NVFP4": ("nvfp4",),
    "MXFP4": ("mxfp4",),
}
MANY_TOKENS = (16, 64, 128, 256, 512, 1024, 8192)
MODEL, TEXT = "SmolLM2-135M-Instruct", "wikitext-2-v1-test"
#: Models of the columns of perplexity, by what one calls them; one without results has no column.
MODELS = {
    MODEL: MODEL,
    "Gemma-3-270M": "gemma-3-270m",
    "Qwen2.5-Coder-0.5B-Instruct": "Qwen2.5-Coder-0.5B-Instruct",
}
CHANGE, RECOVERED = "perplexity, change", "KL, recovered"
KL, DIVERGENCE = "KL", "KL, short run (nats)"
LOSS, LOSS_ERROR = "loss, change", "loss, standard error of the change"
#: Scales of runs, and what they are called.
RUNS = {"full": "long run", "quick": "short run"}
#: What the rows of a scheme say whose groups do not divide a model's layers, and a cell of it.
UNDIVIDED, ABSENT = "layers dense", "(a)"
#: How the metric begins that says on which grid a file's weights lie, and what it says of weights on none.
GRID, UNQUANTIZED = "grid: ", ("none", "not stated")
#: Whose speeds tables have.
WHOSE = "Speeds are of ao_lab's own kernels, in ao_lab; those of vLLM and of other programs were not timed."
#: In place of a speed that was measured with another kernel than is chosen today.
FORMER = "(b)"
#: Outcomes of a client that has the weights: docs/clients.py.
READ = ("same bits", "same, other order of sums", "same weights, rounds by itself")
#: Clients that are the library's own objects in another program, and read no file.
NO_FILES = ("PEFT", "lm-eval", "transformers, GGUF")


#: Columns of perplexity by their heads: model and scale of each.
Columns = dict[str, tuple[str, str]]


class Entry(NamedTuple):
    """A configuration with its options, what one calls it, and the names of its results."""

    config: str
    options: dict[str, Any]
    called: str
    linear: str = ""
    client: str = ""

    def __str__(self) -> str:
        """As it is written."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.config}({options})".replace("PerRow(dim=-1)", "PerRow()")


FP4 = "float4_e2m1fn"
ENTRIES = (
    Entry("Int8WeightOnlyConfig", {}, "W8A16 INT8", "int8", "int8_rowwise"),
    Entry(
        "Int8DynamicActivationInt8WeightConfig", {}, "W8A8 INT8", "int8 dynamic", "int8_rowwise by int8_rowwise"
    ),
    Entry("Float8WeightOnlyConfig", {}, "W8A16 FP8", "fp8", "fp8_rowwise"),
    Entry(
        "Float8DynamicActivationFloat8WeightConfig", {"granularity": ao_lab.PerRow()}, "W8A8 FP8", "fp8 dynamic, rows",
        "fp8_rowwise by fp8_rowwise",
    ),
    Entry("MXDynamicActivationMXWeightConfig", {}, "W8A8 MXFP8", "mxfp8 dynamic", "mxfp8_e4m3 by mxfp8_e4m3"),
    Entry("Int4WeightOnlyConfig", {"group_size": 32}, "W4A16 INT4", "int4 g32, zero points", "int4_g32_asymmetric"),
    Entry("Int4WeightOnlyConfig", {"scheme": "int4_g32"}, "W4A16 INT4", "int4 g32", "int4_g32"),
    Entry("Int4WeightOnlyConfig", {}, "W4A16 INT4", "int4 g128, zero points", "int4_g128_asymmetric"),
    Entry("NF4WeightOnlyConfig", {}, "W4A16 NF4", "nf4", "nf4"),
    Entry("NVFP4WeightOnlyConfig", {}, "W4A16 NVFP4", "nvfp4", "nvfp4"),
    Entry("MXWeightOnlyConfig", {"weight_dtype": FP4}, "W4A16 MXFP4", "mxfp4", "mxfp4"),
    Entry("NVFP4DynamicActivationNVFP4WeightConfig", {}, "W4A4 NVFP4", "nvfp4 dynamic", "nvfp4 by nvfp4"),
    Entry(
        "MXDynamicActivationMXWeightConfig", {"activation_dtype": FP4, "weight_dtype": FP4}, "W4A4 MXFP4", "mxfp4 dynamic"
    ),
    Entry(
        "IntxWeightOnlyConfig",
        {"weight_dtype": "int3", "granularity": ao_lab.PerGroup(64), "mapping_type": "asymmetric"},
        "W3A16 INT3",
    ),
)  # fmt: skip
#: Lines of README.md.
SHORT = (0, 1, 3, 6, 7, 8, 9, 11)
METHODS = {
    "search by inputs": "Clip",
    "awq + search": "AWQ + Clip",
    "gptq": "GPTQ",
    "awq + gptq": "AWQ + GPTQ",
    "rotate + gptq": "Rotate + GPTQ",
}
SCHEMES = (
    "int4_g64",
    "nvfp4",
    "mxfp4_rceil",
    "int3_g64_asymmetric",
    "nvfp4, inputs nvfp4",
    "mxfp4_rceil, inputs mxfp4_rceil",
)
WHOLE, QUARTER = (f"generate/full/llama-3.1-8b-{layers}-layers" for layers in (32, 8))
GENERATED = {
    "int4 g128": "int4, groups of 128, symmetric",
    "int4 g128, prepared": "the same, after `prepare_for_generate_`",
    "int4 g128, zero points": "int4, groups of 128, zero points",
    "int8": "int8",
    "bfloat16, prepared": "bfloat16, after `prepare_for_generate_`",
}


def main() -> None:
    """Write the tables into the pages."""
    for name, tables in PAGES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for table in tables:
            begin, end = (mark.format(table) for mark in MARK)
            before, _, after = text.partition(begin)
            text = before + begin + globals()[table]() + end + after.partition(end)[2]
        path.write_text(text, encoding="utf-8")


def shown(page: str, table: str) -> str:
    """A table as it stands on a page."""
    begin, end = (mark.format(table) for mark in MARK)
    return (ROOT / page).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def configurations() -> str:
    """Every entry, with all GPUs and clients."""
    head = ["configuration", "", "bits per weight", *perplexities(), DIVERGENCE]
    head += [f"{gpu}: {', '.join(map(str, TOKENS))} tokens" for gpu in GPUS]
    lines = [
        [f"`{one}`", one.called, bits(one), *losses(one)]
        + [speeds(one, gpu) for gpu in GPUS.values()]
        + [", ".join(clients(one))]
        for one in ENTRIES
    ]
    return f"{WHOSE}\n\n{markdown([*head, 'read by'], lines)}\n{texts(lines)}\n"


def perplexities() -> Columns:
    """The columns of perplexity that have results, each with the model and the scale of its runs: long ones first."""
    return {
        f"perplexity, {name}, {RUNS[scale]} ({length_of(model, scale)})": (model, scale)
        for name, model in MODELS.items()
        for scale in RUNS
        if any(loss(one, model, scale) not in ("", ABSENT) for one in ENTRIES)
    }


def length_of(model: str, scale: str) -> str:
    """How much text a column of perplexities is on."""
    table = table_of(model, scale)
    return windows_of("ptq" if table in tables("ptq") else "calibration", table)


def losses(entry: Entry, columns: Columns | None = None) -> list[str]:
    """The cells of those columns, all of them by default, and of `DIVERGENCE`."""
    places = (perplexities() if columns is None else columns).values()
    return [*(loss(entry, model, scale) for model, scale in places), divergence(entry)]


def texts(lines: Sequence[Sequence[str]], columns: Columns | None = None) -> str:
    """Under a table: of which text and device its perplexities are, what stands after ±, and why a cell has none."""
    columns = perplexities() if columns is None else columns
    told = "; ".join(
        f"{RUNS[scale]} of {model}: {windows_of(experiment, table)}, {device_of(experiment, table)}"
        for model, scale in columns.values()
        for experiment in ("ptq", "calibration")
        if (table := table_of(model, scale)) in tables(experiment)
        and (experiment == "ptq" or table not in tables("ptq"))
    )
    words = f"{told[:1].upper()}{told[1:]}. ±: half of a 95% interval (Student's t over windows)."
    words += " Runs read different windows of the text, so compare within a column." * (len(columns) > 1)
    words += "".join(f" {one}" for one in grids(columns.values()))
    if any(ABSENT in line for line in lines):
        words += f" {ABSENT}: groups of 128 do not divide this model's layers."
    if any(FORMER in cell for line in lines for cell in line):
        words += f" {FORMER}: measured with another kernel than is chosen today."
    return textwrap.fill(words, 128)


def grids(runs: Iterable[tuple[str, str]]) -> list[str]:
    """A sentence on each model whose weights had been quantized before they were measured, as rows of its runs say. runs: model
    and scale of each."""
    rows = {key: None for name in ("ptq", "calibration") for key in indexed(name)}
    found = {
        (model, key[3].removeprefix(GRID)): None
        for model, scale in runs
        for key in rows
        if key[0] == f"real {model}/{scale}/model" and key[3].startswith(GRID)
    }
    return [
        f"**{model} as it is measured here had been quantized before**: {grid}. Changes are from the model as that file gives "
        "it, so each is of a model quantized twice."
        for model, grid in found
        if not grid.startswith(UNQUANTIZED)
    ]


def windows_of(experiment: str, table: str) -> str:
    """How much text a table of a real model is measured on, as its rows say; ValueError where they differ."""
    rows = [row for key, found in indexed(experiment).items() if key[0] == table for row in found.values()]
    counts = []
    for metric in ("windows", "tokens of a window"):
        found = {row.value for row in rows if row.metric == metric}
        if len(found) != 1:
            raise ValueError(
                f"{table} of {experiment} has rows with {metric} {sorted(found)}; measure all of it on one text"
            )
        counts.append(int(found.pop()))
    return f"{counts[0]} windows of {counts[1]} tokens"


def device_of(experiment: str, table: str) -> str:
    """The device of a table's rows, as people write it."""
    return " and ".join(sorted({"CPU" if name == "cpu" else name for name in tables(experiment)[table]}))


def summary() -> str:
    """The lines of README.md."""
    entries = [ENTRIES[index] for index in SHORT]
    columns = mostly_filled(entries)
    head = ["", "configuration", "bits per weight", *columns, DIVERGENCE]
    head += [f"speed at {', '.join(map(str, TOKENS))} tokens", "read by"]
    lines = [
        [
            one.called,
            f"`{one}`",
            bits(one),
            *losses(one, columns),
            speeds(one, GPUS["H200"]),
            ", ".join(clients(one)[:2]),
        ]
        for one in entries
    ]
    told = textwrap.fill(calibrated(), 128, break_on_hyphens=False)
    return f"{WHOSE}\n\n{markdown(head, lines)}\n{told}\n\n{texts(lines, columns)}\n"


def mostly_filled(entries: Sequence[Entry]) -> Columns:
    """The columns of perplexity that have results of more than half of these entries: no others, on a page for everybody."""
    return {
        head: place
        for head, place in perplexities().items()
        if 2 * sum(loss(one, *place) not in ("", ABSENT) for one in entries) > len(entries)
    }


def calibrated() -> str:
    """A sentence on what the method of least perplexity leaves of rounding's, in two schemes of 4 bits."""
    table, told = table_of(MODEL, "full"), []
    for scheme, called in {"int4_g64": "symmetric INT4 in groups of 64", "nvfp4": "NVFP4"}.items():
        known = {name: value("calibration", table, scheme, name, CHANGE) for name in METHODS}
        best = min((name for name in known if known[name] is not None), key=lambda name: known[name] or 0.0)
        before, after = (changed("calibration", table, scheme, name) for name in ("rounding", best))
        measured = [METHODS[name] for name in known if known[name] is not None]
        of = "the only method measured" if len(measured) == 1 else f"the best of {', '.join(measured)}"
        told.append(f"{called} from {before} to {after} by {METHODS[best]}, {of}")
    text = f"long run ({windows_of('calibration', table)})"
    sentence = f"[Calibration](docs/choose.md#with-calibration), {text}: {'; '.join(told)}."
    return " ".join([sentence, *with_zero_points()])


def with_zero_points() -> list[str]:
    """A sentence on rounding with zero points beside without, as the short run has both; none where one is missing."""
    ours, symmetric = (
        loss(one, MODEL, "quick")
        for options in ({"group_size": 32}, {"scheme": "int4_g32"})
        for one in ENTRIES
        if one.config == "Int4WeightOnlyConfig" and one.options == options
    )
    if not ours or not symmetric:
        return []
    return [
        f"`Int4WeightOnlyConfig` has zero points by default; by rounding alone, in groups of 32, {ours} with "
        f"them and {symmetric} without (short run)."
    ]


def calibration() -> str:
    """Change of perplexity by the method that found the quantized values."""
    table = f"real {MODEL}/full/{TEXT}"
    lines = []
    for scheme in SCHEMES:
        found = [changed("calibration", table, scheme, name) for name in ("rounding", *METHODS)]
        lines.append([f"`{scheme.replace(', inputs ', '` x `')}`", *found])
    head = ["scheme", "rounding", *METHODS.values()]
    where = device_of("calibration", table)
    on = f"{MODEL} on {windows_of('calibration', table)}, {where}; ±: half of a 95% interval (Student's t over windows)"
    before = " ".join(["", *grids([(MODEL, "full")])])
    told = textwrap.fill(f"Perplexities: {on}.{before} {other_winners(table)}", 128)
    return markdown(head, lines) + f"\n{told}\n"


def other_winners(table: str) -> str:
    """A sentence on the schemes whose best method of the table is another by KL divergence, by which the report ranks."""
    told = []
    for scheme in SCHEMES:
        known = {name: value("calibration", table, scheme, name, CHANGE) for name in METHODS}
        shares = {name: value("calibration", table, scheme, name, RECOVERED) for name in METHODS}
        best = min((name for name in known if known[name] is not None), key=lambda name: known[name] or 0.0)
        first = max(
            (name for name in shares if shares[name] is not None), key=lambda name: shares[name] or 0.0
        )
        if best != first:
            told.append(
                f"of `{scheme.replace(', inputs ', '` x `')}` {METHODS[first]} removes {shares[first]:.0f}% of rounding's, "
                f"{METHODS[best]} {shares[best]:.0f}%"
            )
    words = f", and has another winner there: {'; '.join(told)}" if told else ""
    return f"The report has more methods and ranks them by KL divergence from the unquantized model{words}."


def generation() -> str:
    """Tokens per second of `generate()` over those of bfloat16, of all layers and of a quarter of them, by batch."""
    columns = {
        f"{layers} layers, batch {batch}": (table, f"batch {batch}, compiled")
        for layers, table, batches in ((32, WHOLE, (1, 16)), (8, QUARTER, (1, 16, 64)))
        for batch in batches
    }
    lines = [
        [
            words,
            *(times(value("generate", *place, name, "speed over bfloat16")) for place in columns.values()),
        ]
        for name, words in GENERATED.items()
    ]
    return markdown(["weights", *columns], lines)


def bits(entry: Entry) -> str:
    """Stored bits per weight, scales and zero points included."""
    size = ao_lab.weight_size(WEIGHT, recipe(entry))
    return f"{8 * size.bytes / (WEIGHT[0] * WEIGHT[1]):.3g}"


def loss(entry: Entry, model: str, scale: str) -> str:
    """Change of a model's perplexity by rounding to nearest at one scale: as `ptq` has it, else as `calibration` does, which
    begins with it."""
    made = recipe(entry)
    table, name = table_of(model, scale), made.weight.name
    setting = setting_of(entry)
    both = f"{name}, inputs {made.activation.name}" if made.activation else name
    found = changed("ptq", table, setting, name) or changed("calibration", table, both, "rounding")
    return found or (ABSENT if undivided(table, setting, name) else "")


def divergence(entry: Entry) -> str:
    """The mean KL divergence of the model's predictions from the unquantized model's, of the short run of `ptq`."""
    table, name, setting = table_of(MODEL, "quick"), recipe(entry).weight.name, setting_of(entry)
    kl, error, windows = (
        value("ptq", table, setting, name, metric) for metric in (KL, f"{KL}, standard error", "windows")
    )
    half = half_interval(error, None if windows is None else int(windows))
    return "" if kl is None or half is None else rounded(kl, half)


def setting_of(entry: Entry) -> str:
    """What `ptq` calls the settings of an entry's row."""
    made = recipe(entry)
    return f"weights + activations in {made.activation.name}" if made.activation else "weights"


def changed(experiment: str, table: str, setting: str, method: str) -> str:
    """A change of perplexity with half of its 95% interval, that of the loss times the ratio of the perplexities."""
    change, loss, error, windows = (
        value(experiment, table, setting, method, name) for name in (CHANGE, LOSS, LOSS_ERROR, "windows")
    )
    half = half_interval(error, None if windows is None else int(windows))
    if change is None or loss is None or half is None:
        return ""
    return rounded(change, 100 * math.exp(loss) * half, sign=True, unit="%")


def undivided(table: str, setting: str, method: str) -> bool:
    """Whether rows say that a scheme's groups do not divide the layers of a table's model."""
    return (table.rpartition("/")[0] + "/model", setting, method) in with_undivided("ptq")


@lru_cache
def with_undivided(experiment: str) -> set[tuple[str, ...]]:
    """Table, setting and method of the rows that say so."""
    return {key[:3] for key in indexed(experiment) if UNDIVIDED in key[3]}


def table_of(model: str, scale: str) -> str:
    """The table of a model's perplexities at a scale."""
    return f"real {model}/{scale}/{TEXT}"


@lru_cache
def tables(experiment: str) -> dict[str, set[str]]:
    """The tables of an experiment, each with its devices."""
    found: dict[str, set[str]] = {}
    for key, rows in indexed(experiment).items():
        found.setdefault(key[0], set()).update(rows)
    return found


def speeds(entry: Entry, device: str) -> str:
    """Its speeds for all numbers of tokens; nothing where one was not measured."""
    found = [speed(entry, device, tokens) for tokens in TOKENS]
    return ", ".join(found) if all(found) else ""


def speed(entry: Entry, device: str, tokens: int) -> str:
    """Speed of one layer over bfloat16, by CUDA graphs; FORMER where another kernel is chosen today than was measured."""
    kind = "activations" if recipe(entry).activation else "weights"
    row = layer_row(kind, WEIGHT, entry.linear, device, tokens)
    return "" if row is None else FORMER if outdated(row) else times(row.value)


def layer_row(kind: str, shape: tuple[int, int], method: str, device: str, tokens: int) -> Row | None:
    """The speed of a layer of a shape over bfloat16 by CUDA graphs; None where it was not measured."""
    table = f"{kind}/full/{shape[0]}x{shape[1]}"
    setting = f"{tokens} row{'s' * (tokens > 1)}, CUDA graph"
    return indexed("linear").get((table, setting, method, "speed over bfloat16"), {}).get(device)


def four_bits() -> str:
    """A paragraph on how fast a layer with 4-bit weights is by the number of tokens, over all kinds and layers measured."""
    words = f"{four_bits_words()} Layer by layer: [limits](limits.md#speed-of-4-bit-weights)."
    return f"{textwrap.fill(words, 128, break_on_hyphens=False)}\n"


def limits() -> str:
    """The same as a line of README.md's list."""
    return f"{textwrap.fill(f'- {four_bits_words()}', 126, subsequent_indent='  ', break_on_hyphens=False)}\n"


def four_bits_words() -> str:
    """Up to how many tokens the median layer is faster than bfloat16, the range there, and the range with more."""
    medians = {tokens: statistics.median(four_bit_speeds(tokens)) for tokens in MANY_TOKENS}
    last = max(tokens for tokens, middle in medians.items() if middle > 1)
    more = [tokens for tokens in MANY_TOKENS if tokens > last]
    few = [f"{span(four_bit_speeds(tokens))} at {tokens}" for tokens in MANY_TOKENS if tokens <= last]
    many = list(itertools.chain.from_iterable(map(four_bit_speeds, more)))
    slowest = min(LAYERS, key=lambda shape: min(min(four_bit_speeds(tokens, [shape])) for tokens in more))
    least = f"least in {slowest[0]} x {slowest[1]} (H200)"
    return (
        f"With 4-bit weights ({', '.join(OF_FOUR_BITS)}) most layers measured are faster than in bfloat16 up to {last} "
        f"tokens ({', '.join(few)}) and slower from {more[0]} on: {span(many)}, {least}."
    )


def four_bits_by_layer() -> str:
    """Slowest and fastest of the 4-bit weights at each number of tokens, by layer."""
    lines = [
        [str(tokens), *(span(four_bit_speeds(tokens, [shape])) for shape in LAYERS)] for tokens in MANY_TOKENS
    ]
    names = [f"{rows} x {columns}" for rows, columns in LAYERS]
    told = textwrap.fill(
        f"Speed of one layer over bfloat16 on an H200, the slowest to the fastest of {', '.join(OF_FOUR_BITS)}:",
        128,
    )
    return f"{told}\n\n{markdown(['tokens', *names], lines)}"


def four_bit_speeds(tokens: int, shapes: Sequence[tuple[int, int]] = LAYERS) -> list[float]:
    """Speeds over bfloat16 of 4-bit weights at some shapes, by today's kernels; ValueError where one was not measured."""
    found = []
    for shape in shapes:
        for method in itertools.chain(*OF_FOUR_BITS.values()):
            one = layer_row("weights", shape, method, GPUS["H200"], tokens)
            if one is None:
                raise ValueError(
                    f"{method} at {tokens} tokens of {shape} has no speed on {GPUS['H200']}; measure it, or leave it out"
                )
            found += [] if outdated(one) else [one.value]
    return found


def span(found: Sequence[float]) -> str:
    """The least to the largest."""
    return f"{min(found):.2f}x to {max(found):.2f}x"


def recipe(entry: Entry) -> Any:
    """The recipe of a configuration."""
    return getattr(ao_lab, entry.config)(**entry.options).recipe()


def clients(entry: Entry) -> list[str]:
    """Programs that computed the model from a file, as docs/clients.csv has them."""
    return [
        one["client"].replace("(CPU)", "(CPU build)")
        for one in outcomes()
        if one["scheme"] == entry.client and one["outcome"] in READ and one["client"] not in NO_FILES
    ]


def value(
    experiment: str, table: str, setting: str, method: str, metric: str, device: str = ""
) -> float | None:
    """A committed result, of an H200 where it was measured on several devices; None where there is none."""
    found = indexed(experiment).get((table, setting, method, metric), {})
    device = device or (GPUS["H200"] if GPUS["H200"] in found else next(iter(found), ""))
    return found[device].value if device in found else None


@lru_cache
def indexed(experiment: str) -> dict[tuple[str, ...], dict[str, Row]]:
    """Rows of an experiment by what they are of, then by device."""
    index: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read(Paths.default(ROOT / "reports").rows(experiment)):
        index.setdefault((row.table, row.setting, row.method, row.metric), {})[row.device] = row
    return index


@lru_cache(maxsize=1)
def outcomes() -> list[dict[str, str]]:
    """Lines of docs/clients.csv."""
    with open(ROOT / "docs" / "clients.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def percent(number: float | None) -> str:
    """A change in percent."""
    return "" if number is None else f"{number:+.0f}%" if abs(number) >= 10 else f"{number:+.1f}%"


def times(number: float | None) -> str:
    """A ratio."""
    return "" if number is None else f"{number:.2f}x"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    main()
