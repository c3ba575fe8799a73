"""README and guide as a stranger types them: Python blocks, commands about models, transformers alone on what they leave."""

import importlib.util
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ao_lab
from tests.ao_lab.checkpoint.formats.test_compressed_tensors import packed_folder
from tests.support.models.small_llama import save_llama
from tests.support.runs import forks

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
ROOT = Path(__file__).parents[2]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "GUIDE.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"\b(?:ao_lab|reference|fast)(?:\.(?!py\b)[A-Za-z_]\w*)+")
COMMANDS = ("ao-lab quantize", "ao-lab eval")
QUIET = "import warnings; warnings.simplefilter('ignore')\n"
#: Before blocks of the guide that speak of a model: a dense one, and inputs.
DENSE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("MODEL_DIR").eval()
tokens = torch.arange(20).reshape(2, 10)
step = model.forward
"""
#: After a block that leaves a model: its outputs.
KEEP = """
import torch
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
    """Where the stranger sits: a model in MODEL_DIR, one of another library in GPTQ_DIR."""
    where = tmp_path_factory.mktemp("stranger")
    save_llama(where / "MODEL_DIR")
    packed_folder(where / "GPTQ_DIR", "gptq")
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


def test_guide_blocks(folder):
    """Each block in a process with all before it."""
    found = blocks(GUIDE, "python")
    assert len(found) >= 6
    script = ""
    for text in found:
        script += DENSE if re.search(r"\bmodel\b", text) and "from_pretrained" not in text else ""
        script += "import ao_lab\n" + text
    assert "compressed-tensors" in run(folder, "-c", QUIET + script)


@pytest.mark.parametrize("page", [README, GUIDE], ids=["readme", "guide"])
def test_dotted_names_exist(page):
    """Of text and of blocks that no test runs, too."""
    names = set(DOTTED.findall(page.read_text()))
    assert names
    assert [name for name in sorted(names) if not exists(name)] == []
    assert not exists("ao_lab.no_such_name")


def exists(name):
    """Whether a dotted name is that of a module, also one whose extra is not installed, or in one."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return True


def test_commands(folder):
    """Both commands of the guide as they stand, then transformers alone on what they have written."""
    lines = [line for text in blocks(GUIDE, "") for line in text.splitlines() if line.startswith(COMMANDS)]
    assert [shlex.split(line, comments=True)[1] for line in lines] == ["quantize", "eval"]
    shown = ""
    for line in lines:
        typed = shlex.split(line, comments=True)[1:]
        shown += run(folder, "-m", "ao_lab", *typed)
    assert "layout: compressed-tensors" in shown
    assert "without dequantize=True" in " ".join(shown.split())
    model = ao_lab.load_pretrained(folder / "OUT_DIR").eval()
    with torch.no_grad():
        torch.save(model(torch.arange(20).reshape(2, 10)).logits, folder / "out.pt")
    read = 'from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained("OUT_DIR")\n'
    run(folder, "-c", QUIET + read + COMPARE)
    config = json.loads((folder / "OUT_DIR" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] is True


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


def test_readme_table():
    """What each configuration does is what the code does: `python docs/matrix.py` writes it."""
    matrix = loaded("matrix")
    shown = README.read_text().partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    assert shown == matrix.table()


def test_readme_figures_of_training():
    """They are the committed rows: `python docs/training.py` writes them."""
    training = loaded("training")
    shown = README.read_text().partition(training.BEGIN)[2].partition(training.END)[0]
    assert shown == training.text()


def test_readme_figures_of_generation():
    """They are the committed rows: `python docs/generation.py` writes them."""
    generation = loaded("generation")
    shown = README.read_text().partition(generation.BEGIN)[2].partition(generation.END)[0]
    assert shown == generation.text()


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
