"""What a model trains with, kept beside its checkpoints: a run that is resumed with another recipe, or with none, says so.

Names in a state_dict stay those of an ordinary model, so that other tools read it. The record is where they do not look: in
`state_dict()._metadata`, which `torch.save` keeps and `load_state_dict` hands to each layer (`ConvertedModule` compares it
there), and in a file of its own, `ao_lab_training.json`, beside what transformers' `save_pretrained` and `Trainer` write.
safetensors files and `torch.distributed.checkpoint` keep tensors alone: no record.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ao_lab.transforms.layers import ConvertedModule

FILE = "ao_lab_training.json"
#: Bytes of such a file at most; it holds a line for each recipe.
LARGEST = 2**20
NOTHING = "no recipe (convert_for_training_, QATConfig or sparsify_ was not called)"


def training_of(model: nn.Module) -> dict[str, int]:
    """What layers train with ("recipe rowwise", "QAT int4_g32"), and how many; empty for an ordinary model."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, ConvertedModule):
            found.update(f"{kind} {what}" for kind, what in module.training_record().items())
    return dict(found)


def told(record: Mapping[str, int]) -> str:
    """A record in words."""
    layers = (f"{what} in {count} layer{'s' * (count > 1)}" for what, count in sorted(record.items()))
    return " and ".join(layers) or NOTHING


def write_training(model: nn.Module, folder: str | Path) -> None:
    """Write the record beside a checkpoint's files; one of an earlier checkpoint goes where the model is an ordinary one."""
    record, path = training_of(model), Path(folder) / FILE
    if not path.parent.is_dir():  # nothing was saved: transformers says so, and goes on
        return
    if not record:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps({"layers": record}, indent=2) + "\n", encoding="utf-8")


def read_training(folder: str | Path) -> dict[str, int]:
    """The record beside a checkpoint; empty where there is none, or nothing that was written by `write_training`."""
    path = Path(folder) / FILE
    if not path.is_file() or path.stat().st_size > LARGEST:
        return {}
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    layers = found.get("layers") if isinstance(found, dict) else None
    if not isinstance(layers, dict) or any(type(count) is not int for count in layers.values()):
        return {}
    return layers


def warn_of_other_training(model: nn.Module, folder: str | Path, stacklevel: int = 2) -> None:
    """A UserWarning where a checkpoint was saved by a model that trains otherwise; none where it has no record."""
    saved, now = read_training(folder), training_of(model)
    if saved and saved != now:
        warnings.warn(
            f"{folder} was saved in training with {told(saved)}; this model trains with {told(now)}, and training goes on with "
            f"that. To go on as before, prepare the model as for the first run before it is resumed",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def saved_training(model: nn.Module) -> str:
    """With what the checkpoint trained from whose folder a model of transformers was read; "" where nothing says it."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    saved = read_training(folder) if isinstance(folder, str) and folder else {}
    if not saved:
        return ""
    return (
        f"{folder}, from which the model was read, was saved in training with {told(saved)}; this model is dense: prepare it "
        f"in the same way (convert_for_training_, QATConfig or sparsify_) to go on, or quantize_ it by that scheme"
    )


def warn_of_saved_training(model: nn.Module, kind: str) -> None:
    """The same for a model of transformers that was read from a checkpoint's folder, once it has been prepared in this way
    (kind: recipe, QAT, LoRA). Another way of training comes after the first one on purpose, and is not compared; nor is what
    is still missing, since a model may be prepared in several calls (`Trainer` compares all of it)."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(folder, str) or not folder:
        return
    saved, now = (
        {what: count for what, count in record.items() if what.startswith(f"{kind} ")}
        for record in (read_training(folder), training_of(model))
    )
    if saved and any(count > saved.get(what, 0) for what, count in now.items()):
        warnings.warn(
            f"{folder}, from which the model was read, was saved in training with {told(saved)}; this model trains with "
            f"{told(now)}",
            UserWarning,
            stacklevel=5 if kind != "recipe" else 3,
        )
