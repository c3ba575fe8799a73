"""Which parameters `sparsify_` is to change, in one call or in training, and the reason of each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ao_lab.calibration.blocks import block_lists
from ao_lab.sparsity.prune_layer import torch_prune_reason
from ao_lab.transforms.layers import (
    is_experts,
    is_linear,
    routers,
    shorten,
    unsupported_reason,
)
from ao_lab.transforms.select import ROUTES, Filter

EXPERTS = "batched experts are not pruned, only linear layers are; a call without filter_fn leaves them and their routers dense"


class Selection:
    """Which parameters are selected, and the reason: by a filter, or the linear layers of the model's blocks.

    A model that has lists of blocks keeps what stands outside of them, embeddings and head, as the papers do. Batched experts
    are selected where a filter accepts them; their reason is why they cannot be pruned.
    """

    def __init__(self, model: nn.Module, filter_fn: Filter | None, walked: tuple[str, ...] | None) -> None:
        self.filter_fn = filter_fn
        self.routers = routers(model)
        #: Names outside of which nothing is selected without a filter.
        self.lists = tuple(block_lists(model)) if walked is None else walked

    def __call__(self, path: str, module: nn.Module, name: str, parameter: torch.Tensor) -> tuple[bool, str]:
        """Of one parameter."""
        kind = type(module).__name__
        if not is_linear(module):
            reason = unsupported_reason(module, name, parameter)
            if reason is None and parameter.dim() == 3 and is_experts(module) and self.filter_fn is not None:
                return self._accepts_experts(path, module), EXPERTS
            return False, reason or f"{kind}: only linear layers are pruned"
        if name != "weight" or parameter.dim() != 2:
            reason = torch_prune_reason(module, name)
            return False, reason or "it is not the matrix that the layer multiplies with"
        if path in self.routers and getattr(self.filter_fn, "leaves_routers", self.filter_fn is None):
            return False, ROUTES.replace("quantizes", "prunes")
        if self.filter_fn is not None:
            good = self.filter_fn(module, path)
            return good, "accepted by filter_fn" if good else "refused by filter_fn"
        if self.lists and not is_inside(path, self.lists):
            return False, f"outside of the blocks ({shorten(self.lists, 2)})"
        return True, kind

    def _accepts_experts(self, path: str, module: nn.Module) -> bool:
        """Whether the filter accepts a module of experts; one that asks for what only linear layers have does not."""
        try:
            return bool(self.filter_fn and self.filter_fn(module, path))
        except AttributeError:
            return False


def is_inside(path: str, names: Iterable[str]) -> bool:
    """Whether a module is one of those named, or in one; "" is the whole model."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in names)


def block_of(full: str, blocks: Iterable[str]) -> str | None:
    """The block that a parameter is in; None where it is in none."""
    return next((name for name in blocks if is_inside(full, [name])), None)


__all__ = ["EXPERTS", "Selection", "block_of", "is_inside"]
