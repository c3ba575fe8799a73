"""README as a stranger types it: Python blocks, commands about models, and transformers alone on what they leave."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ao_lab.checkpoint.formats.test_packed_llamas import packed_folder
from tests.support.models.small_llama import save_llama

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("ao-lab quantize", "ao-lab eval")
QUIET = "import warnings; warnings.simplefilter('ignore')\n"
#: Before blocks that speak of a model: a dense one, and inputs.
DENSE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("MODEL_DIR").eval()
tokens = torch.arange(20).reshape(2, 10)
step = model.forward
"""
#: After the block that saves: its outputs.
KEEP = """
with torch.no_grad():
    torch.save(model(tokens).logits, "out.pt")
"""
#: After the block of transformers alone.
COMPARE = """
import sys, torch
assert "ao_lab" not in sys.modules
with torch.no_grad():
    found = model.eval()(torch.arange(20).reshape(2, 10)).logits
assert torch.equal(found, torch.load("out.pt")), "transformers computes another model"
"""


def blocks(language):
    return [text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == language]


def run(arguments, folder, *, with_us=True):
    """A process in a folder, with this checkout in its path or without any."""
    keep = ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS")
    env = {**{name: os.environ[name] for name in keep if name in os.environ}, "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": str(ROOT)} if with_us else {}
    done = subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def python(text, folder, *, with_us=True):
    (folder / "typed.py").write_text(QUIET + text)
    return run([sys.executable, "-P", "typed.py"], folder, with_us=with_us)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stranger sits: a model in MODEL_DIR, one of another library in GPTQ_DIR."""
    where = tmp_path_factory.mktemp("stranger")
    save_llama(where / "MODEL_DIR")
    packed_folder(where / "GPTQ_DIR", "gptq")
    return where


def test_python(folder):
    """Each block in a process with all before it; the one that is transformers alone without ours, its outputs compared."""
    found = blocks("python")
    alone = [text for text in found if "ao_lab" not in text and "transformers" in text]
    ours = [text for text in found if text not in alone]
    assert len(ours) >= 6
    script = ""
    for text in ours:
        script += DENSE if re.search(r"\bmodel\b", text) and "from_pretrained" not in text else ""
        script += "import ao_lab\n" + text + (KEEP if 'save_pretrained(model, "out")' in text else "")
    shown = python(script, folder)
    assert "compressed-tensors" in shown
    assert len(alone) == 1
    python(alone[0] + COMPARE, folder, with_us=False)


def test_commands(folder):
    """Both commands as they stand, then transformers alone on what they have written."""
    lines = [line for text in blocks("") for line in text.splitlines() if line.startswith(COMMANDS)]
    assert [shlex.split(line, comments=True)[1] for line in lines] == ["quantize", "eval"]
    shown = ""
    for line in lines:
        typed = shlex.split(line, comments=True)[1:]
        shown += run([sys.executable, "-P", "-m", "ao_lab", *typed], folder)
    assert "layout: compressed-tensors" in shown
    assert "without dequantize=True" in " ".join(shown.split())
    python(
        "import ao_lab, torch\n"
        'model = ao_lab.load_pretrained("OUT_DIR")\n'
        "with torch.no_grad():\n"
        '    torch.save(model(torch.arange(20).reshape(2, 10)).logits, "out.pt")\n',
        folder,
    )
    read = 'from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained("OUT_DIR")\n'
    python(read + COMPARE, folder, with_us=False)
    config = json.loads((folder / "OUT_DIR" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] is True
