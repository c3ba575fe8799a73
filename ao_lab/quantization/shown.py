"""`print(model)` names the schemes of quantized weights: `Linear(in_features=64, out_features=32, bias=True, weight=nf4)`.

Modules stay the classes that they are, and keep nothing for it: what torch prints of nn.Linear, nn.Embedding and of modules
without a text of their own (batched experts) is looked up on the class, and says more where a parameter is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor


def schemes_of(module: nn.Module) -> str:
    """The quantized parameters of a module itself, and their recipes; "" where it has none."""
    own: dict[str, Any] = dict(module._parameters)
    return ", ".join(f"{name}={one.recipe}" for name, one in own.items() if isinstance(one, QuantizedTensor))


def _with_schemes(extra_repr: Callable[[nn.Module], str]) -> Callable[[nn.Module], str]:
    @wraps(extra_repr)
    def shown(self: nn.Module) -> str:
        return ", ".join(filter(None, (extra_repr(self), schemes_of(self))))

    return shown


_KINDS: tuple[Any, ...] = (nn.Module, nn.Linear, nn.Embedding)
for _kind in _KINDS:
    _kind.extra_repr = _with_schemes(_kind.extra_repr)

__all__ = ["schemes_of"]
