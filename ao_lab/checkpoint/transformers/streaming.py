"""Reading a folder of transformers tensor by tensor, by transformers: its loader asks a quantizer about each parameter.

The quantizer is that of `ao_lab.HfConfig` (`ao_lab.checkpoint.transformers.quantizer`), with more to carry: any filter, a
device, observers, progress. Here it leaves nothing behind: the model is one that was loaded and then given to `quantize_`.
With a quantizer transformers reads in one thread and keeps no tensor that it has handed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.experts.conversion import left_out_layers
from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.io.strict_json import read_object
from ao_lab.checkpoint.model_builder import CONFIG, checked_numbers, forget_code, model_class
from ao_lab.checkpoint.transformers.config import HfConfig
from ao_lab.checkpoint.transformers.job import Job
from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.config.observer import Observer
from ao_lab.install.extras import needed
from ao_lab.quantization.api import Progress
from ao_lab.quantization.plan import Device
from ao_lab.quantization.selection import Filter


def read_by_transformers(
    folder: Path,
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    device: Device,
    dtype: torch.dtype | None,
    observers: Mapping[str, Observer] | None,
    progress: Progress | None,
) -> nn.Module:
    """The quantized model of a folder; see `ao_lab.checkpoint.streaming.api`."""
    transformers = needed("transformers")
    fields = described(folder)
    job = Job(config, filter_fn, device, observers, progress)
    load: Any = (model_class(fields) or transformers.AutoModelForCausalLM).from_pretrained
    carrier = HfConfig()
    carrier.job = job
    # Left open, transformers asks at the terminal whether to run a folder's code.
    given: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": False,
        "quantization_config": carrier,
    }
    given["dtype"] = dtype or "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            with checked_numbers(folder):
                model, told = load(folder, output_loading_info=True, **given)
        finally:
            if job.error is not None:
                raise job.error
    # Transformers would go on with random values.
    if told["missing_keys"]:
        raise ValueError(f"the folder has no weights for {sorted(told['missing_keys'])[:5]}")
    forget(model)
    if has_weights(folder) and (left := left_out_layers(look_at(folder), model)):
        warnings.warn(
            f"{folder} has weights of {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}, which its {CONFIG} leaves out: "
            "the model has fewer layers; correct their number there",
            UserWarning,
            stacklevel=3,
        )
    forget_code(model)
    job.finish(model)
    return model  # type: ignore[no-any-return]


def forget(model: Any) -> None:
    """Take what transformers notes of a quantizer off the model: to it, the model is an ordinary one. How the weights were
    renamed stays, which transformers 5.24 takes off too: saving undoes it, as with a model that was read dense."""
    conversions = getattr(model, "_weight_conversions", None)
    model.hf_quantizer.remove_quantization_config(model)
    model._weight_conversions = conversions
    del model.is_quantized
    for module in model.modules():
        # Some modules have a plain dictionary called config.
        getattr(getattr(module, "config", module), "__dict__", {}).pop("_is_quantized", None)


def described(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ValueError where there is none, and for files that cannot be read."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}; give a folder that transformers' save_pretrained wrote, or build="
        )
    fields = read_object(folder / CONFIG, nonfinite=True)
    if has_weights(folder):
        look_at(folder)
    return fields


__all__ = ["read_by_transformers"]
