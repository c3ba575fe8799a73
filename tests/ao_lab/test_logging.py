"""What library functions say goes to the logger "ao_lab", and nothing to stdout or stderr; unknown names bring near ones."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import Clip, Int8WeightOnlyConfig, quantize_


def test_steps_are_logged(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "ao_lab")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    ao_lab.convert_for_training_(model, "rowwise")
    ao_lab.convert_from_training_(model)
    quantize_(model, Int8WeightOnlyConfig(), calibration=[torch.randn(64, 32)], methods=(Clip(),), blocks="")
    ao_lab.save_pretrained(model, tmp_path, layout="ao_lab")
    ao_lab.load_pretrained(tmp_path, nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
    said = [record.getMessage() for record in caplog.records]
    for step in (
        "recipe rowwise: 1 modules converted, 1 left",
        "0.weight, 1 of 2: clip",
        "2 of 2 weights are quantized",
        "saved ",
        "loaded ",
    ):
        assert any(step in line for line in said), (step, said)
    assert all(record.name.startswith("ao_lab.") for record in caplog.records)
    assert capsys.readouterr() == ("", "")


def test_tracebacks_suggest_names():
    with pytest.raises(AttributeError, match="no attribute 'Int4WeightOnlyConfg'") as error:
        _ = ao_lab.Int4WeightOnlyConfg
    assert (error.value.name, error.value.obj) == ("Int4WeightOnlyConfg", ao_lab)
    code = "import ao_lab; ao_lab.Int4WeightOnlyConfg"
    root = Path(ao_lab.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "Did you mean: 'Int4WeightOnlyConfig'?" in done.stderr


def test_wrong_arguments_name_the_nearest():
    """By the class that was called, not by one that it shares its arguments with."""
    with pytest.raises(
        TypeError, match=r"Int4WeightOnlyConfig has no argument 'groupsize'; the nearest is group_size"
    ):
        ao_lab.Int4WeightOnlyConfig(groupsize=32)
    with pytest.raises(TypeError, match=r"^AdamW8bit has no argument 'state'; the nearest is states"):
        ao_lab.optim.AdamW8bit([torch.nn.Parameter(torch.ones(2))], state="8bit")
