"""What a transform did to each layer of a model, and why the others stay; what is kept of that with the model."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from torch import nn

from ao_lab.transforms.layers import shorten

#: Where a model keeps its report.
ATTRIBUTE = "ao_lab_report"
#: Where it keeps, by names of parameters, how they were pruned (`ao_lab.sparsify_`).
SPARSITY = "ao_lab_sparsity"
#: Where it keeps what `Config.for_layout` changed in the configurations that it was quantized by.
CHANGES = "ao_lab_changes"
#: What the reasons of layers begin with whose weights a folder had.
LOADED = "loaded, as "
#: Where it keeps the configurations that it was quantized by, as text.
CONFIGURATIONS = "ao_lab_configurations"


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

    @property
    def folded_name(self) -> str:
        """Its name without the number of its block: what layers that a report shows as one line have in common."""
        return BLOCK.sub(".*", self.name)

    def common(self) -> Self:
        """This line without the numbers in which layers that a report shows as one may differ."""
        return self

    def together(self, alike: Sequence[Self]) -> Self:
        """This line for all layers that are alike in what is `common`; they are at least two, this one the first."""
        return self

    def told(self, width: int) -> list[str]:
        """Its lines in the text of a report, its name as wide as the others'."""
        return [f"  {self.name:<{width}}  {self}"]


L = TypeVar("L", bound=LayerLine)
T = TypeVar("T")


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

    def notes(self) -> list[str]:
        """What is to be known of several layers, a line each."""
        return []

    def __str__(self) -> str:
        shown = folded(self.layers)
        width = max((len(layer.name) for layer in shown), default=0)
        lines, before = [], ""
        for layer in shown:
            first, *more = layer.told(width)
            what = first[width + 2 :]
            long = len(what) > AS_ABOVE and what == before and not more
            lines += [f"{first[: width + 2]}  as above" if long else first, *more]
            before = what
        return "\n".join([self.heading(), *lines, *self.notes()])


#: Characters of a line behind the layer's name that are not repeated for the next layer.
AS_ABOVE = 60
#: A block's number in a layer's name.
BLOCK = re.compile(r"\.\d+(?=\.|$)")


def alike(items: Iterable[T], key: Callable[[T], tuple[str, Hashable]]) -> list[tuple[str, list[T]]]:
    """Items with the same key, in the order of the first of each, beside the name in that key.

    key: of an item, its name without the number of its block, and what is said of it.
    """
    groups: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [(name, group) for (name, _), group in groups.items()]


def folded(layers: Collection[L]) -> list[L]:
    """Layers of which a report says the same but for the number of their block as one, their count behind the name."""
    return [
        replace(one, name=f"{one.name} ({len(group)})") if len(group) > 1 else one
        for one, group in groups(layers)
    ]


def groups(layers: Collection[L]) -> list[tuple[L, list[L]]]:
    """Layers that are alike but for the number of their block and for what is not `common`: a line for all, and the layers."""

    def key(layer: L) -> tuple[str, Hashable]:
        return layer.folded_name, tuple(replace(layer.common(), name="").told(0))

    return [
        (replace(group[0].together(group), name=name) if len(group) > 1 else group[0], group)
        for name, group in alike(layers, key)
    ]


def folded_names(reasons: Mapping[str, str], what: str = "") -> list[str]:
    """The same of names and reasons: a line for those of all blocks. what: stands before each reason."""
    groups = alike(reasons.items(), lambda one: (BLOCK.sub(".*", one[0]), one[1]))
    named = [
        (f"{pattern} ({len(group)})" if len(group) > 1 else group[0][0], group[0][1])
        for pattern, group in groups
    ]
    return [f"{name}  {what}{reason}".rstrip() for name, reason in named]


def remember_pruned(model: nn.Module, name: str, what: str) -> None:
    """Keep with the model, for `ao_lab.explain`, that a parameter was pruned."""
    known: dict[str, str] = {**getattr(model, SPARSITY, {}), name: what}
    object.__setattr__(model, SPARSITY, known)


def remember_changes(model: nn.Module, changes: Sequence[str]) -> None:
    """Keep with the model, for its card, what `Config.for_layout` changed in a configuration."""
    if changes:
        object.__setattr__(model, CHANGES, (*dict.fromkeys((*getattr(model, CHANGES, ()), *changes)),))


def remember_configuration(model: nn.Module, told: str) -> None:
    """Keep with the model, for its card, a configuration that it was quantized by."""
    object.__setattr__(model, CONFIGURATIONS, (*dict.fromkeys((*getattr(model, CONFIGURATIONS, ()), told)),))


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
