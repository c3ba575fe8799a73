"""Arrays of others: torch tensors as NumPy arrays; what JAX and flax know of the classes and functions here.

**Containers.** `@array_container(...)` names the fields of a dataclass that hold arrays (`Quantized`, `Scales`); the others
are static. JAX gets the arrays as leaves of a pytree, and torch tensors in them are converted too. What is static of a
`Quantized` is its `Structure`: its shape follows from its arrays, so that `scan` and `vmap` may take axes off and put axes on.

JAX learns of the classes when `reference` is imported after JAX, and otherwise at the first call of a public function after
JAX is imported. One case is left: a program that imports JAX after it has built a `Quantized` from NumPy arrays, and hands
that to `jax.jit` before it calls anything here again, calls `reference.register_jax()` once. (Importing JAX here for everyone
would make `import reference` slow.) `flax.serialization` learns of the classes then, or when it is imported itself. Its state
has the arrays by name, and "record", the other fields as JSON in uint8: arrays alone, as what maps over a state expects.
Restoring needs a target with the same record, so that codes of one scheme are never read as those of another.

**Calls.** Concrete JAX arrays run compiled: `quantize(jnp_array, ...)` is one XLA program, cached by record and shape.
Operation by operation the same call would dispatch some hundreds of small programs, each compiled when first met. Tracers
pass through untouched, so jit, vmap and grad of the caller see the plain functions; `jax.disable_jit` gives eager steps.

**Explicit axes of a mesh, and rank promotion**, are modes of JAX in which operations raise that the functions here are made
of. Axes are explicit by default in `jax.make_mesh`. There the sharding of an array is part of its type, and gathers, slices
and reshapes raise where JAX cannot say how their result is sharded. So a function runs under `jax.sharding.auto_axes`, where
XLA decides, and its results get a sharding again: of an operand's spec what fits them (`spec_like`). Values do not depend on
it.

**torch tensors** in CPU memory are NumPy arrays: the public functions share the memory and run NumPy's path. One path less to
trust, and a faster one: PyTorch's eager integer operations pass over memory once each. Tensors on other devices, and fake or
traced ones, keep to the torch namespace (`reference.arrays.namespace`). No gradient flows through: see `fast` and
`fake_quantize_vjp`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# dtypes that NumPy has no name for travel as unsigned integers of their width.
CARRIER = {1: "uint8", 2: "int16"}


def bridged(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` on NumPy arrays when an argument is a plain CPU tensor, and give tensors back.

    Concrete JAX arrays run it compiled (`reference.arrays.bridges`). `function.__wrapped__` is the plain function.
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


Class = TypeVar("Class", bound=type[Any])
#: Array fields by registered class, and the classes that JAX does not know yet.
_ARRAYS: dict[type, tuple[str, ...]] = {}
_UNKNOWN_TO_JAX: list[type] = []
_UNKNOWN_TO_FLAX: list[type] = []
#: What makes the static part of an instance and instances of it, by class: see `Structure`.
_STRUCTURES: dict[type, type[Structure]] = {}


class Structure(Protocol):
    """The static part of a container in JAX: hashable, compared by value."""

    @classmethod
    def of(cls, value: Any) -> Structure:
        """That of an instance."""

    def filled(self, *arrays: Any) -> Any:
        """An instance with these arrays, or with whatever JAX puts in their place."""

    def text(self) -> str:
        """For files (`jax.export`)."""

    @classmethod
    def read(cls, text: str) -> Structure:
        """The inverse of `text`, in any process."""


def array_container(*arrays: str, structure: type[Structure] | None = None) -> Callable[[Class], Class]:
    """Decorator that registers a dataclass by the names of its fields that hold an array or None.

    structure: what the other fields are in JAX; a class that has others needs it.
    """

    def register(cls: Class) -> Class:
        _ARRAYS[cls] = arrays
        if structure is not None:
            _STRUCTURES[cls] = structure
        _UNKNOWN_TO_JAX.append(cls)
        _UNKNOWN_TO_FLAX.append(cls)
        register_if_imported()
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

    if _UNKNOWN_TO_FLAX:
        sys.meta_path.insert(0, _Flax())

    while _UNKNOWN_TO_JAX:
        _register_jax(jax, _UNKNOWN_TO_JAX.pop())


def _register_jax(jax: Any, cls: type) -> None:
    """Make a class of `array_container` a pytree, which `jax.export` writes too."""
    names, structure = _ARRAYS[cls], _STRUCTURES.get(cls)
    keys = [jax.tree_util.GetAttrKey(name) for name in names]
    several = attrgetter(*names)
    arrays_of = several if len(names) > 1 else lambda value: (several(value),)

    def flatten(value: Any) -> tuple[tuple[Any, ...], Any]:
        return arrays_of(value), None if structure is None else structure.of(value)

    def flatten_with_keys(value: Any) -> tuple[tuple[Any, ...], Any]:
        arrays, static = flatten(value)
        return tuple(zip(keys, arrays, strict=True)), static

    def unflatten(static: Any, arrays: Any) -> Any:
        return cls(*arrays) if static is None else static.filled(*arrays)

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"ao_lab.{cls.__name__}",
        serialize_auxdata=lambda static: b"" if static is None else static.text().encode(),
        deserialize_auxdata=lambda text: structure.read(bytes(text).decode()) if structure else None,
    )


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
    while _UNKNOWN_TO_FLAX:
        cls = _UNKNOWN_TO_FLAX.pop()
        _register_flax(serialization, cls, _ARRAYS[cls])


class _Flax(MetaPathFinder):
    """Makes the classes known to `flax.serialization` when that is imported, which takes a second and is not done here."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module as others find it, with what is done once it has run."""
        if name != "flax.serialization":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                register_flax_if_imported()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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
        result = jax.eval_shape(function, *plain)
        specs = jax.tree.map(lambda one: spec_like(one.shape, arrays[0], mesh), result)
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


def _register_flax(serialization: Any, cls: type, arrays: tuple[str, ...]) -> None:
    """Make a class of `array_container` known to `flax.serialization`, if it is not."""
    static = tuple(field.name for field in fields(cls) if field.name not in arrays)

    def to_state(value: Any) -> dict[str, Any]:
        parts = {name: getattr(value, name) for name in arrays if getattr(value, name) is not None}
        state = {name: serialization.to_state_dict(part) for name, part in parts.items()}
        return {**state, "record": _encoded(value, static)} if static else state

    def from_state(target: Any, state: dict[str, Any]) -> Any:
        parts = [name for name in arrays if getattr(target, name) is not None]
        wanted = {*parts, *(["record"] if static else [])}
        if static and "record" in state:
            _check_record(cls, _encoded(target, static), np.asarray(state["record"]))
        if set(state) != wanted:
            raise ValueError(
                f"the state of a {cls.__name__} like the target has {', '.join(sorted(wanted))}, got {', '.join(sorted(state))}"
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in parts
        }
        return replace(target, **restored)

    serialization.register_serialization_state(cls, to_state, from_state, override=True)


def _encoded(value: Any, static: tuple[str, ...]) -> Any:
    """The static fields as JSON, in uint8; a scheme by its key."""
    known = {name: getattr(value, name) for name in static}
    text = json.dumps(known, default=lambda one: one.__index__() if hasattr(one, "__index__") else one.key)
    return np.frombuffer(text.encode(), np.uint8)


def _check_record(cls: type, target: Any, state: Any) -> None:
    """ValueError where the state is that of another record."""
    if np.array_equal(target, state):
        return
    want, got = (json.loads(bytes(one.astype(np.uint8))) for one in (target, state))
    wrong = [
        f"{name} {got.get(name)!r} (target: {value!r})"
        for name, value in want.items()
        if got.get(name) != value
    ]
    raise ValueError(
        f"the state is that of another {cls.__name__}: {', '.join(wrong)}; give a target that was quantized in the same way"
    )
