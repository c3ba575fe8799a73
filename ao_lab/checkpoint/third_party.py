"""Folders that other libraries have quantized: which reader is theirs, and what every reader's records must satisfy.

The name of a format is `quantization_config.quant_method` of config.json; ModelOpt's folders of earlier versions have
hf_quant_config.json instead, torchao's the metadata of their files. Readers (`ao_lab.checkpoint.formats`) look at headers and
configurations alone; what they found is compared with the files here, before a tensor is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ao_lab.checkpoint.dense_tensors import completed
from ao_lab.checkpoint.formats import readers
from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.checkpoint.model_builder import CONFIG, QUANTIZATION
from ao_lab.checkpoint.records import KEY, Records, Weight, check_recipe, check_specs, read_records
from ao_lab.quantization.report import ATTRIBUTE, Report, described_layer
from ao_lab.tensor.metadata import stored_shape
from ao_lab.transforms.layers import quantizable_parameters

MODELOPT_FILE = "hf_quant_config.json"
#: What folders are read by that name no method: torchao's metadata are enough to tell them.
TORCHAO_KEY, TORCHAO = "tensor_names", "torchao"


def quantization_of(path: Path) -> dict[str, Any] | None:
    """The description of a folder's quantization, with its quant_method; None for a folder that has none."""
    fields = read_object(path / CONFIG, nonfinite=True) if (path / CONFIG).is_file() else {}
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
            f"{folder.path}: quant_method {shown(method)} has no reader, these have: {', '.join(sorted(known))}; quantize the "
            "original model with ao_lab"
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
    reasons |= {name: f"loaded, as {_source(weight)} stored it" for name, weight in records.weights.items()}
    found = [described_layer(*place, reasons) for place in quantizable_parameters(model)]
    object.__setattr__(model, ATTRIBUTE, Report(tuple(found)))
    for reason in dict.fromkeys(records.left_out.values()):
        names = [name for name, why in records.left_out.items() if why == reason]
        warnings.warn(
            f"{len(names)} tensors of {folder.path} were left out ({shown(names[0])}, for instance): {reason}",
            UserWarning,
            stacklevel=3,
        )


def _source(weight: Weight) -> str:
    return f"{weight.method} ({weight.format})" if weight.format else weight.method


__all__ = ["quantization_of", "records_of", "tell", "third_party_records"]
