"""What is refused before torch is imported: in one process, that never imports it."""

import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from ao_lab.cli import early
from ao_lab.cli.app import main
from ao_lab.cli.terminal import INTERRUPTED, WrongInput
from ao_lab.eval import NAMED, TASKS
from ao_lab.measure import asked, compare, times

COMMANDS = {
    "there is no folder nowhere": ["compare", "nowhere"],
    "there is no folder nothere": ["eval", "nothere"],
    "there is no folder away": ["quantize", "away", "out", "--config", "mxfp4"],
    "model/config.json is a file; give the folder that it lies in, model": ["quantize", "model/config.json", "out"],
    "--text none.txt is no file": ["compare", "model", "--text", "none.txt"],
    "--calibration no.txt is no file": ["compare", "model", "--calibration", "no.txt"],
    "--limit 0: --limit is at least 1": ["compare", "model", "--limit", "0"],
    "--length 1: ": ["eval", "model", "--length", "1"],
    "--length 0: --length is at least 2 tokens": ["quantize", "model", "out", "--config", "mxfp4", "--length", "0"],
    "--new-tokens -1: ": ["compare", "model", "--new-tokens", "-1"],
    "give a model (--model DIR) or shapes": ["bench"],
    "unknown scheme 'mxfp4_e2m1'; the nearest are mxfp4, ": ["schemes", "mxfp4_e2m1"],
    "unknown configuration or scheme 'mxfp9'; the nearest is": ["compare", "model", "mxfp9"],
    "unknown configuration or scheme 'mxfp6x'; the nearest are": ["bench", "--shape", "1,2,3", "mxfp6x"],
    "--shape 16,4096: write M,N,K": ["bench", "--shape", "16,4096"],
    "unknown method 'gptqq'; the nearest": ["quantize", "model", "out", "--config", "mxfp4", "--method", "gptqq"],
    "--method awq needs calibration data": ["compare", "model", "--method", "awq"],
    "the nearest are mxfp4": ["quantize", "model", "out", "--config", "mxfp5"],
    "has no option group; the nearest is group_size": ["quantize", "model", "out", "--config", "Int4WeightOnlyConfig group=3"],
    "--length 4096: the model takes at most 128 tokens": ["compare", "model", "--length", "4096"],
    "the new tokens are 4112, and the model": ["bench", "--model", "model", "--new-tokens", "4096"],
    "model has no tokenizer.json": ["compare", "model", "mxfp4"],
    "unknown task 'perplexty'; the nearest is perplexity": ["eval", "model", "--tasks", "perplexty"],
    "agreement compares with the model's base": ["eval", "model", "--tasks", "agreement"],
    "--skip lm_hed: no layer or submodule has this name; the nearest is lm_head": [
        "quantize", "model", "out", "--config", "mxfp4", "--skip", "lm_hed",
    ],
    "--skip q-proj: no layer or submodule has this name; the nearest is q_proj": [
        "choose", "model", "--out", "p", "--config", "mxfp4", "--calibration", "t", "--skip", "q-proj",
    ],
    "--config SchemeConfig: unknown scheme 'nf5'": ["tune", "model", "--config", "SchemeConfig", "--option", "scheme=nf5"],
    "--config mxfp7 is no configuration": ["tune", "model", "--config", "mxfp7"],
    "unknown experiment 'ptqq'; the nearest is ptq": ["reproduce", "ptqq"],
    "unknown part 'int8_rowise' of ptq; the nearest is int8_rowwise": ["reproduce", "ptq", "--only", "int8_rowise"],
    "unknown part 'sped' of loka; the nearest is speed": ["reproduce", "loka", "--only", "sped", "--device", "cuda"],
    "--model nowhere is no folder and no name": ["reproduce", "ptq", "--model", "nowhere"],
    "in quotes: --config 'Int4WeightOnlyConfig group_size=32'": [
        "quantize", "model", "out", "--config", "Int4WeightOnlyConfig,group_size=32",
    ],
}  # fmt: skip
PROGRAM = """
import sys
from ao_lab.cli.app import main
for arguments in {commands!r}:
    assert main(arguments) == 2, arguments
    assert "torch" not in sys.modules, arguments
main(["pretrained"])
assert "torch" not in sys.modules
"""


def test_mistakes_are_answered_without_torch(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 128, "vocab_size": 300}')
    save_file(
        {"model.layers.0.self_attn.q_proj.weight": np.zeros(1)}, tmp_path / "model" / "model.safetensors"
    )
    program = PROGRAM.format(commands=list(COMMANDS.values()))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert [words for words in COMMANDS if words not in said] == []


def test_names_are_those_of_the_modules():
    assert set(early.NAMED_TEXTS) == set(NAMED)
    assert TASKS == asked.TASKS
    assert (early.COMPARISON, early.BENCHMARK) == (compare.FILE, times.FILE)


def test_names_that_transformers_may_have_pass(tmp_path):
    """Those of layers that are not in the files, unless they are almost one of these; and of models with experts."""
    save_file({"a.layers.0.gate_proj.weight": np.zeros(1)}, tmp_path / "model.safetensors")
    early.check_skip(
        tmp_path, ["lm_head", "gate_proj", "a.layrs", "re:.*gate_prj", "vision_tower", "gate_up_proj"]
    )
    with pytest.raises(WrongInput, match="nearest is gate_proj"):
        early.check_skip(tmp_path, ["gate_prj"])
    save_file({"a.experts.0.gate_proj.weight": np.zeros(1)}, tmp_path / "model.safetensors")
    early.check_skip(tmp_path, ["gate_prj"])


def test_ctrl_c_is_answered_wherever_it_comes(monkeypatch, capsys, tmp_path):
    """Before a command heeds it, too, as while libraries are imported."""

    def stopped(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(early, "check_model", stopped)
    assert main(["compare", str(tmp_path)]) == INTERRUPTED
    assert capsys.readouterr().err == "ao-lab: stopped\n"
    monkeypatch.undo()
    (tmp_path / "config.json").write_text("{}")
    assert main(["compare", str(tmp_path)]) == 2
    assert "no weights: no file named model.safetensors" in capsys.readouterr().err
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("ao_lab.cli.compare.run", stopped)
    assert main(["compare", str(tmp_path)]) == INTERRUPTED
    assert "stopped; nothing was kept (--out DIR does)" in capsys.readouterr().err
