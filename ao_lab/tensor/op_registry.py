"""The table of `QuantizedTensor`'s operations: from an operator of ATen to the function that computes it.

`ao_lab.tensor.view_ops` registers what moves, slices and copies, `ao_lab.tensor.matmul_ops` what multiplies,
`ao_lab.tensor.lookup_ops` what looks up, `ao_lab.tensor.value_ops` arithmetic, `ao_lab.tensor.collectives` what sends to other
processes; importing the package imports them. The tensor class knows this table alone. A function takes the operator, its
arguments and its keyword arguments.

Whatever computes with values otherwise (activation functions) is not here: dequantize first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operation = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
OPERATIONS: dict[Any, Operation] = {}
#: The same for operators of other packages, which may not be imported, by name.
NAMED_OPERATIONS: dict[str, Operation] = {}


#: Functions of torch that are computed before the dispatcher, in eager inference, by the function. It returns None where the
#: dispatcher has to decide.
EAGER_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def eager_function(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what computes a function of torch without the dispatcher, where nothing differentiates or traces it."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        EAGER_FUNCTIONS[function] = compute
        return compute

    return register


#: Functions of torch under transforms of functions (`torch.vmap`, `torch.func`), by what computes them there or returns None.
TRANSFORMED_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def transformed_function(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what is asked first for functions of torch while a transform runs."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        TRANSFORMED_FUNCTIONS.update(dict.fromkeys(functions, compute))
        return compute

    return register


def operation(*operators: Any) -> Callable[[Operation], Operation]:
    """Register a function for operators of ATen, and for those of others by name."""

    def register(function: Operation) -> Operation:
        for operator in operators:
            table: dict[Any, Operation] = NAMED_OPERATIONS if isinstance(operator, str) else OPERATIONS
            table[operator] = function
        return function

    return register


__all__ = [
    "EAGER_FUNCTIONS",
    "NAMED_OPERATIONS",
    "OPERATIONS",
    "TRANSFORMED_FUNCTIONS",
    "eager_function",
    "operation",
    "transformed_function",
]
