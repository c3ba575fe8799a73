"""Sites: the linear layers of a model that a probe watches, their weights, and hooks that see inputs beside gradients.

Nothing of a model is changed: hooks are there while something is watched, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.data import as_multiplied
from ao_lab.transforms.layers import check_model, is_linear, is_transposed, routers, shorten
from ao_lab.transforms.plan import Filter, Selection

ROUTER = "it routes tokens to experts"


@dataclass(frozen=True)
class Site:
    """A linear layer."""

    name: str
    module: nn.Module
    #: (N, K) of the weight as nn.Linear has it, whole.
    shape: tuple[int, int]

    def weight(self) -> torch.Tensor:
        """(N, K) as it is now, whole: of a sharded one all processes have to ask for it."""
        w: Any = self.module.weight
        w = w.detach()
        w = w.full_tensor() if hasattr(w, "full_tensor") else w
        w = w.dequantize() if isinstance(w, QuantizedTensor) else w
        result: torch.Tensor = w.T if is_transposed(self.module) else w
        return result


#: What is done with a site's inputs (tokens, K), and the gradient at its outputs (tokens, N), or None where none flows.
See = Callable[[Site, torch.Tensor, torch.Tensor | None], None]


def sites_of(model: nn.Module, filter_fn: Filter | None = None) -> list[Site]:
    """The linear layers that are meant, in the order of the model; ValueError where there is none."""
    check_model(model)
    select = Selection(
        filter_fn, lambda module, name: (is_linear(module), ""), dict.fromkeys(routers(model), ROUTER)
    )
    found: dict[int, Site] = {}
    for name, module in model.named_modules():
        if is_linear(module) and select(module, name)[0] and id(module) not in found:
            w: Any = module.weight
            if w.dim() == 2:
                n, k = w.shape[::-1] if is_transposed(module) else w.shape
                found[id(module)] = Site(name, module, (int(n), int(k)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to probe that filter_fn accepts; nn.Linear and Conv1D are probed"
        )
    return list(found.values())


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A layer's input as its product takes it; None where a call has no tensor."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    return as_multiplied(x) if isinstance(x, torch.Tensor) else None


@contextmanager
def watching(sites: Sequence[Site], see: See, *, begin: bool = False) -> Iterator[None]:
    """`see` gets what each site reads inside, with the gradient once it is there, else at once.

    begin: a graph begins at outputs that have none, so that gradients reach layers whose parameters ask for none.
    """
    handles: list[Any] = []

    def watch(site: Site) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = input_of(args, kwargs)
            if x is None or not isinstance(output, torch.Tensor):
                return output
            if begin and not output.requires_grad:
                # A copy, since what comes next may change it in place, which a view of a leaf refuses.
                output = output.detach().requires_grad_().clone()
            if torch.is_grad_enabled() and output.requires_grad:
                version = None if x.is_inference() else x._version
                output.register_hook(lambda g: see(site, _unchanged(site, x, version), g.detach()))
            else:
                see(site, x, None)
            return output

        return hook

    try:
        for site in sites:
            handles.append(site.module.register_forward_hook(watch(site), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unchanged(site: Site, x: torch.Tensor, version: int | None) -> torch.Tensor:
    """An input as it was read; ValueError where it was changed in place since."""
    if version is not None and x._version != version:
        raise ValueError(
            f"{site.name}: its input was changed in place after it had been read; change it out of place (x = x + y), or leave "
            f"the layer out by filter_fn"
        )
    return x


def matrix(x: torch.Tensor) -> torch.Tensor:
    """(tokens, channels)."""
    return x.reshape(-1, x.shape[-1])


def refuse_unseen(names: Sequence[str]) -> None:
    """ValueError for sites that no data reached."""
    if names:
        raise ValueError(
            f"no input reached {shorten(names)}, or no gradient came back; give data that reaches these layers by calling "
            f"their modules and outputs that depend on them, or exclude them with filter_fn"
        )


__all__ = ["Site", "sites_of"]
