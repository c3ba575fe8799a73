"""Writing safetensors files: what the disk refuses is an OSError, as for every other file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError


def save_file(
    tensors: dict[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, contiguous and apart from each other, to one file; OSError that names it where that fails."""
    try:
        safetensors.torch.save_file(tensors, path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


__all__ = ["save_file"]
