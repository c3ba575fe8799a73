"""`quantize_pretrained` of a folder that holds quantized weights: they stay as they are, what is dense is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from ao_lab.checkpoint.api import load_pretrained
from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.records import KEY
from ao_lab.checkpoint.third_party import TORCHAO_KEY, quantization_of
from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.config.observer import Observer
from ao_lab.quantization.api import Progress, quantize_
from ao_lab.quantization.plan import Device
from ao_lab.quantization.report import explain
from ao_lab.quantization.selection import Filter


def is_quantized(folder: Path) -> bool:
    """Whether a folder says that it holds quantized weights, in config.json or in its files' metadata."""
    if quantization_of(folder) is not None:
        return True
    return has_weights(folder) and not {KEY, TORCHAO_KEY}.isdisjoint(look_at(folder).metadata)


def quantized_further(
    folder: Path,
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    device: Device,
    build: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    observers: Mapping[str, Observer] | None,
    progress: Progress | None,
) -> nn.Module:
    """The model that `load_pretrained` makes of the folder, its dense weights quantized as `quantize_` does.

    ValueError that says what the folder holds where nothing is left to be quantized, or `config` cannot be applied to it.
    """
    model = load_pretrained(folder, None if build is None else build(), dtype=dtype)
    loaded = explain(model).changed
    try:
        quantize_(model, config, filter_fn, device, observers=observers, progress=progress)
    except ValueError as error:
        kinds = sorted({layer.scheme for layer in loaded})
        raise ValueError(
            f"{folder} is quantized already: {len(loaded)} weights in {', '.join(kinds[:4])} "
            f"({loaded[0].name if loaded else 'none'}, for instance), which stay as they are. Of the rest: {error}"
        ) from error
    return model


__all__ = ["is_quantized", "quantized_further"]
