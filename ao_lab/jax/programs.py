"""Compiled programs of eager calls, looked up by what they depend on, and their results made without JAX's pytrees.

The keys are those of `fast.kernels.launch.cache` with JAX arrays in them: class (a tracer's is another), shape and dtype,
and where the first array lies. What is found is a program that takes and gives arrays alone; flattening a `Quantized` and
making one again takes JAX longer than a small program runs. Programs check their arguments when they are traced, so a
remembered call is a right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from ao_lab.jax.device import is_traced
from fast.kernels.launch import cache
from reference import Quantized, Scales
from reference.arrays.pytrees import register_flax_if_imported, register_jax


def call(name: str, record: Any, values: tuple[Any, ...], *arrays: Any) -> tuple[Any, Any]:
    """The key of a call, and what it gives; None for a key that cannot be, and for a result that no program is known for."""
    register_flax_if_imported()
    if is_traced(arrays[0]):
        return None, None
    where = getattr(arrays[0], "sharding", None)
    named = record if record.__class__ is str else id(record)
    key = (name, named, values, *map(type, values), where, *map(_part, arrays))
    found = cache.find(key)
    return key, None if found is None else found(*arrays)


def _part(array: Any) -> Any:
    return None if array is None else (array.__class__, getattr(array, "aval", None))


def run(
    function: Callable[..., Any], constants: tuple[Any, ...], arrays: tuple[Any, ...], key: Any, record: Any
) -> Any:
    """function(*constants, *arrays) for concrete arrays and None, as one program that answers the next call with this key."""
    try:
        hash(constants)
    except TypeError:
        return function(*constants, *arrays)  # says what is wrong
    leaves, tree = jax.tree.flatten(arrays)
    program = _program(function, constants, tree)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    finish = _finishing(_result(function, constants, tree, shapes))

    def call(*arrays: Any) -> Any:
        return finish(program(*(array for array in arrays if array is not None)))

    cache.remember(key, call, record)
    return finish(program(*leaves))


@lru_cache(maxsize=1024)
def _program(function: Callable[..., Any], constants: tuple[Any, ...], tree: Any) -> Any:
    """From the arrays among the arguments to those of the result."""
    return jax.jit(lambda *leaves: jax.tree.leaves(function(*constants, *jax.tree.unflatten(tree, leaves))))


@lru_cache(maxsize=1024)
def _result(
    function: Callable[..., Any], constants: tuple[Any, ...], tree: Any, shapes: tuple[tuple[Any, Any], ...]
) -> Any:
    """The result, with shapes for arrays; the errors of the function."""
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.eval_shape(partial(function, *constants), *jax.tree.unflatten(tree, leaves))


def _finishing(like: Any) -> Callable[[Sequence[Any]], Any]:
    """What makes a result like this one of its arrays."""
    if not isinstance(like, (Quantized, Scales)):
        return lambda made: made[0]
    parts = [part for part in cache.TENSORS if getattr(like, part, None) is not None]
    names: Any = dict(zip(parts, parts, strict=True))
    return cache.maker(replace(like, **names), {part: at for at, part in enumerate(parts)})


register_jax()
