"""The last table of docs/choose.md: what each configuration does on a CPU, on an H200, saved, trained, and compiled.

``python docs/matrix.py`` writes it between the marks of docs/choose.md; a test compares it with what the code does. Cells are
found by running the configuration on a small layer, but the speeds on an H200: rows of ``reports/data/linear.csv.gz`` (layers
as `quantize_` makes them) and ``reports/data/kernels.csv.gz``.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ao_lab  # noqa: E402
from experiments.harness.paths import Paths  # noqa: E402
from experiments.harness.rows import Row, read  # noqa: E402
from experiments.linear.tables import PARTS  # noqa: E402

BEGIN, END = "<!-- matrix: python docs/matrix.py -->\n", "<!-- end of matrix -->\n"
COLUMNS = (
    "configuration",
    "weights",
    "inputs",
    "CPU",
    "quantize",
    "1 token",
    "saved as",
    "QAT",
    "compile",
)
DEVICE = "NVIDIA H200"
#: Of the layers' rows: kinds of tables, and the setting.
LAYERS, ONE_ROW = ("weights", "activations"), "1 row, CUDA graph"
#: What a cell says whose row is of a kernel alone.
KERNEL = "(kernel)"
#: Shapes of the rows of an H200: a tensor to quantize, and a weight of Llama-3.1-8B.
TENSOR, WEIGHT = "16384x4096", "14336x4096"
#: How a configuration says that it does not support something: QAT and quantize_, gradients, and a graph break.
NOT_SUPPORTED = (ValueError, NotImplementedError, torch._dynamo.exc.Unsupported)


def main() -> None:
    """Write the table into docs/choose.md."""
    path = ROOT / "docs/choose.md"
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(before + BEGIN + table() + END + after.partition(END)[2], encoding="utf-8")


def table() -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(line, configurations())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def configurations() -> list[str]:
    """Names of the configurations of weights, as torchao has them."""
    return sorted(name for name in ao_lab.__all__ if name.endswith(("WeightConfig", "WeightOnlyConfig")))


def line(name: str) -> Sequence[str]:
    """The cells of one configuration with its default parameters."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(ao_lab, name)()
        model = quantized(config)
        recipe = model[0].weight.recipe
        return (
            f"`{name}`",
            f"`{recipe.weight.name}`",
            f"`{recipe.activation.name}`" if recipe.activation else "",
            on_cpu(model),
            quantize_rate(recipe),
            one_row(config),
            saved(config),
            answer(trained, config),
            answer(compiled, model),
        )


def layer() -> nn.Sequential:
    """A small model of one linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 256, bias=False)).bfloat16()


def run(model: nn.Module, rows: int = 2) -> torch.Tensor:
    """Outputs of a model for some rows of inputs."""
    out: torch.Tensor = model(torch.ones(rows, 512, dtype=torch.bfloat16))
    return out


def quantized(config: Any) -> nn.Sequential:
    """The model under a configuration, calibrated where that has static scales."""
    model = layer()
    options = {"forward_loop": run} if "Static" in type(config).__name__ else {}
    ao_lab.quantize_(model, config, **options)
    return model


def on_cpu(model: nn.Sequential) -> str:
    """The kernel that `explain` names for a CPU."""
    (found,) = ao_lab.explain(model).layers
    return str(found.kernel)


def quantize_rate(recipe: Any) -> str:
    """The weight scheme's `quantize` as a fraction of the rate of a copy; nothing where it was not measured."""
    names = (f"quantize.{recipe.weight.name}", f"quantize.{recipe.weight.name}.packed")
    found = [row for name in names if (row := measured("kernels", TENSOR, name, "fraction"))]
    return f"{found[0].value:.2f}" if found else ""


def one_row(config: Any) -> str:
    """The speed of one row of inputs over a dense bfloat16 layer: of the layer that `quantize_` makes, or else of the kernel on
    plain codes, which the cell says; nothing where neither was measured."""
    found = measured_layer(config)
    if found:
        return f"{found.value:.2f}x"
    recipe = config.recipe()
    case = "linear_of_codes" if recipe.activation else "linear"
    kernel = measured("kernels", WEIGHT, f"{case}.{recipe.weight.name}", "time over dense")
    return f"{1 / kernel.value:.2f}x {KERNEL}" if kernel else ""


def measured_layer(config: Any) -> Row | None:
    """The row of a layer with the weights and inputs of a configuration: by the same class where inputs are rounded, since
    static scales are another layer."""
    for kind in LAYERS:
        for method in PARTS[kind]:
            other = method.build() if method.build else None
            same = other and (kind == "weights" or type(other) is type(config))
            if same and other.recipe() == config.recipe():
                table = f"{kind}/full/{WEIGHT}"
                return measured("linear", ONE_ROW, method.name, "speed over bfloat16", table)
    return None


def measured(experiment: str, setting: str, method: str, metric: str, table: str | None = None) -> Row | None:
    """A committed row of an H200, or None."""
    wanted = setting, method, metric, DEVICE
    for row in rows(experiment):
        if (row.setting, row.method, row.metric, row.device) == wanted and table in (None, row.table):
            return row
    return None


@lru_cache
def rows(experiment: str) -> tuple[Row, ...]:
    """All rows of an experiment."""
    return tuple(read(Paths.default(ROOT / "reports").rows(experiment)))


def saved(config: Any) -> str:
    """The layout that transformers and vLLM read where there is one for this configuration, else our own."""
    try:
        model = quantized(config.for_layout("compressed-tensors"))
    except ValueError:
        return "ao_lab"
    with tempfile.TemporaryDirectory() as folder:
        return str(ao_lab.save_pretrained(model, folder).layout)


def trained(config: Any) -> None:
    """QAT: prepare, one step, convert."""
    model = layer()
    ao_lab.quantize_(model, ao_lab.QATConfig(config, step="prepare"))
    run(model).sum().backward()
    ao_lab.quantize_(model, ao_lab.QATConfig(config, step="convert"))


def compiled(model: nn.Module) -> None:
    """torch.compile of one row and of several, without a graph break."""
    program = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        run(program, 1), run(program, 4)


def answer(work: Any, argument: Any) -> str:
    """yes where this runs, no where it is not supported; any other error is one of the code and raises."""
    try:
        work(argument)
    except NOT_SUPPORTED:
        return "no"
    return "yes"


if __name__ == "__main__":
    main()
