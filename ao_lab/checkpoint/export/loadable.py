"""Whether transformers can load a model whose linear weights lie in compressed-tensors' formats: some classes cannot.

While it loads, transformers runs a class's `_init_weights` and looks up tied parameters. Packed formats have no parameter
`weight` then, and tied weights are compared with their partner: classes that ask for either fail in `from_pretrained`. Both
are tried here on a model of the class without memory.
"""

from __future__ import annotations

from collections.abc import Collection
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
    found = []
    for name, module in skeleton.named_modules():
        try:
            skeleton._init_weights(module)
        except AttributeError:
            kind = type(module).__name__
            found.append(
                f"{name or 'the model'}: a {kind} is initialized by weights that packed formats lack, {WHY}"
            )
    return found


__all__ = ["unsupported_reasons"]
