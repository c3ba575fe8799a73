"""Operations in which a `SparseQuantizedTensor` differs from `QuantizedTensor`: a table in front of the common one.

What only moves, copies or shares whole parts (clone, detach, to, t, pin) is common, and so are products, which compute with the
dense equivalent or by a kernel of `ao_lab.gemm.select`. What cuts, joins or makes parts is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_lab.tensor.op_registry import Operation

SPARSE_OPERATIONS: dict[Any, Operation] = {}


def sparse_operation(*operators: Any) -> Callable[[Operation], Operation]:
    """Register a function for operators of ATen."""

    def register(function: Operation) -> Operation:
        SPARSE_OPERATIONS.update(dict.fromkeys(operators, function))
        return function

    return register


def sparse_view(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the tensor and the other arguments whose results share its memory."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # As for `op_registry.view`: torch makes no views of outer tensors that are not inference mode's from inside it.
            if torch.is_inference_mode_enabled() and not args[0].is_inference():
                with torch.inference_mode(False):
                    return run(func, args, kwargs)
            return return_and_correct_aliasing(func, args, kwargs, function(*args, **kwargs))  # type: ignore[no-untyped-call]

        sparse_operation(*operators)(run)
        return function

    return register


__all__ = ["SPARSE_OPERATIONS", "sparse_operation", "sparse_view"]
