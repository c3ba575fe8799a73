"""Our quantizer in transformers: weights are quantized while they are read, and folders in our layout are put together again.

`HfQuantizer` is transformers' seam for both. It is asked about each parameter while a model is read, and stays with the
model (`model.hf_quantizer`, `model.is_quantized`). This module imports transformers, and is imported when transformers is
(`ao_lab.install.transformers_hook`): the classes stand at its top, so that models that carry them can be copied and pickled.

A folder in our layout is checked before a tensor is read, and put together weight by weight. transformers renames and casts
what it reads and puts it where it belongs; `Stored` says which tensors are one weight, and makes it of them. Names in the
folder are those of the model that was saved; of a model with more or less around the same trunk (a headless one, another
head) they differ by the trunk's name, which transformers adds or takes off, and so does this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ao_lab.checkpoint.api import check_configuration
from ao_lab.checkpoint.configuration import METHOD, saved_dtype
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.model_builder import NAMED_WEIGHTS
from ao_lab.checkpoint.records import KEY, Weight, check_quantized_tensor, read_records, taken_scales
from ao_lab.checkpoint.transformers import methods
from ao_lab.checkpoint.transformers.config import HfConfig
from ao_lab.checkpoint.transformers.methods import (
    ShardedReading,
    dense,
    full_weight,
    holds_quantized,
    is_sharded,
    placed_as,
)
from ao_lab.config.base import Config, FqnToConfig, Observer
from ao_lab.kv_cache.static_scales import CacheScales, remember_scales
from ao_lab.quantization.api import (
    StreamedWeights,
    keep_report,
    preshuffle,
    required_observers,
)
from ao_lab.quantization.groups import warn_of_undivided
from ao_lab.quantization.plan import ALREADY, planned
from ao_lab.quantization.report import keep_configuration
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import is_linear, linear_and_experts, shorten
from ao_lab.transforms.low_rank import (
    FACTORS,
    drop_residual,
    give_residuals,
    residual_layers,
    residual_paths,
)
from ao_lab.transforms.plan import Device, Filter, Progress


def _check_places(model: Any, files: Iterable[str]) -> None:
    """ValueError for files of weights outside of the folder that a model is read from, which an index may name.

    Paths are compared as they are written: what links lead to is another check's.
    """
    named = os.path.abspath(getattr(model.config, "_name_or_path", "") or ".")
    if not os.path.isdir(named):
        return  # a name of a hub, whose cache transformers fills itself
    outside = [file for file in map(os.path.abspath, files) if os.path.commonpath((named, file)) != named]
    if outside:
        raise ValueError(
            f"{named}: its weights are said to be in {shown(outside[0])}, outside of the folder; fetch the folder again"
        )


@dataclass
class Stored:
    """The quantized weights of a folder, by their names in the model, and names of one tensor."""

    folder: Path
    weights: Mapping[str, Weight]
    shared: Mapping[str, str]
    #: Of all that it stores, dense tensors too.
    names: Collection[str]
    #: What weights compute in; None: as they were saved.
    dtype: torch.dtype | None
    #: Static scales of keys and values by the names of attention modules, as the folder has these.
    scales: Mapping[str, CacheScales] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, files: list[str] | None, kv_cache_scheme: Any = None) -> Stored:
        """What a model's files hold; ValueError for a folder that is damaged, or made for another model."""
        if not files:
            raise ValueError(
                "a state_dict holds no records of quantized weights; give from_pretrained the folder"
            )
        _check_places(model, files)
        found = look_at(Path(files[0]).parent)
        if KEY not in found.metadata:
            raise ValueError(
                f"{found.path} holds no records of ao_lab, which config.json announces; fetch it again"
            )
        records = read_records(found)
        check_configuration(found.path, records)
        records, scales = taken_scales(found, records, kv_cache_scheme)
        _give_residuals(model, {name: found.specs[name] for name in records.dense})
        expected = model.state_dict(keep_vars=True)
        names = Names(expected, model.base_model_prefix)
        weights = {names.of(name): weight for name, weight in records.weights.items()}
        check_shapes({name: weight.shape for name, weight in weights.items()}, expected, found.path)
        shared = {names.of(name): names.of(other) for name, other in records.shared.items()}
        # The model is one of meta tensors in the dtype that was asked for.
        dtype: torch.dtype = model.dtype
        same = str(dtype).removeprefix("torch.") == saved_dtype(found.path)
        stored = {*weights, *(names.of(name) for name in records.dense)}
        return cls(found.path, weights, shared, stored, None if same else dtype, scales)

    def remember_scales(self, model: Any) -> None:
        """Keep scales of keys and values with a model, by its own names, with or without the base model's."""
        names = Names(dict(model.named_modules()), model.base_model_prefix)
        found = {names.of(name): one for name, one in self.scales.items()}
        remember_scales(model, {name: one for name, one in found.items() if name in names.expected})

    def ties(self, given: Mapping[str, str]) -> dict[str, str]:
        """Which names have the weight of another: those that the folder stores once, and of the model's those that it lacks."""
        own = {
            name: other for name, other in given.items() if name not in self.names or other not in self.names
        }
        return {**own, **self.shared}

    @property
    def parts(self) -> dict[str, list[str]]:
        """The last words of the weights' names, and what the names of their parts add."""
        result: dict[str, dict[str, None]] = {}
        for name, weight in self.weights.items():
            result.setdefault(name.rpartition(".")[2], {}).update(dict.fromkeys(weight.specs))
        return {leaf: list(parts) for leaf, parts in result.items()}

    def build(self, name: str, parts: Mapping[str, torch.Tensor]) -> nn.Parameter | None:
        """A weight of its tensors. None where these are wrong: transformers goes on after an error, `finish` does not."""
        weight = self.weights[name]
        try:
            result = weight.build(dict(parts))
            check_quantized_tensor(result)
        except (ValueError, TypeError) as error:
            told = ValueError(
                f"weight {shown(name)} of {self.folder}: {error}; fetch or write the folder again"
            )
            told.__cause__ = error
            self.errors.append(told)
            return None
        return nn.Parameter(result if self.dtype is None else result.to(self.dtype), requires_grad=False)

    def finish(self) -> None:
        """Raise the first error that there was."""
        if self.errors:
            raise self.errors[0]


class Names:
    """What transformers makes of a name: the model's own, or that without or with the name of its trunk."""

    def __init__(self, expected: Mapping[str, Any], prefix: str) -> None:
        self.expected, self.prefix = expected, prefix

    def of(self, name: str) -> str:
        """The name in the model; the folder's where the model has none."""
        without = re.sub(f"^{re.escape(self.prefix)}\\.", "", name)
        tried = [name] if not self.prefix else [name, without, f"{self.prefix}.{name}"]
        return next((one for one in tried if one in self.expected), name)


def _give_residuals(model: Any, specs: Mapping[str, Any]) -> None:
    """Give the layers of a model the residuals that its folder holds, under the model's names."""
    names = Names(model.state_dict(keep_vars=True), model.base_model_prefix)
    places = {path: names.of(f"{path}.weight").removesuffix("weight") for path in residual_paths(specs)}
    give_residuals(
        model, {f"{own}{one}": specs[f"{path}.{one}"] for path, own in places.items() for one in FACTORS}
    )


def _refuse_sharded_residuals(model: Any) -> None:
    """ValueError for layers whose weight is sharded over several ranks, and whose residual is not."""
    if found := [name for name, layer in residual_layers(model).items() if is_sharded(layer.weight)]:
        raise ValueError(
            f"{shorten(found)}: low-rank residuals are not sharded by tensor parallelism; load the folder without tp_plan, or "
            f"quantize without LowRank"
        )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, Any], folder: Path) -> None:
    """ValueError where a quantized weight has another shape than the model's."""
    for name, shape in shapes.items():
        wanted = expected.get(name)
        if wanted is not None and tuple(wanted.shape) != shape:
            raise ValueError(
                f"{shown(name)} of {folder} has shape {shape}, the model's {tuple(wanted.shape)}; give the configuration of "
                "the model that was saved"
            )


#: What quantizing a weight may raise: it does not fit into memory, or its recipe rejects its values.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)


class Job:
    """A plan for a model without weights, and its weights as they arrive."""

    def __init__(
        self,
        config: Config | FqnToConfig,
        filter_fn: Filter | None,
        device: Device = None,
        observers: Mapping[str, Observer] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.filter_fn, self.device = config, filter_fn, device
        self.observers, self.progress = observers, progress
        self.loading: StreamedWeights | None = None
        self.error: Exception | None = None
        self.tied: set[str] = set()

    def __deepcopy__(self, memo: Any) -> Job:
        """Itself: transformers copies what it is given, and there is one model."""
        return self

    def start(self, model: Any) -> None:
        """Plan, on the model without weights."""
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.tied = {*ties, *ties.values()}
        plan = planned(
            model, self.config, self.filter_fn, self.device, streamed=True, tied=tied_to_tables(model, ties)
        )
        self.loading = StreamedWeights(
            plan, required_observers(plan, self.observers), self.device, self.progress
        )

    def changes(self, name: str) -> bool:
        """Whether a parameter is to be quantized when it arrives.

        Which weights are one tensor depends on what the folder has: those that may be wait until all is read.
        """
        return self.loading is not None and name in self.loading.changes and name not in self.tied

    def bits(self, name: str) -> float:
        """About how many bits an element of a changed parameter takes: those of its codes and of its scales."""
        if self.loading is None:
            raise RuntimeError("nothing is planned before the model is known")
        scheme = self.loading.changes[name].recipe.weight
        block = scheme.scale.block
        return scheme.format.bits + (32 / block if isinstance(block, int) and block > 0 else 0)

    def arrived(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their full names in the model, those of the plan quantized.

        After an error nothing more is made: transformers keeps exceptions as text and goes on. `finish` raises the first.
        """
        if self.error is not None:
            return {}
        try:
            return {
                result: x for name, value in tensors.items() for result, x in self._made(name, value).items()
            }
        except EXPECTED as error:
            self.error = error
            return {}
        except Exception as error:
            self.error = error
            raise

    def _made(self, name: str, value: Any) -> dict[str, Any]:
        """What a tensor completes: itself, or with layers that it shares a scale with all of them, when the last has come."""
        dense = value[0] if isinstance(value, list) else value
        return self.loading.arrived(name, dense) if self.loading and self.changes(name) else {name: dense}

    def finish(self, model: nn.Module) -> None:
        """Raise what was raised; then weights that had to wait, or had no tensor of their own."""
        if self.error is not None:
            raise self.error
        if self.loading is None:
            raise RuntimeError("transformers has loaded the model without asking for its quantization")
        plan = self.loading.plan
        # Whether a head is tied, and stays dense therefore, is known when all is read: the folder may hold both.
        if self.tied or any(not holds_quantized(change.parameter) for change in plan.changes.values()):
            last = planned(model, self.config, self.filter_fn, self.device, again=True)
            self.loading.go_on(last)
            self.loading.observers = required_observers(last, self.observers)
            for change in last.changes.values():
                name, dense = next(iter(change.places)), change.parameter
                if not holds_quantized(dense):
                    change.put(placed_as(name, self.loading.parameter(name, full_weight(dense)), dense))
            plan.reasons.update({name: why for name, why in last.reasons.items() if why != ALREADY})
        if self.device is not None:
            model.to(self.device)
        preshuffle(model)
        keep_report(model, plan)
        keep_configuration(model, self.config)
        warn_of_undivided(plan, self.config)


def tied_to_tables(model: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """Modules that are to have the weight of an embedding, and of which, by names of parameters that are to be one."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    pairs = [(a.removesuffix(".weight"), b.removesuffix(".weight")) for a, b in ties.items()]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1]) if b in tables and a not in tables}


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
            self.stored = Stored.of(model, checkpoint_files, self.given.kv_cache_scheme)
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
            _refuse_sharded_residuals(model)
            if stored.scales:
                stored.remember_scales(model)
            preshuffle(model)
        if job is not None and job is not self.given.job:
            job.finish(model)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """The model with dense weights in place of quantized ones, each the values that it stood for."""
        known: dict[int, nn.Parameter] = {}
        for layer in residual_layers(model).values():
            merged = layer.merged().to(dtype or layer.weight.dtype)
            drop_residual(layer)
            layer.weight = nn.Parameter(merged, requires_grad=False)
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None and holds_quantized(value):
                    if id(value) not in known:
                        known[id(value)] = nn.Parameter(dense(value, dtype), requires_grad=False)
                    module._parameters[name] = known[id(value)]
        return model

    def is_serializable(self) -> bool:
        """`save_pretrained` is ours, see `ao_lab.checkpoint.transformers.methods`."""
        return True


def register() -> None:
    """Put the quantizer into transformers' tables, and saving in its place; a second call does nothing."""
    tables: Any = auto
    tables.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, Quantizer)
    # Not by `register_quantization_config`, which asks for a base class of transformers; the table asks for from_dict alone.
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, HfConfig)
    methods.put_in()
