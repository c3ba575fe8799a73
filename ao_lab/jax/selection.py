"""Which parameters of a model in JAX are quantized, how each is read, and why the others stay: the plan, and the report of it.

A tree says the name and the shape of a kernel, not of which layer it is. Which of its axes are outputs follows from its bias,
which has the same; without one from the names that flax gives to attention ("query", "key", "value", "out") and convolutions
("Conv_0"). What is left is taken for a stack of matrices (in, out), as `nn.scan` makes them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.config.base import Config, FqnToConfig, SchemeConfig, config_named, kind_of
from ao_lab.jax.params import DTYPES, KERNEL, TABLE, Axes, is_quantized
from ao_lab.quantization.groups import named_groups, undivided, undivided_layers, with_groups
from ao_lab.transforms.report import LayerLine, ModelReport, folded_names
from reference import Scheme
from reference.quantize.blocks import Blocks

#: Of a parameter and its name: whether it is quantized, or which of its axes are inputs.
Filter = Callable[[Any, str], Any]
KERNELS = ("auto", "dequantize")

ALREADY = "already quantized"
ACCEPTED, REFUSED = "accepted by filter_fn", "refused by filter_fn"
EMBEDDING = "an embedding, left without a filter_fn that selects it"
OTHER = "not named kernel, left without a filter_fn that selects it"
#: What is added or multiplied, not summed over, stacked or not.
VECTORS = ("bias", "scale", "mean", "var")
#: Layers of `MultiHeadDotProductAttention` with kernels (in, heads, features); of "out" it is (heads, features, out).
HEADS = ("query", "key", "value")
#: A number in a name: "layers.3" of nnx, "Block_3" of linen.
NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")


@dataclass(frozen=True)
class Entry:
    """A parameter that was looked at: what it is, how it is read where it is to be quantized (else None), and why."""

    name: str
    kind: str
    value: Any
    axes: Axes | None
    reason: str

    @property
    def matrix(self) -> tuple[int, int]:
        """(outputs, inputs) of one parameter of the stack."""
        assert self.axes is not None
        return self.axes.matrix(tuple(self.value.shape[self.value.ndim - self.axes.count :]))


@dataclass(frozen=True)
class ParamLine(LayerLine):
    """One line of a report: a parameter that was looked at."""

    #: Name of the scheme; "" where it is an array.
    scheme: str
    #: How it is read: "3 x 3 x 64 -> 128".
    read: str
    #: As it is stored now, and as an array.
    bytes: int
    dense_bytes: int
    reason: str

    @property
    def changed(self) -> bool:
        """Whether it is quantized."""
        return bool(self.scheme)

    @property
    def folded_name(self) -> str:
        """Without numbers: "Block_3.Dense_0.kernel" as "Block_*.Dense_*.kernel"."""
        return NUMBER.sub("*", self.name)

    def told(self, width: int) -> list[str]:
        """Its scheme, how it is read, and the reason."""
        return [f"  {self.name:<{width}}  {self.scheme or 'left'} ({self.read}): {self.reason}"]


@dataclass(frozen=True)
class ParamReport(ModelReport[ParamLine]):
    """Every parameter that `quantize_params` or `quantize_` looked at, in the order of the tree or of the modules."""

    @property
    def bytes(self) -> int:
        """Of these parameters, as they are stored now."""
        return sum(one.bytes for one in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Of these parameters as arrays."""
        return sum(one.dense_bytes for one in self.layers)

    def heading(self) -> str:
        """How many are quantized, and the bytes of all."""
        counted = f"{len(self.changed)} of {len(self.layers)} parameters quantized"
        return f"{counted}, {self.bytes} bytes for {self.dense_bytes}"


def configured(config: Any, caller: str) -> Config:
    """The configuration of a name, a scheme or itself, which quantizes weights alone; else TypeError or ValueError."""
    one = config_named(config) if isinstance(config, str) else config
    one = SchemeConfig(scheme=one) if isinstance(one, Scheme) else one
    if isinstance(one, FqnToConfig):
        raise TypeError(
            f"{caller} takes one configuration, not FqnToConfig; call it for each, with a filter_fn: what is quantized stays"
        )
    if not isinstance(one, Config):
        raise TypeError(
            f"{caller} takes a configuration, a scheme or the name of one, got {kind_of(config)}; 'int8_rowwise' and "
            f"Int8WeightOnlyConfig() are examples"
        )
    _check_weights_alone(one, caller)
    return one


def _check_weights_alone(config: Config, caller: str) -> None:
    """ValueError for what a tree of weights cannot say."""
    kind = type(config).__name__
    if getattr(config, "step", None) is not None:
        raise ValueError(
            f"{caller}: {kind} has steps, for torch; in JAX fake_quantize_params trains, then quantize_params stores"
        )
    recipe = config.recipe()
    if recipe.activation is not None:
        raise ValueError(
            f"{caller}: {kind} quantizes inputs too ({recipe.activation.name}), which parameters do not hold; take one "
            f"of weights (SchemeConfig(scheme={recipe.weight.name!r})), or DotGeneral for layers that multiply both"
        )
    if recipe.kernel not in KERNELS or config.sparsity is not None or config.axis not in (None, -1):
        raise ValueError(
            f"{caller}: {config!r} names a kernel, an axis or 2:4 storage of torch's layers; leave these out"
        )


def named_parameters(params: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves of a tree by their names ("Dense_0.kernel"), quantized ones as one, and the tree's structure."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    return [(_named(path), leaf) for path, leaf in leaves], tree


def _named(path: Sequence[Any]) -> str:
    """The name of a path; without what linen calls the inside of a box (`nn.Partitioned`)."""
    keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    boxed = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value"
    return ".".join(keys[:-1] if boxed else keys)


def entries_of(named: Sequence[tuple[str, Any]], filter_fn: Filter | None) -> list[Entry]:
    """What is to be done with each parameter of a tree that has at least two axes; others are left and not listed."""
    check_filter(filter_fn)
    shapes = {name: tuple(jnp.shape(leaf)) for name, leaf in named}
    made = []
    for name, leaf in named:
        if is_quantized(leaf):
            made.append(Entry(name, "kernel", leaf, None, ALREADY))
        elif len(shapes[name]) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating):
            select = _selected if filter_fn is not None else _default
            made += select(name, leaf, shapes, filter_fn)
    return made


def _default(name: str, leaf: Any, shapes: Mapping[str, tuple[int, ...]], _: Any) -> list[Entry]:
    """Without a filter: kernels; vectors that are stacked are not listed."""
    kind = name.rpartition(".")[2]
    if kind == "kernel":
        return [Entry(name, kind, leaf, guessed_axes(name, shapes), "a kernel")]
    return (
        []
        if kind in VECTORS
        else [Entry(name, kind, leaf, None, EMBEDDING if kind == "embedding" else OTHER)]
    )


def _selected(name: str, leaf: Any, shapes: Mapping[str, tuple[int, ...]], filter_fn: Any) -> list[Entry]:
    """With a filter: what it selects, read as it says."""
    with noting_types(filter_fn, "filter_fn(array, name)"):
        wanted = filter_fn(leaf, name)
    kind = name.rpartition(".")[2]
    if not wanted:
        return [] if kind in VECTORS else [Entry(name, kind, leaf, None, REFUSED)]
    axes = wanted if isinstance(wanted, Axes) else guessed_axes(name, shapes)
    if axes.count > len(shapes[name]):
        raise ValueError(f"filter_fn: {axes} are {axes.count} axes, {name} has shape {shapes[name]}")
    return [Entry(name, kind, leaf, axes, ACCEPTED)]


def check_filter(filter_fn: Any) -> None:
    """TypeError for a filter that cannot be called."""
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn is a function that selects by name, got {filter_fn!r:.60}")


@contextmanager
def noting_types(filter_fn: Any, call: str) -> Iterator[None]:
    """A TypeError of a filter says how filters are called."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"filter_fn is called as {call}; this one is {filter_fn!r:.60}")
        raise


def guessed_axes(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Axes:
    """Which axes of a parameter are inputs, by its name, its bias and its neighbours."""
    layer, _, leaf = name.rpartition(".")
    above, _, own = layer.rpartition(".")
    shape, bias = shapes[name], shapes.get(f"{layer}.bias")
    if leaf == "embedding":
        return TABLE
    if bias is not None and (axes := _axes_by_bias(shape, bias, own)) is not None:
        return axes
    prefix = f"{above}." if above else ""
    if own in HEADS and _joins(shape, shapes.get(f"{prefix}out.kernel")):
        return Axes(1, 2)
    if own == "out" and _joins(shapes.get(f"{prefix}query.kernel"), shape):
        return Axes(2, 1)
    is_convolution = own.casefold().startswith("conv") and len(shape) > 2
    return Axes(len(shape) - 1, 1) if is_convolution else KERNEL


def _axes_by_bias(shape: tuple[int, ...], bias: tuple[int, ...], layer: str) -> Axes | None:
    """By a bias (*stack, *outputs): of several ways one output axis, of attention's heads two; None where it fits none."""
    fits = [
        Axes(len(shape) - len(bias), outputs)
        for outputs in range(1, len(bias) + 1)
        if len(bias) < len(shape) and bias == shape[: len(bias) - outputs] + shape[len(shape) - outputs :]
    ]
    return next(iter(reversed(fits) if layer in HEADS else fits), None)


def _joins(heads: tuple[int, ...] | None, joined: tuple[int, ...] | None) -> bool:
    """Whether kernels (in, heads, features) and (heads, features, out) are those of one attention."""
    if heads is None or joined is None or min(len(heads), len(joined)) < 3:
        return False
    return heads[-2:] == joined[-3:-1]


def checked(entries: Sequence[Entry], config: Config, caller: str) -> list[Entry]:
    """Entries, those that cannot be quantized with the reason; ValueError where none can, a UserWarning where most cannot."""
    known = [_checked(one, config) for one in entries]
    meant = [(given, one) for given, one in zip(entries, known, strict=True) if given.axes is not None]
    if not any(one.axes for one in known):
        raise ValueError(f"{caller}: {_nothing(known, [one for _, one in meant])}")
    layers = {
        one.name: (() if one.axes is None else one.matrix, "" if one.axes else one.reason) for _, one in meant
    }
    sizes, told = undivided_layers(layers)
    if told and 2 * sum(bool(reason) for _, reason in layers.values()) > len(layers):
        way = f"{caller}: {told}; {named_groups(sizes, config)} quantizes all of them"
        warnings.warn(way, UserWarning, stacklevel=3)
    return known


def _checked(entry: Entry, config: Config) -> Entry:
    """An entry that is quantized, or with the reason why it cannot be."""
    if entry.axes is None:
        return entry
    if str(entry.value.dtype) not in DTYPES:
        reason = f"{entry.value.dtype} is none of {', '.join(DTYPES)}; cast it"
        return replace(entry, axes=None, reason=reason)
    try:
        Blocks.of(entry.matrix, config.recipe().weight.scale, -1)
    except ValueError as error:
        return replace(entry, axes=None, reason=with_groups(str(error), config))
    return entry


def _nothing(entries: Sequence[Entry], meant: Sequence[Entry]) -> str:
    """Why nothing would be quantized."""
    if not entries:
        return "the tree has no floating-point parameter with two axes or more"
    if told := undivided([one.reason for one in meant]) if meant else "":
        return told
    others = [one for one in entries if one.reason not in (ALREADY, REFUSED)]
    shown = folded_names({one.name: one.reason for one in meant or others or entries})
    return f"no parameter can be quantized: {'; '.join(shown[:4])}{'; ...' * (len(shown) > 4)}"


def lined(entry: Entry, now: Any) -> ParamLine:
    """The line of an entry; now: the parameter as it is stored."""
    stored, value = is_quantized(now), entry.value
    dense = prod(value.shape) * jnp.dtype(value.dtype).itemsize
    name = now.scheme.name if stored else ""
    size = now.nbytes if stored else dense
    axes = now.axes if stored else entry.axes
    shape = tuple(value.shape)
    return ParamLine(entry.name, entry.kind, shape, name, read_as(shape, axes), size, dense, entry.reason)


def read_as(shape: tuple[int, ...], axes: Axes | None) -> str:
    """How a parameter is read: "3 x 3 x 64 -> 128", "4 of 64 -> 64" of a stack, "1000 rows of 64"; an array's shape."""
    if axes is None:
        return " x ".join(map(str, shape))
    stack, own = shape[: len(shape) - axes.count], shape[len(shape) - axes.count :]
    of = f"{' x '.join(map(str, stack))} of " if stack else ""
    if axes.inputs == 0:
        return f"{of}{prod(own[:-1])} rows of {own[-1]}"
    return f"{of}{' x '.join(map(str, own[: axes.inputs]))} -> {' x '.join(map(str, own[axes.inputs :]))}"


__all__ = [
    "ACCEPTED", "ALREADY", "REFUSED", "Entry", "Filter", "ParamLine", "ParamReport", "check_filter", "checked", "configured",
    "entries_of", "guessed_axes", "lined", "named_parameters", "noting_types",
]  # fmt: skip
