"""`apply_mods_` and `undo_mods_`: change a model by records, in place, with a report of what changed and why the rest stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ao_lab.mods.records import MODS, Mod, Place, example_siblings, is_linear
from ao_lab.transforms.layers import check_model, shorten
from ao_lab.transforms.plan import REFUSED, Filter, all_or_none
from ao_lab.transforms.report import LayerLine, ModelReport
from reference.arrays.namespace import and_nearest


@dataclass(frozen=True)
class ModLine(LayerLine):
    """One mod at one module. reason: why it stays; "" where it was changed."""

    mod: str = ""
    reason: str = ""

    @property
    def changed(self) -> bool:
        """Whether the mod was applied."""
        return not self.reason

    def __str__(self) -> str:
        return f"{self.mod}{'' if self.changed else f'  left: {self.reason}'}"


@dataclass(frozen=True)
class ModReport(ModelReport[ModLine]):
    """What `apply_mods_` did, mod after mod. exact: whether the model computes what it did before."""

    exact: bool = True

    def heading(self) -> str:
        """How many modules changed, and whether the model has to be trained."""
        after = "the function is the same" if self.exact else "the function is another one: train with them"
        return f"{len(self.changed)} of {len(self.layers)} modules changed by mods; {after}"


def apply_mods_(
    model: nn.Module,
    mods: str | Mod | Iterable[str | Mod],
    filter_fn: Filter | None = None,
    *,
    example: Any = None,
) -> ModReport:
    """Change a model by mods, in the given order: names of `MODS`, or records.

    filter_fn(module, name) selects among the modules that a mod matches. Default: all. example: an input, or a tuple of them,
    with which the model is run once if a mod needs to know which layers share an input (`join_siblings`). Apply mods before
    creating an optimizer and before `convert_for_training_` or `quantize_`, whose filter can use the marks of `..._in_16_bits`
    (`ao_lab.mods.in_low_precision`).

    Returns a `ModReport`. ValueError for an unknown mod, for none, for a mod that is applied already, and if nothing would
    change; TypeError for anything but a model. After an error nothing has changed.
    """
    check_model(model)
    records = mods_of(mods)
    present = {mod.name for mod in MODS.values() for module in model.modules() if mod.is_applied(module)}
    for mod in records:
        if mod.name in present:
            raise ValueError(
                f"{mod.name} has been applied to this model; undo_mods_(model, {mod.name!r}) first"
            )
    siblings = None if example is None else example_siblings(model, example)
    lines: list[ModLine] = []
    with all_or_none(lambda done: done[0].restore(done[1])) as begun:
        for mod in records:
            for place in places(model, siblings):
                if mod.matches(place.module):
                    lines.append(_applied(mod, place, filter_fn, begun))
    if not any(line.changed for line in lines):
        raise ValueError(_nothing(records, lines))
    changed = {line.mod for line in lines if line.changed}
    exact = all(mod.exact for mod in records if mod.name in changed)
    return ModReport(tuple(lines), exact)


def _applied(mod: Mod, place: Place, filter_fn: Filter | None, begun: list[Any]) -> ModLine:
    """One mod at one place, and what is said of it."""
    reason = (
        REFUSED if filter_fn is not None and not filter_fn(place.module, place.name) else mod.reason(place)
    )
    weight = getattr(place.module, "weight", None)
    line = ModLine(
        place.name,
        type(place.module).__name__,
        () if weight is None else tuple(weight.shape),
        mod.name,
        reason or "",
    )
    if reason is None:
        mod.apply(place)
        begun.append((mod, Place(place.model, place.name, place.model.get_submodule(place.name), place.ends)))
    return line


def _nothing(records: list[Mod], lines: list[ModLine]) -> str:
    names = ", ".join(mod.name for mod in records)
    if not lines:
        return f"{names}: the model has no module of the kind; the mods are {', '.join(MODS)}"
    return f"{names}: {shorten([line.name for line in lines])} stay: {lines[0].reason}"


def mods_of(mods: str | Mod | Iterable[str | Mod]) -> list[Mod]:
    """Records of names; ValueError for unknown names and for none."""
    given = [mods] if isinstance(mods, (str, Mod)) else list(mods)
    for one in given:
        if isinstance(one, str) and one not in MODS:
            raise ValueError(f"unknown mod {one!r}{and_nearest(one, MODS)}; the mods are {', '.join(MODS)}")
    if not given:
        raise ValueError(f"no mod is named; the mods are {', '.join(MODS)}")
    return [MODS[one] if isinstance(one, str) else one for one in given]


def places(model: nn.Module, siblings: Any = None) -> list[Place]:
    """All modules of a model with their names."""
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    ends = (linears[0], linears[-1]) if linears else ("", "")
    return [Place(model, name, module, ends, siblings) for name, module in model.named_modules() if name]


def undo_mods_(model: nn.Module, mods: str | Mod | Iterable[str | Mod] | None = None) -> tuple[str, ...]:
    """Undo mods (None: all); returns the names of the modules.

    Parameters of replaced modules are those from before; tables stay rounded. TypeError for anything but a model.
    """
    check_model(model)
    changed: list[str] = []
    for mod in reversed(mods_of(tuple(MODS) if mods is None else mods)):
        for place in places(model):
            if mod.is_applied(place.module):
                mod.restore(place)
                changed.append(place.name)
    return tuple(changed)


__all__ = ["ModLine", "ModReport", "apply_mods_", "undo_mods_"]
