"""A user's own code with public names, which `make lint` checks strictly: what they return, and what they take."""

from typing import assert_type

import numpy as np
import torch
from torch import nn

import ao_lab
from ao_lab import Int4WeightOnlyConfig, QATConfig, quantize_


def shrink(model: nn.Module, folder: str) -> int:
    """Quantize and save, as the README does."""
    report = quantize_(model, Int4WeightOnlyConfig(group_size=32), lambda module, name: name != "lm_head")
    assert_type(report, ao_lab.Report)
    saved = ao_lab.save_pretrained(model, folder)
    assert_type(saved, ao_lab.Saved)
    names: list[str] = [layer.name for layer in report.changed]
    return saved.bytes + len(names)


def arrays() -> torch.Tensor:
    """Arrays, tensors, records and sizes."""
    q = ao_lab.quantize(np.ones((2, 32), np.float32), "mxfp4")
    assert_type(q, ao_lab.Quantized)
    weight = ao_lab.quantized(torch.ones(2, 32), ao_lab.SCHEMES["mxfp4"])
    size: int = ao_lab.model_size(nn.Linear(4, 4), Int4WeightOnlyConfig()).linear.bytes
    assert size >= 0
    return weight.dequantize()


def train(model: nn.Module) -> nn.Module:
    """QAT, and training in low precision."""
    quantize_(model, QATConfig(Int4WeightOnlyConfig(), step="prepare"))
    assert_type(ao_lab.convert_for_training_(model, "rowwise"), ao_lab.Converted)
    return model
