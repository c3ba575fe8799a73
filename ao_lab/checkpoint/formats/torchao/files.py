"""Folders that torchao wrote with safetensors, or transformers with it.

`torchao.prototype.safetensors` (0.18) stores each inner tensor as MODULE._PARAMETER_PART, and in the metadata for each
parameter a class's name and its attributes as JSON. Nothing of torchao is imported: names of classes choose among
`ao_lab.checkpoint.formats.torchao.tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ao_lab.checkpoint.formats.torchao.tensors import READERS, WAY_OUT, Given, Read
from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.io.strict_json import parsed, parsed_object, shown
from ao_lab.checkpoint.io.weight_specs import Specs
from ao_lab.checkpoint.records import Records, Tensors, Weight, check_recipe, dense_names
from ao_lab.tensor.metadata import DTYPES, Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized

TORCHAO_KEY = "tensor_names"
DENSE = "Tensor"


def read_torchao_records(folder: Folder) -> Records:
    """The checked description of a folder that torchao (or transformers with it) wrote."""
    where = f"{TORCHAO_KEY} in the metadata of {folder.path}"
    names = parsed(folder.metadata[TORCHAO_KEY], where)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} is a list of names, got {shown(names)}; fetch the folder again")
    weights = {}
    for name in names:
        entry = parsed_object(
            folder.metadata.get(name, ""), f"the description of {shown(name)} in {folder.path}"
        )
        if entry.get("_type") != DENSE:
            weights[name] = weight_of(name, entry, folder)
    dense = dense_names(weights, folder)
    # Names without a tensor are left to the model: weights that it ties are stored once.
    odd = [name for name in dense if name not in names]
    if odd:
        raise ValueError(
            f"{where} does not name {shown(odd[0])}, which is in the files; fetch the folder again"
        )
    return Records(weights, dense, {})


def weight_of(name: str, entry: Mapping[str, Any], folder: Folder) -> Weight:
    """One parameter; every error names the folder and the parameter."""
    where = f"{shown(name)} in {folder.path}"
    path, _, leaf = name.rpartition(".")
    prefix = f"{path}._{leaf}_"
    parts, data = entry.get("_tensor_data_names"), entry.get("_data")
    if (
        not isinstance(parts, list)
        or not all(isinstance(part, str) for part in parts)
        or not isinstance(data, dict)
    ):
        raise ValueError(
            f"{where} is described by _type, _data and _tensor_data_names; fetch the folder again"
        )
    names = {part: prefix + part for part in parts}
    lost = [full for full in names.values() if full not in folder.specs]
    if lost or "qdata" not in names:
        raise ValueError(
            f"{folder.path} lacks tensor {shown((lost or [prefix + 'qdata'])[0])}; fetch the folder again"
        )
    kind = entry.get("_type")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    try:
        if reader is None:
            raise ValueError(f"{shown(kind)} cannot be read, these can: {', '.join(READERS)}; {WAY_OUT}")
        read = reader(Given(data, {part: folder.specs[full] for part, full in names.items()}))
        dtype = _float_dtype(read.dtype)
        _check_parts(read.specs, folder, names)
        meta = Meta(read.recipe, -1, dtype)
        check_recipe(meta, read.shape)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}; if it is damaged, fetch it again") from error
    return Weight(meta, read.shape, names, read.specs, partial(_whole, read, dtype), "torchao", str(kind))


def _whole(read: Read, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
    q = read.build(tensors)
    return from_quantized(q, replace(read.recipe, weight=q.scheme), dtype, read.input_scales(tensors))


def _float_dtype(name: str) -> torch.dtype:
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in known:
        raise ValueError(f"the weight's dtype is one of {', '.join(known)}, got {shown(name)}")
    return known[name]


def _check_parts(specs: Specs, folder: Folder, names: Mapping[str, str]) -> None:
    """The tensors are those that the description asks for."""
    if set(specs) != set(names):
        raise ValueError(f"its tensors are {', '.join(specs)}, got {shown(list(names))}; {WAY_OUT}")
    for part, spec in specs.items():
        got = folder.specs[names[part]]
        if got != spec:
            raise ValueError(f"tensor {shown(names[part])} is {spec}, got {got}")


__all__ = ["TORCHAO_KEY", "read_torchao_records"]
