"""One set of rules, three array libraries: the small shim between them.

`namespace_of(x)` looks at the input and returns the namespace of its library: NumPy, JAX or torch. Neither JAX nor torch is
imported here before an array of theirs arrives. Rules are written in int32 (`&`, `|`, `>>`, comparisons and `where` mean the
same in all three); what differs is listed below and nowhere else.

Why int32: JAX without x64 has no 64-bit integers, and torch on CPU lacks shifts and comparisons of uint32.
`ieee` says whether float32 arithmetic of the library is correctly rounded with subnormals. It is for NumPy and torch; XLA
flushes subnormals, turns division into a reciprocal multiplication and contracts a*b+c (see `reference.arrays.softfloat`).

Arrays whose values are not all that counts are refused (`check_plain`), since the functions here would drop the rest. A masked
array has values under its mask that its own functions leave out: an amax would count them. np.matrix reshapes and
multiplies by rules of its own. Sparse and nested tensors of torch have no strided memory. Other subclasses of NumPy's array, as
np.memmap and np.recarray, are read as arrays; results carry no label.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Array = Any  # a NumPy array, a JAX array or tracer, or a torch tensor

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
LANES = 16


class NumpyNamespace:
    """NumPy; also the base that states the operations."""

    name = "numpy"
    ieee = True
    xp: Any = np

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype)

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)

    def bitcast(self, x: Array, name: str) -> Array:
        """Reinterpret; both types have one width."""
        return np.ascontiguousarray(x).reshape(x.shape).view(self.dtype(name))

    def astype(self, x: Array, name: str) -> Array:
        """Convert; integers wrap, floats round to nearest even."""
        with np.errstate(all="ignore"):
            return x.astype(self.dtype(name))

    def constant(self, values: Any, like: Array) -> Array:
        """A small table as an array on the device of `like`."""
        return self.xp.asarray(values)

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        """Two Python integers select in int32: NumPy and torch would make int64."""
        chosen = self.xp.where(condition, a, b)
        return self.astype(chosen, "int32") if isinstance(a, int) and isinstance(b, int) else chosen

    def minimum(self, a: Array, b: Any) -> Array:
        return self.xp.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.xp.maximum(a, b)

    def take(self, table: Array, index: Array) -> Array:
        return table[index]

    def reduce_max(self, x: Array, axis: int) -> Array:
        return self.xp.max(x, axis=axis, keepdims=True)

    def reduce_min(self, x: Array, axis: int) -> Array:
        return self.xp.min(x, axis=axis, keepdims=True)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        return self.xp.concatenate(parts, axis=axis)

    def broadcast_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.xp.broadcast_to(x, shape)

    def moveaxis(self, x: Array, source: int, target: int) -> Array:
        return self.xp.moveaxis(x, source, target)

    def stack(self, parts: list[Array], axis: int) -> Array:
        return self.xp.stack(parts, axis=axis)

    def combine_pairs(self, values: Array, combine: Callable[[Array, Array], Array]) -> Array:
        """Adjacent pairs of 2**k values combined until one is left, shape (1,)."""
        while len(values) > 1:
            values = combine(values[0::2], values[1::2])
        return values

    def full(self, shape: tuple[int, ...], value: float, name: str, like: Array) -> Array:
        return self.xp.full(shape, value, dtype=self.dtype(name))

    def arange(self, stop: int, like: Array) -> Array:
        return self.xp.arange(stop, dtype=self.dtype("int32"))

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)


class JaxNamespace(NumpyNamespace):
    """JAX, eager or traced."""

    name = "jax"
    ieee = False

    def __init__(self) -> None:
        import jax

        self.jax = jax
        self.xp = jax.numpy

    def dtype(self, name: str) -> Any:
        return self.xp.dtype(name)

    def bitcast(self, x: Array, name: str) -> Array:
        return self.jax.lax.bitcast_convert_type(x, self.dtype(name))

    def astype(self, x: Array, name: str) -> Array:
        return x.astype(self.dtype(name))

    def take(self, table: Array, index: Array) -> Array:
        return self.xp.take(table, index, axis=0, mode="clip")

    def reduce_max(self, x: Array, axis: int) -> Array:
        return self._reduce(self.xp.max, x, axis)

    def reduce_min(self, x: Array, axis: int) -> Array:
        return self._reduce(self.xp.min, x, axis)

    def _reduce(self, reduce: Any, x: Array, axis: int) -> Array:
        """XLA on CPU reduces a short last axis without vector instructions. Over rows of 16 first, separated by a barrier
        (else the two reductions are fused back into one), it runs five times as fast."""
        length = x.shape[axis]
        if axis == -1 and length > LANES and length % LANES == 0:
            lanes = reduce(x.reshape((*x.shape[:-1], length // LANES, LANES)), axis=-2)
            x = self.jax.lax.optimization_barrier(lanes)
        return reduce(x, axis=axis, keepdims=True)

    def combine_pairs(self, values: Array, combine: Callable[[Array, Array], Array]) -> Array:
        """One loop over an array of constant length: k copies of `combine` would take k times as long to compile."""

        def level(_: int, values: Array) -> Array:
            pairs = values.reshape((-1, 2))
            combined = combine(pairs[:, 0], pairs[:, 1])
            return self.xp.concatenate([combined, combined])

        if len(values) == 1:
            return values
        return self.jax.lax.fori_loop(0, len(values).bit_length() - 1, level, values)[:1]


class TorchNamespace(NumpyNamespace):
    """torch tensors on any device, eager or compiled."""

    name = "torch"

    def __init__(self) -> None:
        self.xp = sys.modules["torch"]
        # By address, shape and dtype of the array, which is referenced too, and device.
        self.tables: dict[Any, tuple[Any, Array]] = {}

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def dtype(self, name: str) -> Any:
        return getattr(self.xp, name)

    def bitcast(self, x: Array, name: str) -> Array:
        return x.view(self.dtype(name))

    def astype(self, x: Array, name: str) -> Array:
        return x.to(self.dtype(name))

    def constant(self, values: Any, like: Array) -> Array:
        # Tables are cached on their device: a copy to it cannot be part of a CUDA graph.
        cacheable = isinstance(values, np.ndarray) and not values.flags.writeable and self._is_plain(like)
        key = (values.ctypes.data, values.shape, values.dtype.str, like.device) if cacheable else None
        if key in self.tables:
            return self.tables[key][1]
        # np.array copies: torch refuses to share read-only memory.
        table = self.xp.from_numpy(np.array(values)).to(like.device)
        if key is not None and self._is_plain(table) and not table.is_inference():
            # The array is referenced too, so that its address is not reused.
            self.tables[key] = (values, table)
        return table

    def _is_plain(self, x: Array) -> bool:
        """Whether x is an ordinary tensor, not a placeholder of torch.compile or functorch."""
        if type(x) is not self.xp.Tensor or self.xp.compiler.is_compiling():
            return False
        functional = self.xp._is_functional_tensor(x)
        return not (functional or self.xp._C._functorch.is_functorch_wrapped_tensor(x))

    def minimum(self, a: Array, b: Any) -> Array:
        return self.xp.minimum(a, b) if isinstance(b, self.xp.Tensor) else self.xp.clamp(a, max=b)

    def maximum(self, a: Array, b: Any) -> Array:
        return self.xp.maximum(a, b) if isinstance(b, self.xp.Tensor) else self.xp.clamp(a, min=b)

    def take(self, table: Array, index: Array) -> Array:
        return table[index.to(self.xp.int32)]

    def reduce_max(self, x: Array, axis: int) -> Array:
        return self.xp.amax(x, dim=axis, keepdim=True)

    def reduce_min(self, x: Array, axis: int) -> Array:
        return self.xp.amin(x, dim=axis, keepdim=True)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        return self.xp.cat(parts, dim=axis)

    def stack(self, parts: list[Array], axis: int) -> Array:
        return self.xp.stack(parts, dim=axis)

    def full(self, shape: tuple[int, ...], value: float, name: str, like: Array) -> Array:
        return self.xp.full(shape, value, dtype=self.dtype(name), device=like.device)

    def arange(self, stop: int, like: Array) -> Array:
        return self.xp.arange(stop, dtype=self.xp.int32, device=like.device)


Namespace = NumpyNamespace
_NUMPY = NumpyNamespace()
_OTHERS: dict[str, Namespace] = {}


def namespace_of(x: Array) -> Namespace:
    """The namespace of the library that `x` belongs to; anything unknown counts as NumPy's.

    TypeError for masked arrays and others that mean more than their values (`check_plain`).
    """
    if type(x) is np.ndarray:
        return _NUMPY
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return _other("torch", TorchNamespace)
    if jax is not None and isinstance(x, jax.Array):
        return _other("jax", JaxNamespace)
    check_plain(x)
    return _NUMPY


def _other(name: str, make: type[Namespace]) -> Namespace:
    if name not in _OTHERS:
        _OTHERS[name] = make()
    return _OTHERS[name]


def as_array(x: Any) -> Array:
    """Python numbers and lists of them become NumPy arrays; arrays pass through (also read-only and 0-d ones, subclasses as
    np.ndarray).

    TypeError for anything else, and for what `check_plain` refuses.
    """
    check_plain(x)
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if hasattr(x, "dtype") and hasattr(x, "reshape"):
        return x
    array = np.asarray(x)
    if array.dtype.kind in "OSU":
        raise TypeError(f"an array of NumPy, JAX or torch was expected, got {type(x).__name__}: {x!r:.60}")
    return array


def float_input(x: Any, what: str) -> tuple[Namespace, Array, str]:
    """(namespace, array, dtype name) of a float array; TypeError for integers, complex numbers and narrower floats."""
    x = as_array(x)
    ns = namespace_of(x)
    name = ns.dtype_name(x)
    if name not in FLOAT_DTYPES:
        raise TypeError(
            f"{what} takes float32, bfloat16, float16 or float64, got {name} of shape {ns.shape(x)}; "
            f"convert it first, for example to float32"
        )
    return ns, x, name


def check_companion(ns: Namespace, given: Any, name: str, shape: tuple[int, ...], what: str) -> Array:
    """`given`, an array that accompanies x; ValueError unless it has x's library and dtype, and this shape."""
    same = hasattr(given, "dtype") and namespace_of(given) is ns
    if not same or (ns.dtype_name(given), ns.shape(given)) != (name, shape):
        kind = ns.dtype_name(given) if same else type(given).__name__
        raise ValueError(
            f"{what} is {name} of shape {shape} in x's library, got {kind} of shape {tuple(getattr(given, 'shape', ()))}"
        )
    return given


def code_input(codes: Any, what: str) -> tuple[Namespace, Array]:
    """(namespace, array) of unsigned codes; TypeError for anything but uint8 and uint16."""
    codes = as_array(codes)
    ns = namespace_of(codes)
    name = ns.dtype_name(codes)
    if name not in ("uint8", "uint16"):
        raise TypeError(
            f"{what} takes codes as uint8 or uint16, got {name} of shape {ns.shape(codes)}; view or cast them"
        )
    return ns, codes


def int32_of(ns: Namespace, codes: Array) -> Array:
    """Codes as int32 (torch cannot compute with uint16, so it goes through int16's bits)."""
    if ns.name == "torch" and ns.dtype_name(codes) == "uint16":
        return ns.astype(ns.bitcast(codes, "int16"), "int32") & 0xFFFF
    return ns.astype(codes, "int32")


def codes_of(ns: Namespace, values: Array, bits: int) -> Array:
    """int32 codes as uint8, or uint16 above 8 bits."""
    if bits <= 8:
        return ns.astype(values, "uint8")
    if ns.name == "torch":
        return ns.bitcast(ns.astype(values, "int16"), "uint16")
    return ns.astype(values, "uint16")


def check_plain(x: Any) -> None:
    """TypeError that names the way out for a masked array, np.matrix and a tensor that is not dense, also in a list of
    arrays.
    """
    if type(x) is np.ndarray:
        return
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "a masked array was given, whose mask would be dropped and whose hidden values would count; "
            "use x.filled(value), x.compressed(), or np.ma.getdata(x) where the mask does not matter"
        )
    if isinstance(x, np.matrix):
        raise TypeError("np.matrix was given, whose own rules of shapes would be dropped; use np.asarray(x)")
    if isinstance(x, (list, tuple)):
        for item in x:
            check_plain(item)
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        kind = tensor_kind(torch, x)
        if kind:
            raise TypeError(
                f"a dense tensor was expected, got a {kind} tensor; {WAYS.get(kind, 'to_dense() makes it dense')}"
            )


#: What makes a dense tensor, by `tensor_kind`.
WAYS = {
    "masked": "its mask would be dropped: to_tensor(value) fills what is masked",
    "nested": "use one call for each of its parts, or torch.nested.to_padded_tensor",
}


def tensor_kind(torch: Any, x: Any) -> str:
    """ "masked", "nested" or the name of a sparse layout; "" for a dense tensor."""
    if torch.compiler.is_compiling():
        return ""
    if type(x) is not torch.Tensor and isinstance(x, torch.masked.MaskedTensor):
        return "masked"
    if x.is_nested:
        return "nested"
    return "" if x.layout is torch.strided else str(x.layout).removeprefix("torch.")


# Arguments that are names: of a record, of a choice, of a dtype; errors say what was given, the rule, and the way out.

Record = TypeVar("Record")
#: How many names a message gives.
NAMED = 3
#: Of how many it gives all where no command lists them.
LONGEST_LIST = 20
#: Of which records `ao-lab formats`, `ao-lab schemes` and `ao-lab configs` list the names.
LISTED = ("format", "scheme", "config")
#: Of which records people make their own, and what is said of a name that is not known.
OWN = ("format", "scheme")
REGISTER = "; one of your own is registered first: ao_lab.register(record), or ao-lab --import FILE.py"


#: What a name is that is looked for among other records, by what is looked for; modules of records put it here.
HINTS: dict[str, Callable[[str], str]] = {}


def lookup(name: object, table: Mapping[str, Record], what: str) -> Record:
    """`table[name]`, or ValueError with the nearest names, or where all are listed (TypeError if `name` is no string)."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is given by name or as a record, got {type(name).__name__}: {name!r}")
    if name not in table:
        among = HINTS.get(what.rpartition(" ")[2])
        hint = among(name) if among is not None else ""
        raise ValueError(f"unknown {what} {name!r}; {hint or _nearest(name, table, what)}")
    return table[name]


def choice(value: object, allowed: tuple[str, ...], what: str) -> str:
    """`value` if it is one of `allowed`, else ValueError that lists them, with the nearest where one is like it."""
    if value not in allowed:
        raise ValueError(f"{what} is one of {', '.join(allowed)}; got {value!r}{and_nearest(value, allowed)}")
    return str(value)


def nearest_names(given: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The `count` known names most like `given`, in upper or lower case; [] where none is, or where it is no string.

    cutoff: how alike they have to be, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    if not isinstance(given, str):
        return []
    lower = {str(name).lower(): str(name) for name in known}
    return [lower[name] for name in difflib.get_close_matches(given.lower(), lower, n=count, cutoff=cutoff)]


def and_nearest(given: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """What a message that refuses a name goes on with: "; the nearest is ..." (`nearest_names`), "" where none is near."""
    return told_nearest(nearest_names(given, known, count, cutoff))


def told_nearest(names: Sequence[str]) -> str:
    """The same of names that were found to be near."""
    return f"; the nearest {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else ""


def spelled_out(name: str) -> str:
    """A name in lower case as records and configurations have it: "fp4" is short for "float4"."""
    return re.sub("^fp", "float", name.lower())


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for keyword arguments that `what` lacks, with the nearest names and all that it has."""
    names = dict.fromkeys(known)
    for name in given:
        if name not in names:
            raise TypeError(
                f"{what} has no argument {name!r}{and_nearest(name, names)}; it takes {', '.join(names)}"
            )


#: Letters of a name that a longer one is told to begin with: mxfp4 of mxfp4_e2m1.
SHORTEST = 3


def _nearest(name: str, table: Mapping[str, object], what: str) -> str:
    """A few names like this one, those that it begins with and those that hold it first; else the first few, and what lists
    all.

    Of those that hold it the ones that begin with it come first, in the table's order, which is that of use.
    """
    words = (name.lower(), spelled_out(name))
    begun = [
        known for known in table if len(known) >= SHORTEST and name.lower().startswith(f"{known.lower()}_")
    ]
    inside = [known for known in table if name and any(word in known.lower() for word in words)]
    own = what.rpartition(" ")[2] in OWN
    similar = difflib.get_close_matches(name, table, n=NAMED, cutoff=0.6 if own else 0.4)
    close = list(
        dict.fromkeys([*begun, *sorted(inside, key=lambda one: not one.lower().startswith(words)), *similar])
    )[:NAMED]
    return (told_nearest(close).removeprefix("; ") or _known(table, what)) + REGISTER * own


def _known(table: Mapping[str, object], what: str) -> str:
    """All names where they are few; else the first few, and what lists all."""
    known = sorted(table)
    if len(known) <= (NAMED if what in LISTED else LONGEST_LIST):
        return f"known are {', '.join(known)}"
    some = f"known are {', '.join(known[:NAMED])} and {len(known) - NAMED} more"
    return f"{some}; `ao-lab {what}s` lists them" if what in LISTED else some


#: How a dtype may be given: its name ("float16", "f2"), np.dtype, a scalar type (np.float16, ml_dtypes.bfloat16, jnp.float16)
#: or a torch.dtype.
DTypeLike = Any


def dtype_name(dtype: DTypeLike, allowed: tuple[str, ...], what: str) -> str:
    """The name of a dtype that is one of `allowed`; ValueError that lists them for anything else."""
    if type(dtype) is str and dtype in allowed:
        return dtype
    name = spelled(dtype)
    if name not in allowed:
        raise ValueError(
            f"{what} is one of {', '.join(allowed)}, as a name, np.dtype, scalar type or torch.dtype; got {dtype!r}"
            f"{and_nearest(dtype, allowed)}"
        )
    return name


def spelled(dtype: DTypeLike) -> str:
    """The name of a dtype in any spelling; "" for what is none, for another byte order and for None, NumPy's float64."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
        if dtype == "bfloat16":
            return "bfloat16"
    # Arrays have a dtype too, and are none.
    elif not isinstance(dtype, (np.dtype, type)) and (not hasattr(dtype, "dtype") or hasattr(dtype, "shape")):
        return ""
    try:
        result = np.dtype(dtype)
    except TypeError:
        return ""
    return result.name if result.isnative else ""
