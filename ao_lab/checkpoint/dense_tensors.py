"""What another library's folder holds beside its quantized weights: dense tensors, and the dtype of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.model_builder import CONFIG, configuration
from ao_lab.checkpoint.records import Computed, Records, Weight
from ao_lab.tensor.metadata import DTYPES


def completed(records: Records, folder: Folder) -> Records:
    """The records with every tensor that they do not name as a dense one; ValueError where two claim one tensor."""
    used: dict[str, str] = dict.fromkeys(records.left_out, "what is left out")
    result: dict[str, Weight | Computed] = {**records.weights, **records.computed}
    for name, one in result.items():
        for full in one.names.values():
            if full not in folder.specs:
                raise ValueError(f"{folder.path} lacks tensor {shown(full)}; fetch the folder again")
            if used.setdefault(full, name) != name:
                raise ValueError(
                    f"{folder.path}: {shown(name)} and {shown(used[full])} are both made of {shown(full)}; fetch it again"
                )
    dense = tuple(name for name in folder.specs if name not in used)
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
    named = [
        part.get(key)
        for part in (fields, inner)
        if isinstance(part, Mapping)
        for key in ("dtype", "torch_dtype")
    ]
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    name = next((value for value in named if value is not None), None)
    if name is None:
        kinds = [
            spec.dtype for spec in folder.specs.values() if spec.dtype in (torch.bfloat16, torch.float16)
        ]
        return kinds[0] if kinds else torch.float32
    if name not in known:
        raise ValueError(
            f"{folder.path / CONFIG}: dtype is one of {', '.join(known)}, got {shown(name)}; fetch it again"
        )
    return known[name]


__all__ = ["completed", "model_dtype"]
