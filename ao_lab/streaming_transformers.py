"""Reading a folder of transformers tensor by tensor, by transformers: its loader asks a quantizer about each parameter.

`HfQuantizer` is transformers' seam for quantization while loading. Ours is known there under a name of its own; it carries the
plan, and leaves nothing behind: the model is one that was loaded and then given to `quantize_`. With it transformers reads in
one thread and keeps no tensor that it has handed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint_files import INDEX, SINGLE, look_at
from ao_lab.checkpoint_models import CONFIG, QUANTIZATION, model_class
from ao_lab.configs import Config
from ao_lab.fqn import FqnToConfig
from ao_lab.observers import Observer
from ao_lab.plan import ALREADY, Device, Filter, planned
from ao_lab.quantize_model import Progress, keep_report, required_observers
from ao_lab.streaming import Loading
from ao_lab.strict_json import read_object
from ao_lab.tensor import QuantizedTensor

METHOD = "ao_lab_while_loading"


class Job:
    """What is asked for, and what came of it."""

    def __init__(
        self,
        config: Config | FqnToConfig,
        filter_fn: Filter | None,
        device: Device,
        observers: Mapping[str, Observer] | None,
        progress: Progress | None,
    ) -> None:
        self.config, self.filter_fn, self.device = config, filter_fn, device
        self.observers, self.progress = observers, progress
        self.loading: Loading | None = None
        self.error: Exception | None = None
        self.tied: set[str] = set()

    def start(self, model: Any) -> None:
        """Plan, on the model without weights."""
        plan = planned(model, self.config, self.filter_fn, self.device, streamed=True)
        self.loading = Loading(plan, required_observers(plan, self.observers), self.device, self.progress)
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.tied = {*ties, *ties.values()}

    def changes(self, name: str) -> bool:
        """Whether a parameter is to be quantized when it arrives.

        Which weights are one tensor depends on what the folder has: those that may be wait until all is read.
        """
        return self.loading is not None and name in self.loading.changes and name not in self.tied

    def arrived(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their full names in the model, those of the plan quantized."""
        made: dict[str, Any] = {}
        for name, value in tensors.items():
            dense = value[0] if isinstance(value, list) else value
            changed = self.loading is not None and self.changes(name)
            made[name] = self.loading.parameter(name, dense) if changed and self.loading else dense
        return made

    def finish(self, model: nn.Module) -> None:
        """Weights that had to wait, or had no tensor of their own."""
        if self.loading is None:
            raise RuntimeError("transformers has loaded the model without asking for its quantization")
        plan = self.loading.plan
        if any(not isinstance(change.parameter, QuantizedTensor) for change in plan.changes.values()):
            last = planned(model, self.config, self.filter_fn, self.device)
            self.loading.go_on(last)
            for change in last.changes.values():
                change.put(self.loading.parameter(next(iter(change.places)), change.parameter))
            plan.reasons.update({name: why for name, why in last.reasons.items() if why != ALREADY})
        if self.device is not None:
            model.to(self.device)
        keep_report(model, plan)


def read_by_transformers(
    folder: Path,
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    device: Device,
    dtype: torch.dtype | None,
    observers: Mapping[str, Observer] | None,
    progress: Progress | None,
) -> nn.Module:
    """The quantized model of a folder; see `ao_lab.streaming`."""
    import transformers

    fields = described(folder)
    job = Job(config, filter_fn, device, observers, progress)
    load: Any = (model_class(fields) or transformers.AutoModelForCausalLM).from_pretrained
    given = {"dtype": dtype or "auto", "local_files_only": True, "quantization_config": hf_config()(job)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            model, told = load(folder, output_loading_info=True, **given)
        finally:
            if job.error is not None:
                raise job.error
    # Transformers would go on with random numbers.
    if told["missing_keys"]:
        raise ValueError(f"the folder has no weights for {sorted(told['missing_keys'])[:5]}")
    forget(model)
    job.finish(model)
    return model  # type: ignore[no-any-return]


def forget(model: Any) -> None:
    """Take what transformers notes of a quantizer off the model: to it, the model is an ordinary one."""
    model.hf_quantizer.remove_quantization_config(model)
    del model.is_quantized
    for module in model.modules():
        vars(getattr(module, "config", module)).pop("_is_quantized", None)


def described(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ValueError where there is none, of a quantized model, and for files that cannot be read."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}; give a folder that transformers' save_pretrained wrote, or build="
        )
    fields = read_object(folder / CONFIG, nonfinite=True)
    if QUANTIZATION in fields:
        raise ValueError(f"{folder} is quantized already; start from the model that it was made of")
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        look_at(folder)
    return fields


@lru_cache(maxsize=1)
def hf_config() -> Any:
    """The class of configurations by which transformers finds our quantizer."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Quantize(ConversionOps):
        """Quantizes what transformers has read."""

        def __init__(self, job: Job) -> None:
            self.job = job

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            """Transformers keeps exceptions as text; the first is kept whole."""
            try:
                return self.job.arrived(input_dict)
            except Exception as error:
                self.job.error = self.job.error or error
                raise

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):
        """Asked about each parameter."""

        is_trainable = False

        @property
        def job(self) -> Job:
            """What this one works at."""
            carrier: Any = self.quantization_config
            made: Job = carrier.job
            return made

        def is_serializable(self) -> bool:
            """`ao_lab.save_pretrained` saves it."""
            return False

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            self.job.start(model)

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            """As the plan says."""
            return bool(self.job.changes(param_name))

        def get_quantize_ops(self) -> Any:
            """What quantizes them."""
            return Quantize(self.job)

    @register_quantization_config(METHOD)
    class Configuration(QuantizationConfigMixin):
        """Carries a job through from_pretrained."""

        quant_method: Any = METHOD

        def __init__(self, job: Job) -> None:
            self.job = job

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def to_dict(self) -> dict[str, Any]:
            """What may be printed."""
            return {"quant_method": METHOD}

    return Configuration


__all__ = ["read_by_transformers"]
