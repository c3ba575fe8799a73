"""What programs are exported from: finished float32 models with quantized weights, language models without their cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.save_checks import check_program, check_quantized


def check_exported(model: nn.Module, dense: str) -> None:
    """ValueError, with the name, for layers in training and for a parameter of another floating-point dtype; and for a model
    without quantized weights. dense: what writes one that is not quantized."""
    check_program(model)
    check_float32(model)
    check_quantized(model, dense)


def check_float32(model: nn.Module) -> None:
    """ValueError, with the name, for a parameter of another floating-point dtype."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; export a float32 model: model.float()")


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """The configurations of transformers' models without `use_cache`, since a cache is no output of a program; afterwards as
    they were."""
    configs: dict[int, Any] = {
        id(one.config): one.config for one in model.modules() if hasattr(one, "config")
    }
    using = [one for one in configs.values() if getattr(one, "use_cache", None) is True]
    try:
        for one in using:
            one.use_cache = False
        yield
    finally:
        for one in using:
            one.use_cache = True
