"""torch tensors in CPU memory are NumPy arrays: the public functions share the memory and run NumPy's path.

One path less to trust, and a faster one: PyTorch's eager integer operations pass over memory once each. Tensors on other
devices, and fake or traced ones, keep to the torch namespace (`reference.arrays.namespace`). No gradient flows through:
see `fast` and `fake_quantize_vjp`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from reference.arrays.jax_bridge import array_fields, holds_jax, over_mesh, register_if_imported, run_compiled

P = ParamSpec("P")
R = TypeVar("R")

# dtypes that NumPy has no name for travel as unsigned integers of their width.
CARRIER = {1: "uint8", 2: "int16"}


def bridged(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` on NumPy arrays when an argument is a plain CPU tensor, and give tensors back.

    Concrete JAX arrays run it compiled (`reference.arrays.jax_bridge`). `function.__wrapped__` is the plain function.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        register_if_imported()
        if any(holds_jax(value) for value in (*args, *kwargs.values())):
            return cast("R", run_compiled(function, args, kwargs))
        if not any(_holds_tensor(value) for value in (*args, *kwargs.values())):
            return cast("R", over_mesh(function, args, kwargs))
        args_ = tuple(_convert(value, to_numpy) for value in args)
        kwargs_ = {name: _convert(value, to_numpy) for name, value in kwargs.items()}
        return cast("R", _convert(function(*args_, **kwargs_), to_torch))

    return run


def is_cpu_tensor(value: Any) -> bool:
    """Whether value is an ordinary dense torch tensor in CPU memory (no subclass, no tracing)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not plain or value.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # Sparse and nested ones go on, to the function's own check.
    return value.layout is torch.strided and not value.is_nested


def to_numpy(value: Any) -> Any:
    """A CPU tensor as a NumPy array over the same memory; anything else unchanged."""
    if not is_cpu_tensor(value):
        return value
    tensor = value.detach().resolve_neg().resolve_conj()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8") or name.startswith("float4"):
        torch = sys.modules["torch"]
        array = tensor.view(getattr(torch, CARRIER[tensor.element_size()])).numpy()
        return array.view(_ml_dtype(name)) if hasattr(_ml_dtypes(), name) else array
    return tensor.numpy()


def to_torch(value: Any) -> Any:
    """A NumPy array as a tensor over the same memory; anything else unchanged."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    torch = sys.modules["torch"]
    array = np.asarray(value)
    array = array if array.flags.writeable else array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _convert(value: Any, convert: Callable[[Any], Any]) -> Any:
    if names := array_fields(value):
        return replace(value, **{name: _convert(getattr(value, name), convert) for name in names})
    if type(value) is tuple:
        return tuple(_convert(item, convert) for item in value)
    return convert(value)


def _holds_tensor(value: Any) -> bool:
    return is_cpu_tensor(value) or any(is_cpu_tensor(getattr(value, name)) for name in array_fields(value))


def _ml_dtypes() -> Any:
    import ml_dtypes

    return ml_dtypes


def _ml_dtype(name: str) -> Any:
    return np.dtype(getattr(_ml_dtypes(), name))
