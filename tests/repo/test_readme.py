"""README as a stranger types it: Python blocks, transformers alone on what they leave, tables that are those of the code."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ao_lab
from tests.support.models.hf_models import save_llama
from tests.support.runs import forks

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUIET = "import warnings; warnings.simplefilter('ignore')\n"
#: After a block that leaves a model: its outputs.
KEEP = """
with torch.no_grad():
    torch.save(model.eval()(torch.arange(20).reshape(2, 10)).logits, "out.pt")
"""
#: After the block of transformers alone.
COMPARE = """
import sys, torch
assert "ao_lab" not in sys.modules
with torch.no_grad():
    found = model.eval()(torch.arange(20).reshape(2, 10)).logits
assert torch.equal(found, torch.load("out.pt")), "transformers computes another model"
"""


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def printed(done):
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def stranger(text, folder):
    """An interpreter in a folder, with this checkout in its path and nothing imported."""
    (folder / "typed.py").write_text(QUIET + text)
    keep = ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS")
    env = {**{name: os.environ[name] for name in keep if name in os.environ}, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "typed.py"]
    env["PYTHONPATH"] = str(ROOT)
    return printed(subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True))


def run(folder, *arguments):
    """`python` with these arguments, in a process that has imported transformers and nothing of ours."""
    return printed(forks.python(*arguments, server="transformers", cwd=folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stranger sits: a model in MODEL_DIR."""
    where = tmp_path_factory.mktemp("stranger")
    save_llama(where / "MODEL_DIR")
    return where


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_readme_blocks(folder, anew):
    """Both blocks exactly as they stand; transformers alone computes what the loaded model computes. By night in an interpreter
    that has imported nothing."""
    ours, alone = blocks(README, "python")
    assert len(ours.strip().splitlines()) <= 10
    nothing = 'import sys; assert "ao_lab" not in sys.modules\n'
    typed = stranger(ours + KEEP, folder) if anew else run(folder, "-c", nothing + QUIET + ours + KEEP)
    assert "layers quantized" in typed
    run(folder, "-c", QUIET + alone + COMPARE)


def loaded(name):
    """A program of docs."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def raises(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("needs calibration"), NotImplementedError("no gradient")])
def test_what_is_not_supported_is_a_no(error):
    assert loaded("matrix").answer(raises, error) == "no"


@pytest.mark.parametrize("error", [RuntimeError("a defect"), TypeError("a defect")])
def test_a_defect_is_not_a_no(error):
    with pytest.raises(type(error), match="a defect"):
        loaded("matrix").answer(raises, error)


def test_table_of_configurations():
    """What each configuration does is what the code does: `python docs/matrix.py` writes it."""
    matrix = loaded("matrix")
    page = (ROOT / "docs" / "choose.md").read_text()
    assert page.partition(matrix.BEGIN)[2].partition(matrix.END)[0] == matrix.table()


def test_tables_of_results():
    """They are the committed results: `python docs/choose.py` writes them."""
    choose = loaded("choose")
    tables = [(page, table) for page, tables in choose.PAGES.items() for table in tables]
    assert [one for one in tables if choose.shown(*one) != getattr(choose, one[1])()] == []


def test_windows_are_those_of_the_rows(monkeypatch):
    """Not those that a scale has by default; a table of several texts has none."""
    choose = loaded("choose")

    def rows(*counts):
        made = {"windows": counts, "tokens of a window": (1024,)}
        return {
            ("t", "s", str(number), metric): {"cpu": SimpleNamespace(metric=metric, value=float(count))}
            for metric, found in made.items()
            for number, count in enumerate(found)
        }

    monkeypatch.setattr(choose, "indexed", lambda experiment: rows(7, 7))
    assert choose.windows_of("ptq", "t") == "7 windows of 1024 tokens"
    monkeypatch.setattr(choose, "indexed", lambda experiment: rows(7, 8))
    with pytest.raises(ValueError, match=r"t of ptq has rows with windows \[7.0, 8.0\]"):
        choose.windows_of("ptq", "t")


def test_the_cpu_build_that_pages_name_is_the_pinned_one():
    """Another would be replaced by what `-c constraints.txt` asks for, gigabytes of CUDA with it."""
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    for page in (README, ROOT / "docs" / "guides" / "install.md"):
        assert re.findall(r"pip install torch==(\S+)", page.read_text()) == [pin]


def test_the_first_page_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_speed_of_one_row_is_of_the_layer_or_else_of_the_kernel(monkeypatch):
    """Layers are what users get; the kernel on plain codes says that it is one, and static inputs are no dynamic ones."""
    matrix = loaded("matrix")

    def row(experiment, table, setting, method, metric, value):
        return matrix.Row(
            experiment=experiment, table=f"{table}/full/{matrix.WEIGHT}", setting=setting, method=method, metric=metric,
            value=value, unit="", device=matrix.DEVICE, seed=0,
        )  # fmt: skip

    speed = "speed over bfloat16"
    found = {
        "linear": [
            row("linear", "activations", matrix.ONE_ROW, "int8", speed, 9.0),
            row("linear", "weights", matrix.ONE_ROW, "int8", speed, 2.0),
            row("linear", "activations", matrix.ONE_ROW, "fp8 dynamic, tensor", speed, 1.5),
        ],
        "kernels": [
            row("kernels", "kernels", matrix.WEIGHT, f"linear.{name}", "time over dense", 0.5)
            for name in ("int8_rowwise", "fp8_rowwise")
        ],
    }
    monkeypatch.setattr(matrix, "rows", found.__getitem__)
    cells = {
        "Int8WeightOnlyConfig": "2.00x",
        "Float8WeightOnlyConfig": "2.00x (kernel)",
        "Float8DynamicActivationFloat8WeightConfig": "1.50x",
        "Float8StaticActivationFloat8WeightConfig": "",
        "NF4WeightOnlyConfig": "",
    }
    assert {name: matrix.one_row(getattr(ao_lab, name)()) for name in cells} == cells


def test_readme_commands_are_targets():
    """The commands of README are targets of the Makefile."""
    typed = re.findall(r"^make (\w+)", "\n".join(blocks(README, "")), re.MULTILINE)
    assert typed == ["reproduce", "test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*typed, "docs"} <= set(targets)
