"""transformers' `Trainer` and its checkpoints of models with quantized weights, which are folders in our layout.

`Trainer` looks for files of its own names, and says of a folder of ours that it is no checkpoint. So where a checkpoint is in
our layout, its weights are read by `ao_lab.checkpoint` and copied into the model's: quantized ones part by part, bit for bit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.shards import OWN_INDEX, OWN_SINGLE, look_at
from ao_lab.checkpoint.records import whole_weights
from ao_lab.checkpoint.save_checks import unwrapped
from ao_lab.checkpoint.third_party import records_of


def is_ours(folder: str | Path) -> bool:
    """Whether a checkpoint's weights are in our layout."""
    return any((Path(folder) / name).is_file() for name in (OWN_SINGLE, OWN_INDEX))


def load_into(model: Any, folder: str | Path) -> Any:
    """Copy a folder's weights into a model that has them; what `load_state_dict` says of missing and unexpected names.

    ValueError for a weight that is quantized in another way than the model's.
    """
    found = look_at(Path(folder))
    return unwrapped(model).load_state_dict(whole_weights(found, records_of(found)), strict=False)


def register() -> None:
    """Let `Trainer` resume from folders in our layout, and find its best model there; a second call does nothing."""
    from transformers.trainer import Trainer

    kind: Any = Trainer
    resume, best = kind._load_from_checkpoint, kind._load_best_model
    if getattr(resume, "of_ao_lab", False):
        return

    @functools.wraps(resume)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if is_ours(resume_from_checkpoint):
            result = load_into(self.model if model is None else model, resume_from_checkpoint)
            self._issue_warnings_after_load(result)
        else:
            resume(self, resume_from_checkpoint, model)

    @functools.wraps(best)
    def _load_best_model(self: Any) -> None:
        folder = self.state.best_model_checkpoint
        if is_ours(folder):
            self._issue_warnings_after_load(load_into(self.model, folder))
        else:
            best(self)

    _load_from_checkpoint.of_ao_lab = True  # type: ignore[attr-defined]
    kind._load_from_checkpoint, kind._load_best_model = _load_from_checkpoint, _load_best_model


__all__ = ["is_ours", "load_into", "register"]
