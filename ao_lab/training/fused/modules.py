"""RMSNorm, SwiGLU and rotary embedding as one kernel each way: module, parameters, hooks and names stay, its class changes.

A fused class is made of the module's own, so `isinstance` holds, and a state_dict is what it was. The arithmetic is that of
`fast.rms_norm`, `fast.swiglu` and `fast.layers.rotary`, with the gradients of `fast.layers.gradients`. A norm is rounded to
the dtype once, after the weight, as torch's own is; modules of transformers that round before it too differ in the last
place. Rotary embedding keeps torch's bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fast
from ao_lab.training.casts import own_memory
from ao_lab.training.fused.probe import epsilon_of, is_norm_like, norm_reason, swiglu_reason, triple_of
from ao_lab.training.fused.rotary import fused_forward, rotary_name, rotary_reason
from ao_lab.training.fused.swiglu_linear import swiglu_linear
from reference.arrays.errors import choice

#: Dtypes of which silu is defined, see `reference.layers.swiglu`.
HALVES = (torch.bfloat16, torch.float16)


class Fused:
    """What a fused module has beside its own class."""

    #: The module's own class.
    plain: type[nn.Module]
    #: Names of the attributes that the fused forward reads.
    fused_names: tuple[str, ...]

    def extra_repr(self) -> str:
        """The module's own, and that it is fused."""
        own = super().extra_repr()  # type: ignore[misc]
        return ", ".join(part for part in (own, "fused") if part)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles name the module's own class: this one is made while a program runs."""
        kind = next(one for one in KINDS if isinstance(self, one))
        return _made, (kind, self.plain), self.__dict__


class FusedRMSNorm(Fused):
    """RMSNorm over the last axis. Inputs in another dtype than the weight, and weights that are sharded, take the module's own
    forward."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) in its dtype."""
        weight = self.weight
        if x.dtype != weight.dtype or hasattr(weight, "device_mesh") or hasattr(x, "device_mesh"):
            own: Tensor = super().forward(x)  # type: ignore[misc]
            return own
        y, _ = fast.rms_norm(x, own_memory(weight), eps=getattr(self, self.fused_names[0]))
        return y


class FusedSwiGLU(Fused):
    """down(silu(gate(x)) * up(x)). Results of gate in float32 take torch's operations, as does what is sharded; a layer that
    trains by a recipe on a GPU is one step with silu (`swiglu_linear`)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to the same shape."""
        gate, up, down = (getattr(self, name) for name in self.fused_names)
        return swiglu_linear(gate(x), up(x), down)


class FusedAttention(Fused):
    """Attention; its forward is made by `fused_forward`."""


KINDS = (FusedRMSNorm, FusedSwiGLU, FusedAttention)
#: What can be fused, by the names that `convert_for_training_` takes.
FUSIONS: dict[str, type[Fused]] = dict(zip(("norm", "swiglu", "rotary"), KINDS, strict=True))
#: Those that were seen to be faster on a GPU.
MEASURED = ("norm", "swiglu", "rotary")
CLASSES: dict[tuple[type, type], type[Any]] = {}


def class_of(kind: type[Fused], plain: type[nn.Module]) -> type[Any]:
    """The class that a module of class `plain` gets, the same at every call."""
    if (kind, plain) not in CLASSES:
        fields: dict[str, Any] = {"plain": plain, "__module__": plain.__module__}
        if kind is FusedAttention:
            fields["forward"] = fused_forward(plain)
        CLASSES[kind, plain] = type(f"Fused{plain.__name__}", (kind, plain), fields)
    return CLASSES[kind, plain]


def _made(kind: type[Fused], plain: type[nn.Module]) -> Any:
    return object.__new__(class_of(kind, plain))


def fusions(fuse: bool | Iterable[str]) -> tuple[str, ...]:
    """The names in FUSIONS that `fuse` asks for: True for MEASURED. ValueError for another name."""
    if isinstance(fuse, bool):
        return MEASURED if fuse else ()
    chosen = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    for name in chosen:
        choice(name, tuple(FUSIONS), "fuse")
    return chosen


def fuse_layers_(
    model: nn.Module, chosen: Iterable[str] = tuple(FUSIONS)
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Fuse layers of the `chosen` kinds in place, all of a model's: their names, and those left with the reason."""
    wanted = tuple(FUSIONS[name] for name in chosen)
    fused: list[str] = []
    left: dict[str, str] = {}
    swaps: dict[int, tuple[nn.Module, type[Fused]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found = kind_of(module)
        if found is None or found[0] not in wanted:
            continue
        kind, reason = found
        if reason is None:
            fused.append(name)
            swaps[id(module)] = module, kind
        else:
            left[name] = reason
    for module, kind in swaps.values():
        names = triple_of(module) or (epsilon_of(module) or "",)
        module.__class__ = class_of(kind, type(module))
        module.fused_names = names  # type: ignore[assignment]
    return tuple(fused), left


def kind_of(module: nn.Module) -> tuple[type[Fused], str | None] | None:
    """The fused class for a module, and why it cannot have it; None for a module that is none of them."""
    kind: type[Fused]
    if is_norm_like(module):
        kind, reason = FusedRMSNorm, norm_reason
    elif triple_of(module) is not None:
        kind, reason = FusedSwiGLU, swiglu_reason
    elif rotary_name(type(module)) is not None:
        kind, reason = FusedAttention, rotary_reason
    else:
        return None
    return kind, "it is fused already" if isinstance(module, Fused) else reason(module)


def unfuse_layers_(model: nn.Module) -> tuple[str, ...]:
    """Undo `fuse_layers_`; the modules' names."""
    found = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, Fused)}
    for module in {id(module): module for module in found.values()}.values():
        module.__class__ = module.plain  # type: ignore[assignment]
        del module.fused_names
    return tuple(found)


__all__ = ["Fused", "FusedRMSNorm", "FusedSwiGLU", "fuse_layers_", "fusions", "unfuse_layers_"]
