"""Published perplexities of quantized Llamas, each beside ours of that very model, or with the command that measures it.

They are word perplexities of lm-evaluation-harness's task wikitext (`experiments/published/ptq_decoding.csv`), so what is
beside them is `--task wikitext` on the same model's folder, never a perplexity of the windows here.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.causal_lm import BASE
from experiments.models.quantized_model import setting_name
from experiments.report.content import Comparison, Table
from experiments.report.real_runs import RealRun, real_runs
from experiments.report.results import Published, decoding, number

PERPLEXITY = "wikitext_word_perplexity"
#: The metric of the harness's task.
METRIC = "wikitext: word_perplexity"
#: Schemes of weights and of inputs (None: bfloat16) by the names that published tables use.
SCHEMES: dict[str, tuple[str, str | None]] = {
    "bfloat16": (BASE, None),
    "int8wo": ("int8_rowwise", None),
    "int8dq": ("int8_rowwise", "int8_rowwise"),
    "int4wo-64": ("torchao.int4_g64_tinygemm", None),
    "float8wo": ("fp8_rowwise", None),
    "float8dq per-row": ("fp8_rowwise", "fp8_rowwise"),
    "float8dq per-tensor": ("fp8_tensorwise", "fp8_tensorwise"),
}
#: Of methods with data the scheme and the method of experiment `calibration`.
CALIBRATED = {
    "int4wo-64-GPTQ": ("torchao.int4_g64_tinygemm", "gptq"),
    "autoquant-int4hqq": ("torchao.int4_g64_tinygemm", "hqq"),
}


def perplexities() -> list[Published]:
    """The published perplexities."""
    return [one for one in decoding() if one.metric == PERPLEXITY]


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Each beside ours, where a folder of that model was measured."""
    runs, metric = real_runs(rows), "perplexity per word, wikitext"
    return [
        Comparison(
            one.model,
            one.method,
            metric,
            "ppl",
            one.value,
            one.hardware,
            f"{one.paper}, {one.source}",
            *measured(one, runs),
        )
        for one in perplexities()
    ]


def measured(one: Published, runs: Sequence[RealRun]) -> tuple[float | None, str]:
    """Ours and its device; None without."""
    if one.method in SCHEMES:
        scheme, inputs = SCHEMES[one.method]
        for run in runs:
            value = run.whole.value(setting_name(inputs), scheme, METRIC)
            if run.told("published: ") == one.model and run.where.scale == "full" and value is not None:
                return value, run.where.device
    return None, ""


def command(one: Published) -> str:
    """What measures it, on a folder of that model; "" where no scheme here is the method's."""
    folder = one.model.replace("(-chat)", "-chat")
    start = f"--model {folder} --scale full --task wikitext"
    if one.method in CALIBRATED:
        scheme, method = CALIBRATED[one.method]
        return f"ao-lab reproduce calibration {start} --only {scheme} --only {method}"
    if one.method in SCHEMES:
        scheme = SCHEMES[one.method][0]
        return f"ao-lab reproduce ptq {start}" + (f" --only {scheme}" if scheme != BASE else "")
    return ""


def table(rows: Sequence[Row]) -> Table:
    """A line for each published perplexity."""
    runs, lines = real_runs(rows), list[list[str]]()
    for one in perplexities():
        ours, device = measured(one, runs)
        said = command(one) or "no scheme here is this method's"
        name = f"{one.model}, {one.method}"
        lines.append([name, number(one.value, 3), one.hardware, number(ours, 3), device, said])
    columns = [
        "model and method",
        "published",
        "on",
        "ours",
        "on",
        "command (--model: a folder of that name)",
    ]
    return Table("Published word perplexities (lm-evaluation-harness, wikitext)", columns, lines)
