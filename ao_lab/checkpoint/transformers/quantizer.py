"""Our quantizer in transformers: weights are quantized while they are read, and folders in our layout are put together again.

`HfQuantizer` is transformers' seam for both. It is asked about each parameter while a model is read, and stays with the model
(`model.hf_quantizer`, `model.is_quantized`). This module imports transformers, and is imported when transformers is
(`ao_lab.install.transformers_hook`): the classes stand at its top, so that models that carry them can be copied and pickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

import ao_lab.quantization.prepared_products  # noqa: F401  F.linear of eager inference
from ao_lab.checkpoint.model_builder import NAMED_WEIGHTS
from ao_lab.checkpoint.native_layout import METHOD
from ao_lab.checkpoint.transformers import model_methods, saving
from ao_lab.checkpoint.transformers.config import HfConfig
from ao_lab.checkpoint.transformers.job import Job
from ao_lab.checkpoint.transformers.sharded import ShardedReading, dense, holds_quantized
from ao_lab.checkpoint.transformers.stored import Stored
from ao_lab.config.fqn import FqnToConfig
from ao_lab.quantization.modules import is_linear, linear_and_experts
from ao_lab.quantization.preshuffle import preshuffle
from ao_lab.quantization.selection import Filter
from ao_lab.tensor.quantized_tensor import QuantizedTensor


class Operation(ConversionOps):
    """What transformers does with tensors that it has read, by a function. It is never copied, as others are."""

    def __init__(self, quantizer: Any, does: Callable[..., dict[str, Any]]) -> None:
        # With this attribute transformers leaves dtypes as they are in the files.
        self.hf_quantizer, self.does = quantizer, does

    def __deepcopy__(self, memo: Any) -> Operation:
        return self

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameters of these tensors."""
        return self.does(input_dict, kwargs.get("full_layer_name"))


class Quantizer(HfQuantizer):
    """Asked about each parameter, in `from_pretrained`."""

    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.job: Job | None = None
        self.stored: Stored | None = None
        self.sharded: ShardedReading | None = None

    @property
    def given(self) -> HfConfig:
        """What `from_pretrained` was given, or config.json says."""
        found: Any = self.quantization_config
        asked: HfConfig = found
        return asked

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """ValueError where nothing says how to quantize, and for weights that are to stay on disk."""
        given = self.given
        if not self.pre_quantized and given.config is None and given.job is None:
            raise ValueError(
                "HfConfig() names no configuration, and the folder is not quantized: HfConfig('int8_rowwise')"
            )
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            places = [name or "the whole model" for name, place in device_map.items() if place == "disk"]
            raise ValueError(
                f"device_map puts {', '.join(places[:3])}{', ...' * (len(places) > 3)} on disk, and quantized weights of "
                "ao_lab cannot stay there; give a device_map without 'disk', or max_memory with more for 'cpu'"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the file of weights in the configuration, which transformers is about to look for."""
        if self.pre_quantized:
            vars(config).pop(NAMED_WEIGHTS, None)
            if self.given.weights is not None:
                setattr(config, NAMED_WEIGHTS, self.given.weights)
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        vars(model.config).pop(NAMED_WEIGHTS, None)
        if self.pre_quantized:
            self.stored = Stored.of(model, checkpoint_files)
            model.all_tied_weights_keys = self.stored.ties(model.all_tied_weights_keys)
            self.sharded = ShardedReading(model, self.stored.weights.__contains__)
            return
        asked: Any = self.given.config
        self.job = self.given.job or Job(asked, self._filter(model))
        self.job.start(model)
        self.sharded = ShardedReading(model, self.job.changes)

    def _filter(self, model: Any) -> Filter | None:
        """Which modules are quantized; None where the configuration names them."""
        given = self.given
        if isinstance(given.config, FqnToConfig):
            return None
        names = given.modules_to_not_convert
        accepts = linear_and_experts if given.experts else (lambda module, path: is_linear(module))

        def chosen(module: nn.Module, path: str) -> bool:
            return accepts(module, path) and should_convert_module(path, names or [])

        chosen.leaves_routers = True  # type: ignore[attr-defined]
        chosen.leaves_tied = names is None  # type: ignore[attr-defined]
        return chosen

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """As the plan says."""
        return self.job is not None and self.job.changes(param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes an element, so that devices are filled by what weights will take."""
        if self.stored is not None and (weight := self.stored.weights.get(param_name)) is not None:
            return sum(spec.bytes for spec in weight.specs.values()) / max(param.numel(), 1)
        if self.param_needs_quantization(model, param_name) and self.job is not None:
            return self.job.bits(param_name) / 8
        size = (
            param.nbytes / max(param.numel(), 1)
            if isinstance(param, QuantizedTensor)
            else param.element_size()
        )
        return float(size)

    def get_quantize_ops(self) -> Any:
        """What quantizes them."""
        return Operation(self, self._quantized)

    def _quantized(self, tensors: dict[str, Any], name: str) -> dict[str, Any]:
        """The weights that these tensors complete."""
        if self.job is None or self.sharded is None:
            return tensors
        return self.sharded.shards(self.job.arrived(tensors))

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Of our layout nothing is renamed: names are those of the model. What is done is putting weights together."""
        if self.stored is None:
            return weight_conversions
        return [
            WeightConverter(
                [rf"(?<![^.]){re.escape(leaf)}\.{part}$" for part in parts],
                leaf,
                [Operation(self, self._together)],
            )
            for leaf, parts in self.stored.parts.items()
        ]

    def _together(self, tensors: dict[str, Any], name: str) -> dict[str, Any]:
        """A weight of the tensors of its parts, which transformers keeps by the patterns of `update_weight_conversions`."""
        parts = {
            pattern.rpartition(".")[2].removesuffix("$"): value[0] if isinstance(value, list) else value
            for pattern, value in tensors.items()
        }
        result = None if self.stored is None else self.stored.build(name, parts)
        return {} if result is None or self.sharded is None else self.sharded.shards({name: result})

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        job, stored, sharded = self.job, self.stored, self.sharded
        self.job = self.stored = self.sharded = None
        if sharded is not None:
            sharded.close()
        if stored is not None:
            # Saving undoes what reading did; here it undoes nothing.
            model._weight_conversions = None
            stored.finish()
            preshuffle(model)
        if job is not None and job is not self.given.job:
            job.finish(model)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """The model with dense weights in place of quantized ones, each the values that it stood for."""
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None and holds_quantized(value):
                    if id(value) not in known:
                        known[id(value)] = nn.Parameter(dense(value, dtype), requires_grad=False)
                    module._parameters[name] = known[id(value)]
        return model

    def is_serializable(self) -> bool:
        """`save_pretrained` is ours, see `ao_lab.checkpoint.transformers.saving`."""
        return True


def register() -> None:
    """Put the quantizer into transformers' tables, and saving in its place; a second call does nothing."""
    tables: Any = auto
    tables.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, Quantizer)
    # Not by `register_quantization_config`, which asks for a base class of transformers; the table asks for from_dict alone.
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, HfConfig)
    saving.put_in()
    model_methods.put_in()


__all__ = ["Quantizer", "register"]
