"""A folder's safetensors files: one, or shards with the index that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Files:
    """All tensors of a folder by name, and the metadata of its first file."""

    tensors: Tensors
    metadata: Mapping[str, str]


def write_files(folder: Path, tensors: Tensors, metadata: dict[str, str], limit: int) -> list[Path]:
    """Write the tensors, in files of at most `limit` bytes (a larger tensor has its own); each carries the metadata."""
    from safetensors.torch import save_file

    shards = _shards(tensors, limit)
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX):
        old.unlink(missing_ok=True)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(_apart(shard), folder / name, metadata=metadata)
    if len(shards) > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(map(_size, tensors.values()))}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / name for name in names]


def read_files(folder: Path) -> Files:
    """The tensors of a folder; FileNotFoundError where there are none."""
    from safetensors import safe_open

    names = [SINGLE]
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    elif not (folder / SINGLE).is_file():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            metadata = metadata or dict(file.metadata() or {})
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  (no mapping)
    return Files(tensors, metadata)


def _apart(tensors: Tensors) -> Tensors:
    """The tensors on the host, none in another's memory, which safetensors refuses: pieces of a weight share its scale."""
    made: Tensors = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        made[name] = plain.clone() if plain.data_ptr() in places else plain
        places.add(plain.data_ptr())
    return made


def _shards(tensors: Tensors, limit: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _size(tensor) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _size(tensor)
    return shards


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


__all__ = ["Files", "read_files", "write_files"]
