"""Concrete JAX arrays run compiled: `quantize(jnp_array, ...)` is one XLA program, cached by record and shape.

Operation by operation the same call would dispatch some hundreds of small programs, each compiled when first met. Tracers pass
through untouched, so jit, vmap and grad of the caller see the plain functions; `jax.disable_jit` gives eager steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from reference.arrays.jax_mesh import over_mesh
from reference.arrays.pytrees import array_fields, register_jax


def holds_jax(value: Any) -> bool:
    """Whether value is a concrete JAX array, or a container with nothing but such arrays."""
    jax = sys.modules.get("jax")
    if not hasattr(jax, "Array"):
        return False
    if names := array_fields(value):
        parts = [getattr(value, name) for name in names]
        given = [part for part in parts if part is not None]
        return bool(given) and all(holds_jax(part) for part in given)
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)  # type: ignore[union-attr]


def run_compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) under jax.jit, arrays as inputs and everything else as constants of the program.

    Where an argument is neither (a NumPy array beside JAX arrays, say), the plain function runs and says what is wrong.
    """
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    arrays = {name: value for name, value in bound.items() if holds_jax(value)}
    constants = {name: value for name, value in bound.items() if name not in arrays}
    if not all(isinstance(value, Hashable) and _hashes(value) for value in constants.values()):
        return function(*args, **kwargs)
    # Types are part of the key: 1, 1.0 and True are equal, and only one of them is an axis.
    typed = tuple((name, type(value), value) for name, value in constants.items())
    return _program(function, typed)(arrays)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _program(
    function: Callable[..., Any], constants: tuple[tuple[str, type, Any], ...]
) -> Callable[..., Any]:
    import jax

    register_jax()
    fixed = {name: value for name, _, value in constants}
    return jax.jit(lambda arrays: over_mesh(function, (), {**arrays, **fixed}))  # type: ignore[no-any-return]
