"""What a transform did to each layer of a model, and why the others stay; what is kept of that with the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from ao_lab.transforms.layers import shorten

#: Where a model keeps its report.
ATTRIBUTE = "ao_lab_report"
#: Where it keeps, by names of parameters, how they were pruned (`ao_lab.sparsify_`).
SPARSITY = "ao_lab_sparsity"


@dataclass(frozen=True)
class LayerLine:
    """One parameter that a transform looked at."""

    #: Full name of the parameter.
    name: str
    #: Class of the module that has it.
    kind: str
    shape: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """Whether it was changed."""
        raise NotImplementedError

    def told(self, width: int) -> list[str]:
        """Its lines in the text of a report, its name as wide as the others'."""
        return [f"  {self.name:<{width}}  {self}"]


L = TypeVar("L", bound=LayerLine)


@dataclass(frozen=True)
class ModelReport(Generic[L]):
    """Every layer of a model that a transform looked at, in the order of its modules."""

    layers: tuple[L, ...] = ()

    @property
    def changed(self) -> tuple[L, ...]:
        """Those that were changed."""
        return tuple(layer for layer in self.layers if layer.changed)

    @property
    def left(self) -> tuple[L, ...]:
        """Those that were not."""
        return tuple(layer for layer in self.layers if not layer.changed)

    def heading(self) -> str:
        """How many layers were changed."""
        raise NotImplementedError

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        return "\n".join([self.heading(), *(line for layer in self.layers for line in layer.told(width))])


def remember_pruned(model: nn.Module, name: str, what: str) -> None:
    """Keep with the model, for `ao_lab.explain`, that a parameter was pruned."""
    known: dict[str, str] = {**getattr(model, SPARSITY, {}), name: what}
    object.__setattr__(model, SPARSITY, known)


# State of an earlier training that lies in the folder from which a model of transformers came: `save_pretrained` writes learned
# scales, masks and counts of steps with the weights; `from_pretrained` reads them into no dense model. Preparing such a model
# starts them anew, and says so.

#: What the header of a safetensors file has before it: its length.
LENGTH = 8
LARGEST = 100 * 2**20


def warn_of_saved_state(model: nn.Module, leaves: Collection[str], anew: str) -> None:
    """A UserWarning where the model's folder has tensors whose names end so. anew: what starts them again."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(folder, str) or not folder or not Path(folder).is_dir():
        return
    saved = {
        file: names
        for file in sorted(Path(folder).glob("model*.safetensors"))
        if (names := [name for name in names_in(file) if name.rpartition(".")[2] in leaves])
    }
    if not saved:
        return
    names = [name for part in saved.values() for name in part]
    files = " and ".join(str(file) for file in saved)
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
            header: Any = json.loads(opened.read(length)) if length <= LARGEST else {}
    except (OSError, ValueError):
        return
    yield from (name for name in header if name != "__metadata__") if isinstance(header, dict) else ()
