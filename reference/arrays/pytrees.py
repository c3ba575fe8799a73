"""Dataclasses that hold arrays (`Quantized`, `Scales`): registered here, converted by the bridges, pytrees in JAX.

`@array_container(...)` names the fields that hold arrays; the others are static. `reference.arrays.torch_bridge` converts the
arrays of a registered class, `reference.arrays.jax_jit` finds the JAX arrays in it, and JAX gets them as leaves.

JAX learns of the classes when `reference` is imported after JAX, and otherwise at the first call of a public function after JAX
is imported. One case is left: a program that imports JAX after it has built a `Quantized` from NumPy arrays, and hands that to
`jax.jit` before it calls anything here again, calls `reference.register_jax()` once. (Importing JAX here for everyone would
make `import reference` slow.) `flax.serialization` learns of the classes at the same moments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])
#: Array fields by registered class, and the classes that JAX does not know yet.
_ARRAYS: dict[type, tuple[str, ...]] = {}
_UNKNOWN_TO_JAX: list[type] = []
_UNKNOWN_TO_FLAX: list[type] = []


def array_container(*arrays: str) -> Callable[[Class], Class]:
    """Decorator that registers a dataclass by the names of its fields that hold an array or None; other fields are static."""

    def register(cls: Class) -> Class:
        _ARRAYS[cls] = arrays
        _UNKNOWN_TO_JAX.append(cls)
        _UNKNOWN_TO_FLAX.append(cls)
        return cls

    return register


def array_fields(value: Any) -> tuple[str, ...]:
    """Names of the array fields of an instance of a registered class; () for anything else, subclasses included."""
    return _ARRAYS.get(type(value), ())


def register_jax() -> None:
    """Register `Quantized` and `Scales` as JAX pytrees, and with flax where that is imported; again does nothing. Imports
    JAX.
    """
    register_flax_if_imported()
    if not _UNKNOWN_TO_JAX:
        return
    import jax

    while _UNKNOWN_TO_JAX:
        cls = _UNKNOWN_TO_JAX.pop()
        names = [field.name for field in fields(cls)]
        static = [name for name in names if name not in _ARRAYS[cls]]
        jax.tree_util.register_dataclass(cls, data_fields=list(_ARRAYS[cls]), meta_fields=static)


def register_if_imported() -> None:
    """`register_jax` where JAX is already imported (completely: another thread may be at it)."""
    if hasattr(sys.modules.get("jax"), "tree_util"):
        register_jax()


def register_flax_if_imported() -> None:
    """Make the classes known to `flax.serialization` where that is imported."""
    if not _UNKNOWN_TO_FLAX:
        return
    serialization = sys.modules.get("flax.serialization")
    if not hasattr(serialization, "register_serialization_state"):
        return
    from reference.arrays import flax_state

    while _UNKNOWN_TO_FLAX:
        cls = _UNKNOWN_TO_FLAX.pop()
        flax_state.register(serialization, cls, _ARRAYS[cls])
