"""Folders that other libraries have quantized: a reader for each format, and what all readers' records must satisfy.

The name of a format is `quantization_config.quant_method` of config.json; ModelOpt's folders of earlier versions have
hf_quant_config.json instead, torchao's the metadata of their files. A reader is a module of this folder, which registers itself
under that name. It is given the folder (headers only: no tensor has been read) and the object `quantization_config`, and
returns `Records`: for every quantized weight its scheme, its shape, the tensors it is made of, and the function that makes a
`QuantizedTensor` of them. What it found is compared with the files here, before a tensor is read.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.checkpoint.model_builder import CONFIG, QUANTIZATION, configuration, read_config
from ao_lab.checkpoint.records import (
    KEY,
    WEIGHT_DTYPES,
    Computed,
    Records,
    Weight,
    check_recipe,
    check_specs,
    dense_names,
    read_records,
)
from ao_lab.quantization.report import Known, Report, described_layer
from ao_lab.tensor.metadata import stored_shape
from ao_lab.transforms.layers import quantizable_parameters
from ao_lab.transforms.report import ATTRIBUTE, LOADED

#: Of a folder and its `quantization_config`; ValueError that names the folder and the rule for what no scheme represents.
Reader = Callable[[Folder, Mapping[str, Any]], Records]
_READERS: dict[str, Reader] = {}


def reader(*methods: str) -> Callable[[Reader], Reader]:
    """Registers a reader under the values of `quant_method` that it is for."""

    def registered(function: Reader) -> Reader:
        for method in methods:
            if _READERS.setdefault(method, function) is not function:
                raise ValueError(f"quant_method {method!r} has a loader already: {_READERS[method]}")
        return function

    return registered


@cache
def readers() -> Mapping[str, Reader]:
    """Every registered reader by `quant_method`; imports the modules of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _READERS


MODELOPT_FILE = "hf_quant_config.json"
#: What folders are read by that name no method: torchao's metadata are enough to tell them.
TORCHAO_KEY, TORCHAO = "tensor_names", "torchao"


def quantization_of(path: Path) -> dict[str, Any] | None:
    """The description of a folder's quantization, with its quant_method; None for a folder that has none."""
    fields = read_config(path) if (path / CONFIG).is_file() else {}
    found = fields.get(QUANTIZATION)
    if found is None and (path / MODELOPT_FILE).is_file():
        return {**read_object(path / MODELOPT_FILE, nonfinite=True), "quant_method": "modelopt"}
    if found is None:
        return None
    where = f"{QUANTIZATION} of {path / CONFIG}"
    if not isinstance(found, dict):
        raise ValueError(f"{where} is an object, got {shown(found)}; fetch it again")
    return found


def third_party_records(folder: Folder) -> Records:
    """The checked records of a folder of another library; ValueError where no reader takes it, or the files differ."""
    given = quantization_of(folder.path) or {}
    told = TORCHAO if TORCHAO_KEY in folder.metadata else None
    method = given.get("quant_method", told)
    known = readers()
    if told is not None and method != told:
        raise ValueError(
            f"{folder.path}: quant_method is {shown(method)}, the files hold {told}; fetch the folder again"
        )
    if method is None:
        raise ValueError(
            f"{folder.path} holds no records of ao_lab and no quantization that config.json names; quantize_pretrained "
            "quantizes it, transformers' from_pretrained reads it as it is"
        )
    if not isinstance(method, str) or method not in known:
        raise ValueError(
            f"{folder.path}: quant_method {shown(method)} is not supported, these are: {', '.join(sorted(known))}; quantize "
            "the original model with ao_lab"
        )
    records = known[method](folder, given)
    for name, weight in records.weights.items():
        check_specs(weight, folder)
        try:
            check_recipe(weight.meta, stored_shape(weight.meta, weight.shape))
        except ValueError as error:
            raise ValueError(f"{shown(name)} in {folder.path}: {error}") from error
    return completed(records, folder)


def records_of(folder: Folder) -> Records:
    """What a folder says of its tensors: its own records, or what the reader of its format finds; ValueError for neither."""
    return read_records(folder) if KEY in folder.metadata else third_party_records(folder)


def tell(model: nn.Module, records: Records, folder: Folder) -> None:
    """Keep with a filled model where its weights are from, for `explain`; a warning for tensors that were left out."""
    reasons = {layer.name: layer.reason for layer in getattr(model, ATTRIBUTE, Report()).layers}
    for name, weight in records.weights.items():
        source = f"{weight.method} ({weight.format})" if weight.format else weight.method
        reasons[name] = f"{LOADED}{source} stored it"
    known = Known()
    found = [described_layer(slot, reasons, known) for slot in quantizable_parameters(model)]
    object.__setattr__(model, ATTRIBUTE, Report(tuple(found)))
    for reason in dict.fromkeys(records.left_out.values()):
        names = [name for name, why in records.left_out.items() if why == reason]
        warnings.warn(
            f"{len(names)} tensors of {folder.path} were left out ({shown(names[0])}, for instance): {reason}",
            UserWarning,
            stacklevel=3,
        )


def completed(records: Records, folder: Folder) -> Records:
    """The records with every tensor that they do not name as a dense one; ValueError where two claim one tensor."""
    result: dict[str, Weight | Computed] = {**records.weights, **records.computed}
    for full in (full for one in result.values() for full in one.names.values()):
        if full not in folder.specs:
            raise ValueError(f"{folder.path} lacks tensor {shown(full)}; fetch the folder again")
    dense = dense_names(result, folder, records.left_out)
    if twice := [name for name in dense if name in result]:
        raise ValueError(
            f"{folder.path}: {shown(twice[0])} is a quantized weight and a tensor too; fetch the folder again"
        )
    return replace(records, dense=dense)


def model_dtype(folder: Folder) -> torch.dtype:
    """What the model of a folder computes in: config.json's dtype, else that of its floating-point tensors of 16 or 32 bits.

    ValueError for a dtype that weights do not have.
    """
    fields = configuration(folder.path)
    inner = fields.get("text_config")
    parts = [part for part in (fields, inner) if isinstance(part, Mapping)]
    named = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    name = next((value for value in named if value is not None), None)
    if name is None:
        short = (
            spec.dtype for spec in folder.specs.values() if spec.dtype in (torch.bfloat16, torch.float16)
        )
        return next(short, torch.float32)
    if name not in WEIGHT_DTYPES:
        raise ValueError(
            f"{folder.path / CONFIG}: dtype is one of {', '.join(WEIGHT_DTYPES)}, got {shown(name)}; fetch it again"
        )
    return WEIGHT_DTYPES[name]
