"""Layers whose weight FSDP2 gathers as codes: `gather_as_codes` makes them of layers that train by a recipe, in place.

The parameter stays the same object under the same name; inside of it is a `CastOnGather`. What files hold is the plain weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ao_lab.training.distributed import fsdp_gather as fsdp_gather  # gives the class its hooks
from ao_lab.training.distributed.cast_on_gather import CastOnGather
from ao_lab.training.layers import LowPrecisionLinear


class GatheredLinear(LowPrecisionLinear):
    """`LowPrecisionLinear` whose weight FSDP2 gathers as codes. state_dict has plain tensors, and loads such ones."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = plain(self.weight)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        name = prefix + "weight"
        if metadata.get("assign_to_params_buffers") and name in state_dict:
            # The given tensor becomes the parameter: it has to be one that is gathered as codes.
            state_dict[name] = wrapped(state_dict[name], self.scheme)
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of a file, where the weight is plain
        if type(self.weight) is nn.Parameter:
            swap(self.weight, CastOnGather(self.weight.detach(), self.scheme))

    def operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and the weight; ValueError where FSDP1 has sharded it, which gathers no codes, and with `use_orig_params`
        would leave what the optimizer writes out of what it gathers."""
        x, weight = super().operands(input)
        if type(weight) is torch.Tensor and getattr(weight._base, "_is_flat_param", False):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) gathers no codes: convert without fsdp_float8_all_gather, or shard by "
                "fully_shard"
            )
        return x, weight

    @property
    def scheme(self) -> Any:
        """What the weight is gathered in."""
        return self.low_precision.recipe.output.b.scheme

    def restore_weight(self) -> None:
        """The plain weight again; ValueError where FSDP2 holds the shard."""
        if hasattr(self.weight, "_local_tensor"):
            raise ValueError(
                "the weight is sharded, and FSDP2 gathers it as codes: convert the layers back before fully_shard, or load the "
                "state_dict, which is plain, into a model that is not converted"
            )
        # A parametrization holds the weight under another name.
        for parameter in self.parameters():
            if isinstance(parameter, CastOnGather):
                swap(parameter, parameter.dense)


def gather_as_codes(modules: Iterable[LowPrecisionLinear]) -> None:
    """Let FSDP2 gather the layers' weights as codes. ValueError, and nothing has changed, where a graph holds a weight."""
    modules = list(modules)
    for module in modules:
        if module.weight._use_count() > 1 or weakref.getweakrefs(module.weight):  # type: ignore[attr-defined]
            raise ValueError(
                "a weight is held by the graph of an output or by a weak reference; convert before the first forward pass, or "
                "delete its output"
            )
    for module in modules:
        if not isinstance(module.weight, CastOnGather):  # tied layers have one weight
            scheme: Any = module.low_precision.recipe.output.b.scheme
            swap(module.weight, CastOnGather(module.weight.detach(), scheme))
        module.__class__ = GatheredLinear


def swap(parameter: torch.Tensor, content: torch.Tensor) -> None:
    """Give a parameter other content; it stays the same object, as optimizers and tied layers hold it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))  # type: ignore[no-untyped-call]


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The tensor of a weight, over the same memory; distributed as the weight is."""
    local = getattr(weight, "_local_tensor", weight)
    if not isinstance(local, CastOnGather):
        return weight.detach()
    if local is weight:
        return local.dense  # itself: what is written to it counts in its version
    # A view of the parameter, whose version it shares: a DTensor writes to its part below the counter of that part.
    view: Any = weight.detach()
    view._local_tensor = local.dense
    return view  # type: ignore[no-any-return]


def wrapped(weight: torch.Tensor, scheme: Any) -> torch.Tensor:
    """A weight that is gathered as codes, over the same memory; distributed as the weight is."""
    local = getattr(weight, "_local_tensor", weight).detach()
    if isinstance(local, CastOnGather):
        return weight
    made = CastOnGather(local, scheme)
    return _distributed(weight, made) if hasattr(weight, "_local_tensor") else made


def _distributed(like: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


__all__ = ["GatheredLinear", "gather_as_codes"]
