"""Published accuracies: the value of ours that stands beside each, and the exact command that measures it.

A published accuracy is a number of the model itself (perplexity, a benchmark's score, a final loss), where a stand-in says
nothing. One of ours stands beside it where a folder of that very model was measured: its shapes and its name are those of the
published one (`experiments.models.causal_lm.published_name`), the task is the same task of lm-evaluation-harness on all of its
examples, and the method is the same scheme of weights and inputs.

A report on models of one's own (`ao-lab reproduce ptq --model DIR` into a folder of its own) shows published values of these
very models, or none: others say nothing of a reader's model (`of_given_models`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.texts import is_held_out
from experiments.harness.rows import Row, table_parts
from experiments.models.causal_lm import BASE, REAL
from experiments.models.pretrained import MODELS
from experiments.models.quantized_model import WEIGHTS, setting_name
from experiments.report.content import Comparison, Section, Table
from experiments.report.real_runs import RealRun, real_runs
from experiments.report.results import DECODING, FOLDER, Published, number, read

#: Values of a model of Llama's in six formats, published later than the paper.
LATER = FOLDER / "ptq_accuracy.csv"
#: Values of models that were fine-tuned, as they are and for quantization.
FINE_TUNED = FOLDER / "qat_accuracy.csv"
#: Words of metrics that are accuracies.
ACCURACY = re.compile(
    "perplexity|hellaswag|winogrande|mmlu|mean of 8 tasks|final loss|imagenet top1|mIoU|relative accuracy"
)
#: Of published metrics the task of the harness, its value, and the words of a page.
TASKS = {
    "wikitext_word_perplexity": ("wikitext", "word_perplexity", "perplexity per word, wikitext"),
    "winogrande": ("winogrande", "acc", "winogrande acc"),
    "hellaswag_acc": ("hellaswag", "acc", "hellaswag acc"),
}
#: What a row of the harness says of how many examples of a task were asked; 0: all of them.
EXAMPLES = "tasks: examples of each (0: all)"


@dataclass(frozen=True)
class Way:
    """How a published method is measured: experiment, setting and method of its rows, and what `--only` names for it.

    text: the file of the text that the model is fine-tuned on, whose held-out end a run judges by; "" for none.
    """

    experiment: str
    setting: str
    method: str
    only: tuple[str, ...] = ()
    text: str = ""


def rounded(scheme: str, inputs: str | None = None) -> Way:
    """Rounding in a scheme of weights, and of inputs or None."""
    return Way("ptq", setting_name(inputs), scheme, () if scheme == BASE else (scheme,))


def calibrated(scheme: str, method: str) -> Way:
    """A method with data in a scheme of weights."""
    return Way("calibration", scheme, method, (scheme, method))


def fine_tuned(method: str, inputs: str | None = None) -> Way:
    """A way of experiment `qat` from a model fine-tuned on OASST1, with integers of 4 bits in groups of 32."""
    return Way("qat", setting_name(inputs), method, ("int4_g32",), "oasst1.txt")


#: By the names that published tables use.
WAYS: Mapping[str, Way] = {
    "bfloat16": rounded(BASE),
    "fp6": rounded("torchao.fp6_e3m2_rowwise"),
    "int8wo": rounded("int8_rowwise"),
    "int8dq": rounded("int8_rowwise", "int8_rowwise"),
    "int4wo-64": rounded("torchao.int4_g64_tinygemm"),
    "float8wo": rounded("fp8_rowwise"),
    "float8dq per-row": rounded("fp8_rowwise", "fp8_rowwise"),
    "float8dq per-tensor": rounded("fp8_tensorwise", "fp8_tensorwise"),
    "int4wo-64-GPTQ": calibrated("torchao.int4_g64_tinygemm", "gptq"),
    "autoquant-int4hqq": calibrated("torchao.int4_g64_tinygemm", "hqq"),
    "bf16/bf16": rounded(BASE),
    "float8_rowwise/float8_rowwise": rounded("fp8_rowwise", "fp8_rowwise"),
    "int8_rowwise/bf16": rounded("int8_rowwise"),
    "int8_rowwise/int8_rowwise": rounded("int8_rowwise", "int8_rowwise"),
    "mxfp8/mxfp8": rounded("torchao.mxfp8_e4m3_rceil", "torchao.mxfp8_e4m3_rceil"),
    "nvfp4/nvfp4": rounded("torchao.nvfp4", "torchao.nvfp4"),
    "fine-tuned, bfloat16": fine_tuned(f"{BASE}, fine-tuned"),
    "fine-tuned, PTQ 8da4w": fine_tuned("int4_g32: PTQ", "int8_rowwise_asymmetric"),
    "QAT 8da4w": fine_tuned("int4_g32: QAT", "int8_rowwise_asymmetric"),
}


def published_accuracies(path: Path) -> list[Published]:
    """The accuracies of a file that tasks of the harness measure."""
    return [one for one in read(path) if one.metric in TASKS]


def of_experiment(experiment: str) -> list[Published]:
    """The accuracies of quantized models that an experiment's page shows."""
    return [
        one
        for path in (DECODING, LATER, FINE_TUNED)
        for one in published_accuracies(path)
        if WAYS[one.method].experiment == experiment
    ]


#: How tables of real models begin; experiments whose own run has no other tables, of the models that packages carry.
KINDS, OF_PACKAGES = (REAL, "encoder ", "speech "), ("calibration",)


def is_given(experiment: str, rows: Sequence[Row]) -> bool:
    """Whether rows are of models alone that somebody named (`--model`), and of nothing that the experiment measures itself."""
    kinds = {table_parts(row.table)[0] for row in rows}
    titles = {one.title for one in MODELS.values()} if experiment in OF_PACKAGES else set()
    return bool(kinds) and all(
        kind.startswith(KINDS) and kind.partition(" ")[2] not in titles for kind in kinds
    )


def of_given_models(
    experiment: str, rows: Sequence[Row], found: Sequence[Comparison]
) -> Sequence[Comparison]:
    """Published values that a page shows: of rows of models that somebody named those of these very models, else all."""
    if not is_given(experiment, rows):
        return found
    names = {run.fact("published: ") for run in real_runs(rows)}
    return [one for one in found if one.model in names]


def comparisons(experiment: str, rows: Sequence[Row]) -> list[Comparison]:
    """Each published accuracy of an experiment beside ours, where a folder of that model was measured."""
    runs = real_runs(rows)
    found = [comparison(one, runs) for one in of_experiment(experiment)]
    return list(of_given_models(experiment, rows, found))


def comparison(one: Published, runs: Sequence[RealRun]) -> Comparison:
    """A published accuracy beside ours, with the command that measures it."""
    way = WAYS[one.method]
    value, device = measured(one, runs, way)
    return Comparison(
        one.model,
        one.method,
        TASKS[one.metric][2],
        one.unit,
        one.value,
        one.hardware,
        f"{one.paper}, {one.source}",
        value,
        device,
        command(one, way),
    )


def measured(one: Published, runs: Sequence[RealRun], way: Way) -> tuple[float | None, str]:
    """Ours and its device; None without."""
    task, value, _ = TASKS[one.metric]
    for run in runs:
        found = run.whole.value(way.setting, way.method, f"{task}: {value}")
        on_text = not way.text or any(is_held_out(name, way.text) for name in run.texts)
        same = run.fact("published: ") == one.model and on_text
        if found is not None and same and asked_all(run, way):
            return found * (100.0 if one.unit == "%" else 1.0), run.where.device
    return None, ""


def asked_all(run: RealRun, way: Way) -> bool:
    """Whether tasks were measured on all of their examples."""
    return run.whole.value(way.setting, way.method, EXAMPLES) == 0


def command(one: Published, way: Way) -> str:
    """What measures it, on a folder of that model's name."""
    text = f" --text {way.text}" if way.text else ""
    model, task = folder_of(one.model), TASKS[one.metric][0]
    return (
        f"ao-lab reproduce {way.experiment} --model {model}{text} --scale full --task {task}{only(way.only)}"
    )


def only(names: Sequence[str]) -> str:
    """Names as options of a command."""
    return "".join(f" --only {name!r}" if " " in name else f" --only {name}" for name in names)


def folder_of(model: str) -> str:
    """The name that the folder of a published model must have."""
    return model.replace("(-chat)", "-chat")


#: Of fine-tunings in FP8 the rows of `fp8_training` by the published names; torchtune's default is tensorwise.
RECIPES = {
    "bf16": ("bfloat16", "bf16"),
    "fp8_noname": ("tensorwise", "tensorwise"),
    "fp8_tensorwise": ("tensorwise", "tensorwise"),
    "fp8_rowwise": ("rowwise", "rowwise"),
    "fp8_rowwise_with_gw_hp": ("rowwise_with_gw_hp", "rowwise_with_gw_hp"),
}
#: Why the accuracies of a published training have no command, by its model.
TRAININGS = {
    "3B": "a pretraining on 1T tokens, whose data are not named",
    "Llama-3-70B": "a pretraining on 256 GPUs and more",
    "DINOv2 ViT-L": "a pretraining of DINOv2 on 4 GPUs, whose code is not here",
    "SAM ViT-h": "no experiment here reads weights of SAM and images of COCO",
}


def trained_in(one: Published) -> Way | None:
    """How a published fine-tuning in FP8 is measured; None for another training."""
    if one.model != "Llama-3.2-3B" or one.metric not in TASKS:
        return None
    name, recipe = RECIPES[one.method]
    return Way("fp8_training", WEIGHTS, f"fine-tuned in {name}", (recipe,), "oasst1.txt")


def how(one: Published, rows: Sequence[Row] = ()) -> dict[str, Any]:
    """Ours, and the command or the reason, of a published training's accuracy, as arguments of `Comparison`; else none."""
    if not ACCURACY.search(one.metric.replace("_", " ")):
        return {}
    way = trained_in(one)
    if way is None:
        return {"reason": TRAININGS[one.model]}
    value, device = measured(one, real_runs(rows), way)
    return {"measured": value, "measured_on": device, "command": command(one, way)}


def is_accuracy(one: Comparison) -> bool:
    """Whether a published value is an accuracy: a number of the trained model, not of shapes."""
    return ACCURACY.search(one.metric) is not None


def counted(found: Iterable[Comparison]) -> str:
    """How many published accuracies are measured, have a command, or have neither; "" of none."""
    all_of = [one for one in found if is_accuracy(one)]
    if not all_of:
        return ""
    beside = sum(one.measured is not None for one in all_of)
    commands = sum(one.measured is None and bool(one.command) for one in all_of)
    rest = len(all_of) - beside - commands
    return (
        f"Of {len(all_of)} published accuracies {beside or 'none'} {'are' if beside > 1 else 'is'} measured here, for "
        f"{commands} the table names the command that measures it, for {rest} the reason why there is none"
    )


def sections(experiment: str, rows: Sequence[Row], beside: str = "") -> list[Section]:
    """The section of published accuracies; none where the page shows none. beside: what else ours must have in common."""
    found = table(experiment, rows)
    text = f"Values of a model stand beside that very model alone, known by its shapes and its folder's name{beside}."
    return [Section("Published accuracies", [text], [], [found])] if found.lines else []


def table(experiment: str, rows: Sequence[Row]) -> Table:
    """A line for each published accuracy of an experiment."""
    lines = [
        [
            f"{one.model}, {one.method}",
            one.metric,
            number(one.published, 3),
            one.published_on,
            number(one.measured, 3),
            one.measured_on,
            f"`{one.command}`" if one.command else one.reason,
        ]
        for one in comparisons(experiment, rows)
    ]
    columns = [
        "model and method",
        "metric",
        "published",
        "on",
        "ours",
        "on",
        "command (--model: a folder of that name; --text: its text)",
    ]
    return Table("Published accuracies of quantized models (lm-evaluation-harness)", columns, lines)
