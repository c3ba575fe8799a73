"""torchao's safetensors: what `torchao.prototype.safetensors` and transformers with torchao write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ao_lab.checkpoint.formats import reader
from ao_lab.checkpoint.formats.torchao.files import TORCHAO_KEY, read_torchao_records
from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.records import Records


@reader("torchao")
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; `given` is not looked at: the metadata of the files say more."""
    if TORCHAO_KEY not in folder.metadata:
        raise ValueError(
            f"{folder.path} says that torchao wrote it, but its files have no {TORCHAO_KEY}: pickled tensors are not read; "
            "save the model with safetensors (torchao 0.15 or later)"
        )
    return read_torchao_records(folder)


__all__ = ["read"]
