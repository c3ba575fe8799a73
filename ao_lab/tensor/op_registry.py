"""The table of `QuantizedTensor`'s operations: from an operator of ATen to the function that computes it.

`ao_lab.tensor.view_ops` enters what moves, cuts and copies, `ao_lab.tensor.matmul_ops` what multiplies and looks up,
`ao_lab.tensor.scaling` powers of two, `ao_lab.tensor.collectives` what sends to other processes. A function takes the operator,
its arguments and its keyword arguments. Whatever changes values otherwise (arithmetic, activation functions) is not here:
dequantize first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

Operation = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
OPERATIONS: dict[Any, Operation] = {}


@lru_cache(maxsize=1)
def operations() -> dict[Any, Operation]:
    """The table, filled."""
    for name in ("ao_lab.tensor.view_ops", "ao_lab.tensor.matmul_ops", "ao_lab.tensor.scaling"):
        importlib.import_module(name)
    if torch.distributed.is_available():
        importlib.import_module("ao_lab.tensor.collectives")
    return OPERATIONS


def operation(*operators: Any) -> Callable[[Operation], Operation]:
    """Enter a function into the table."""

    def enter(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(operators, function))
        return function

    return enter


def view(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of the tensor and the other arguments whose results share its memory."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Torch fails to make views of an outer tensor where the subclass makes them of inference mode's kind.
            if torch.is_inference_mode_enabled() and not args[0].is_inference():
                with torch.inference_mode(False):
                    return run(func, args, kwargs)
            made = function(*args, **kwargs)
            if type(made) is torch.Tensor:  # dense: a copy, which shares nothing
                return made
            return return_and_correct_aliasing(func, args, kwargs, made)  # type: ignore[no-untyped-call]

        operation(*operators)(run)
        return function

    return enter


__all__ = ["OPERATIONS", "operation", "operations", "view"]
