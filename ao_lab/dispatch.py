"""The functions of `ao_lab`: the specification for NumPy and JAX arrays, `fast` for torch tensors.

On a GPU `fast` runs kernels, and it takes part in autograd; the bits are the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import reference


def holds_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, or a quantized one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(getattr(value, "codes", value), torch.Tensor)


def dispatched(name: str) -> Callable[..., Any]:
    """The function of this name: that of `fast`, if it has one, where the first argument is a torch tensor."""
    specified = getattr(reference, name)
    leading = next(iter(inspect.signature(specified).parameters))

    @functools.wraps(specified)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Keywords come in any order: the operand decides, wherever it stands.
        first = args[0] if args else kwargs.get(leading)
        if not holds_tensor(first):
            return specified(*args, **kwargs)
        import fast

        return getattr(fast, name, specified)(*args, **kwargs)

    return run
