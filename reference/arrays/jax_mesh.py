"""Modes of JAX in which operations raise that the functions here are made of: explicit axes of a mesh, and rank promotion.

Axes are explicit by default in `jax.make_mesh`. There the sharding of an array is part of its type, and gathers, slices and
reshapes raise where JAX cannot say how their result is sharded. So a function runs under `jax.sharding.auto_axes`, where XLA
decides, and its results get a sharding again: of an operand's spec what fits them (`spec_like`). Values do not depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

from reference.arrays.pytrees import array_fields, register_jax


def explicit_mesh(arrays: Any) -> Any:
    """The mesh with explicit axes in the types of JAX arrays, or None."""
    jax = sys.modules["jax"]
    if not hasattr(
        jax.sharding, "auto_axes"
    ):  # before JAX 0.7 axes were explicit only where that was asked for
        return None
    for array in arrays:
        mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and mesh.explicit_axes:
            return mesh
    return None


def over_mesh(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs) where explicit axes of a mesh are automatic inside, and ranks are promoted whatever the mode.

    args and kwargs may hold `Quantized` and `Scales`. Results are sharded like the first array, as far as that fits them.
    """
    jax = sys.modules.get("jax")
    values = [*args, *kwargs.values()]
    if not hasattr(jax, "Array") or not any(map(holds_traced, values)):
        return function(*args, **kwargs)
    with jax.numpy_rank_promotion("allow"):  # type: ignore[union-attr]
        return _over_mesh(jax, function, args, kwargs)


def _over_mesh(jax: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    register_jax()
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    mesh = explicit_mesh([leaves[index] for index in at])
    if mesh is None:
        return function(*args, **kwargs)

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for index, array in zip(at, arrays, strict=True):
            filled[index] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return automatic(call, [leaves[index] for index in at], mesh)


def automatic(function: Callable[..., Any], arrays: list[Any], mesh: Any, specs: Any = None) -> Any:
    """function(*arrays) with the mesh's explicit axes automatic inside. specs: of the results, a tree; else `spec_like`."""
    jax = sys.modules["jax"]
    if specs is None:
        # Without their shardings: what raises for them raises inside.
        plain = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        made = jax.eval_shape(function, *plain)
        specs = jax.tree.map(lambda one: spec_like(one.shape, arrays[0], mesh), made)
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    )
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)(*arrays)


def spec_like(shape: tuple[int, ...], array: Any, mesh: Any) -> Any:
    """The array's PartitionSpec for a result: where the rank is the same, on each axis whose length the devices divide."""
    jax = sys.modules["jax"]
    spec = jax.typeof(array).sharding.spec
    if len(shape) != array.ndim:
        return jax.sharding.PartitionSpec()
    parts = [
        one if length % _devices(mesh, one) == 0 else None for length, one in zip(shape, spec, strict=False)
    ]
    return jax.sharding.PartitionSpec(*parts)


def _devices(mesh: Any, names: Any) -> int:
    """Over how many devices an entry of a spec divides an axis."""
    each = () if names is None else names if isinstance(names, tuple) else (names,)
    return prod(mesh.shape[name] for name in each)


def holds_traced(value: Any) -> bool:
    """Whether value is a JAX tracer, or a container or dictionary with one."""
    if isinstance(value, dict):
        return any(map(holds_traced, value.values()))
    if names := array_fields(value):
        return any(holds_traced(getattr(value, name)) for name in names)
    return isinstance(value, sys.modules["jax"].core.Tracer)
