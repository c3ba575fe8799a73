"""PEFT's copies of weights that train: dense where the weight is quantized.

`modules_to_save` trains a copy of a whole module, `trainable_token_indices` copies of rows. A copy of a quantized weight would
be quantized, and does not train; so the copy is the dequantized weight, as a user who asks to train it expects.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor


def make_dense(module: nn.Module) -> None:
    """Each quantized parameter below a module becomes a dense one, which requires a gradient if that did; shared ones one."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        held: Any = part._parameters
        for name, value in held.items():
            if isinstance(value, QuantizedTensor):
                dense = made.setdefault(id(value), nn.Parameter(value.dequantize(), value.requires_grad))
                held[name] = dense


def register() -> None:
    """Put dense copies in place; a second call does nothing."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    _follow(ModulesToSaveWrapper, "update", _copies_of_modules)
    _follow(TrainableTokensLayer, "update_layer", _copies_of_rows)


def _follow(kind: Any, name: str, then: Any) -> None:
    """Let `then(self)` run after a method."""
    method = getattr(kind, name)
    if getattr(method, "of_ao_lab", False):
        return

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        then(self)
        return result

    run.of_ao_lab = True  # type: ignore[attr-defined]
    setattr(kind, name, run)


def _copies_of_modules(wrapper: Any) -> None:
    make_dense(wrapper.modules_to_save)


def _copies_of_rows(layer: Any) -> None:
    make_dense(layer.trainable_tokens_delta)
    originals = layer.trainable_tokens_original
    for name in [*originals.keys()]:
        if isinstance(value := originals[name], QuantizedTensor):
            originals[name] = value.dequantize()


__all__ = ["make_dense", "register"]
