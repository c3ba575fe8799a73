"""Static scales of keys and values, found where a model's attention is called: the last step of a block's calibration.

Keys are seen after their rotation by position, as a cache would store them (`reference.kv_scales`), and as the block makes them
whose weights are quantized. Watched is torch's `scaled_dot_product_attention` (for the one pass that looks, models of
transformers use it, whatever their attention is); heads that are repeated for grouped queries are those of the cache again.
Padding does not count.

The scales stay with the model, and go into its files (`ao_lab.kv_cache.static_scales`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import fast
from ao_lab.calibration.ranks import Ranks
from ao_lab.calibration.tokens import PADDING, Tokens
from ao_lab.kv_cache.static_scales import CacheScales
from ao_lab.transforms.walk import Block

#: What is said of a block without scales of keys and values.
NO_ATTENTION = (
    "no scales of keys and values: no call of torch's scaled_dot_product_attention was seen in its block"
)


@dataclass
class _Largest:
    """The largest magnitudes by head that an attention module has multiplied."""

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    def update(self, name: str, x: torch.Tensor) -> None:
        """Take in (batch, heads, tokens, channels)."""
        most = x.abs().amax((0, 2, 3)).float()
        known = getattr(self, name)
        setattr(self, name, most if known is None else torch.maximum(known, most.to(known.device)))

    def scales(self, element: str, per: str) -> CacheScales:
        """Of the magnitudes seen, by `fast.kv_scales`."""
        if self.k is None or self.v is None:
            raise ValueError("no keys were seen; run data through the attention")
        scales = fast.kv_scales(self.k[:, None, None], self.v[:, None, None], per, element=element)
        return CacheScales(scales.k.reshape(-1).cpu(), scales.v.reshape(-1).cpu(), element, per)


@dataclass
class _Running:
    """Which modules run, the innermost one last."""

    names: list[str] = field(default_factory=list)

    def hooks(self, prefix: str, module: nn.Module) -> list[Any]:
        """Note a module while it runs."""

        def before(*_: Any) -> None:
            self.names.append(prefix)

        def after(*_: Any) -> None:
            self.names.pop()

        return [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, always_call=True),
        ]


class AttentionWatch(TorchFunctionMode):
    """Sees keys and values of calls of `scaled_dot_product_attention`."""

    def __init__(self, block: Block, tokens: Tokens) -> None:
        super().__init__()
        self.block, self.tokens, self.running = block, tokens, _Running()
        self.modules = dict(block.module.named_modules(prefix=block.name))
        self.largest: dict[str, _Largest] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function is F.scaled_dot_product_attention and self.running.names:
            values = dict(zip(("query", "key", "value"), args, strict=False)) | keywords
            self.see(self.running.names[-1], values["key"].detach(), values["value"].detach())
        return function(*args, **keywords)

    def see(self, name: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take in the keys and values of a module, (batch, heads, tokens, channels)."""
        repeats, largest = (
            repeats_of(self.modules[name], k.shape[1]),
            self.largest.setdefault(name, _Largest()),
        )
        counted = self.tokens.roles[self.tokens.capture.running] != PADDING
        for part, x in (("k", k), ("v", v)):
            x = x[:, ::repeats]
            if counted.shape == (x.shape[0], x.shape[2]):
                x = torch.where(counted.to(x.device)[:, None, :, None], x, x.new_zeros(()))
            largest.update(part, x)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls inside are seen."""
        handles: list[Any] = []
        try:
            for name, module in self.modules.items():
                handles += self.running.hooks(name, module)
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def repeats_of(module: nn.Module, heads: int) -> int:
    """How often each head of the cache is among so many heads of keys."""
    config = getattr(module, "config", None)
    stored = getattr(config, "num_key_value_heads", None) or getattr(module, "num_key_value_heads", None)
    return heads // stored if isinstance(stored, int) and stored and heads % stored == 0 else 1


@contextmanager
def attending_by_torch(model: nn.Module) -> Iterator[None]:
    """Models of transformers use torch's attention inside."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    before = {
        id(one): (one, one._attn_implementation)
        for one in configs
        if isinstance(getattr(one, "_attn_implementation", None), str)
    }
    try:
        for one, _ in before.values():
            one._attn_implementation = "sdpa"
        yield
    finally:
        for one, kind in before.values():
            one._attn_implementation = kind


def scales_of_block(
    model: nn.Module, block: Block, tokens: Tokens, element: str, per: str, ranks: Ranks | None = None
) -> dict[str, CacheScales]:
    """The scales of a block's attention modules by full name, of all data as the block is now; {} where it calls none."""
    watch = AttentionWatch(block, tokens)
    with attending_by_torch(model), watch.watching():
        block.run()
    if ranks is not None:
        for one in watch.largest.values():
            if one.k is not None and one.v is not None:
                one.k, one.v = ranks.largest(one.k), ranks.largest(one.v)
    return {name: largest.scales(element, per) for name, largest in watch.largest.items()}
