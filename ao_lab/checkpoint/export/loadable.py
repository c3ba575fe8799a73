"""Whether transformers can load a model whose linear weights lie in compressed-tensors' formats: some classes cannot.

While it loads, transformers runs `_init_weights` and looks up tied parameters. Packed formats have no parameter `weight`
then, and tied weights are compared with their partner: classes that ask for either fail in `from_pretrained`. Both are tried
here on a model of the class without memory. Modules are initialized by the model of transformers that they lie in, a vision
tower's for instance, and not by the outermost one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

WHY = "so that from_pretrained fails in transformers 5.23; leave these layers dense, or use layout='ao_lab'"


def unsupported_reasons(
    model: nn.Module, quantized: Collection[str], packed: Collection[str], untied: bool
) -> list[str]:
    """Why transformers fails to load a model of its own with these quantized (and packed) layers; none for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "_init_weights") or not hasattr(config, "to_dict"):
        return []
    # As readers make it of config.json: some classes tie whatever it says.
    fields = config.to_dict() | ({"tie_word_embeddings": False} if untied else {})
    config = type(config).from_dict(fields)
    with torch.device("meta"):
        skeleton: Any = type(model)(config)
    tied = {
        name for pair in (getattr(skeleton, "all_tied_weights_keys", None) or {}).items() for name in pair
    }
    found = [
        f"{path}: {type(model).__name__} ties it, {WHY}" for path in quantized if f"{path}.weight" in tied
    ]
    return found + _initialized(skeleton, packed)


def _initialized(skeleton: Any, packed: Collection[str]) -> list[str]:
    """Modules whose initialization asks for weights that packed formats do not have."""
    for path in packed:
        skeleton.get_submodule(path)._parameters.pop("weight", None)
    found: dict[str, str] = {}
    for owner, model, name, module in _owned("", skeleton, "", skeleton):
        try:
            model._init_weights(module)
        except AttributeError:
            # Of a nested model its name says most, once: it is what can be left dense.
            kind = f"{type(model).__name__} initializes a {type(module).__name__}" if owner else ""
            told = kind or f"a {type(module).__name__} is initialized"
            place = owner or name or "the model"
            found.setdefault(place, f"{place}: {told} by weights that packed formats lack, {WHY}")
    return list(found.values())


def _owned(owner: str, model: Any, path: str, module: nn.Module) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """Of a module and all in it: path and model of transformers that initializes it, its own path, and itself."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        nested = hasattr(child, "_init_weights") and hasattr(child, "_initialize_weights")
        who, initializing = (inner, child) if nested else (owner, model)
        yield from _owned(who, initializing, inner, child)
    yield owner, model, path, module


__all__ = ["unsupported_reasons"]
