"""State of an earlier training that lies in the folder from which a model of transformers came.

`save_pretrained` writes learned scales, masks and counts of steps with the weights; `from_pretrained` reads them into no dense
model. Preparing such a model starts them anew, and says so here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import nn

from ao_lab.transforms.layers import shorten

#: What the header of a safetensors file has before it: its length.
LENGTH = 8
LARGEST = 100 * 2**20


def warn_of_saved_state(model: nn.Module, leaves: Collection[str], anew: str) -> None:
    """A UserWarning where the model's folder has tensors whose names end so. anew: what starts them again."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(folder, str) or not folder or not Path(folder).is_dir():
        return
    found = {
        file: names
        for file in sorted(Path(folder).glob("model*.safetensors"))
        if (names := [name for name in names_in(file) if name.rpartition(".")[2] in leaves])
    }
    if not found:
        return
    names = [name for part in found.values() for name in part]
    files = " and ".join(str(file) for file in found)
    warnings.warn(
        f"{files} has {len(names)} tensors of an earlier training ({shorten(names, 3)}), which from_pretrained has left out: "
        f"{anew} starts them anew. To go on with them, load each file into the prepared model: "
        f"model.load_state_dict(safetensors.torch.load_file(file), strict=False)",
        UserWarning,
        stacklevel=5,
    )


def names_in(file: Path) -> Iterator[str]:
    """Names of the tensors in a safetensors file; none where it is no such file."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH), "little")
            header = json.loads(opened.read(length)) if length <= LARGEST else {}
    except (OSError, ValueError):
        return
    yield from (name for name in header if name != "__metadata__") if isinstance(header, dict) else ()


__all__ = ["names_in", "warn_of_saved_state"]
