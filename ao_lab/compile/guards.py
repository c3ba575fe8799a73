"""Guards of a compiled program that quantized weights need not have, as option "guard_filter_fn" of `torch.compile`.

Before each call of a program torch compares what it was compiled for: of a quantized weight its class, shape, description, and
every tensor inside, in all 1.7 us of the host where a dense weight takes 0.4. Codes and scales follow from the description, so
that their guards are left out. Of parameters of modules there are none to begin with, since `torch_changes.weight_guards`
compares their parts in one step; what is left here are weights that come to a program another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Parts of a weight that its shape and its description settle: presence, dtype and shape. Scales of inputs are there or not.
SETTLED = ("codes", "scale", "outer", "zero")
TENSOR, DESCRIPTION = "TENSOR_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH"
#: Where the classes of quantized weights are.
HOME = "ao_lab.tensor."


class WithoutParts(str):
    """Keeps all guards but those of the parts of quantized weights.

    It is text, so that it is equal to its copies, and JSON; not "", which torch takes for no filter.
    """

    __slots__ = ()

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        """Whether to keep each guard."""
        weights = {
            entry.name
            for entry in entries
            if entry.guard_type == DESCRIPTION and type(entry.value).__module__.startswith(HOME)
        }
        return [not (entry.guard_type == TENSOR and _is_part(entry.name, weights)) for entry in entries]


class WithoutModules(str):
    """Keeps no guards of modules: of their weights, hooks and modes. Text, as the other."""

    __slots__ = ()

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        """Whether to keep each guard."""
        return [not entry.orig_guard.source.is_unspecialized_nn_module() for entry in entries]


def _is_part(name: str, weights: set[str]) -> bool:
    weight, _, part = name.rpartition(".")
    return part in SETTLED and weight in weights


def guard_options(frozen: bool) -> dict[str, Any]:
    """Options of `torch.compile`; none where this version of torch has no such option.

    frozen: no module changes any more, so that none is looked at.
    """
    import torch

    if not hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):  # came with the option
        return {}
    return {"guard_filter_fn": WithoutModules("without modules") if frozen else WithoutParts("without parts")}


__all__ = ["WithoutModules", "WithoutParts", "guard_options"]
