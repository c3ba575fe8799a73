"""A quantized parameter of a model in JAX, as it lies in the tree: codes and scales, and the array that they stand for.

A kernel of flax is (inputs, outputs), with several axes of either for convolutions (height, width, in, out) and heads
(in, heads, features). What is quantized is the matrix (outputs, inputs), as torch's layers store it, so that blocks run along
what a product sums over, the codes are those of `ao_lab.quantize` of the transposed kernel in every scheme, and codes of less
than a byte are packed along the inputs. `Axes` says which axes are which; those before them are a stack of layers (`nn.scan`),
each with scales of its own.

`QuantizedParam` is a pytree of these codes and scales. Layers of flax take it in a parameter's place: linen takes the array
out of what its parameters are boxed in (`flax.core.meta.AxisMetadata`), nnx indexes the value of its variables. Both call
`dequantize` where the layer runs, inside of `jit`, `scan` and `vmap`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.jax.functions import dequantize, fake_quantize, quantize
from reference import Quantized, Scheme
from reference.arrays.bridges import array_container
from reference.arrays.namespace import DTypeLike, dtype_name

#: dtypes of parameters that are quantized.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Axes:
    """Which axes of a parameter a product sums over: the last `outputs` it keeps, over the `inputs` before them it sums.

    Axes before these are a stack of parameters, each quantized for itself. inputs=0: rows that are looked up, as those of an
    embedding, (rows, features): blocks run along the last axis. ValueError for negative or no outputs.
    """

    inputs: int = 1
    outputs: int = 1

    def __post_init__(self) -> None:
        numbers = (self.inputs, self.outputs)
        if any(type(one) is not int for one in numbers) or self.inputs < 0 or self.outputs < 1:
            raise ValueError(
                f"Axes: inputs and outputs are numbers of axes, outputs at least 1, got {self.inputs!r} and "
                f"{self.outputs!r}; a kernel (in, out) has Axes(1, 1), a table (rows, features) Axes(0, 2)"
            )

    @property
    def count(self) -> int:
        """How many axes one parameter has."""
        return self.inputs + self.outputs

    def matrix(self, lengths: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the matrix (outputs, inputs) of one parameter with these lengths."""
        if self.inputs == 0:
            return prod(lengths[:-1]), lengths[-1]
        return prod(lengths[self.inputs :]), prod(lengths[: self.inputs])


#: A kernel (in, out), and an embedding (rows, features).
KERNEL, TABLE = Axes(), Axes(0, 2)


@dataclass(frozen=True)
class ParamStructure:
    """What a `QuantizedParam` is apart from its arrays; see `reference.arrays.bridges.Structure`."""

    lengths: tuple[int, ...]
    inputs: int
    dense_dtype: str

    @classmethod
    def of(cls, param: QuantizedParam) -> ParamStructure:
        """That of an instance."""
        return cls(param.lengths, param.inputs, param.dense_dtype)

    def filled(self, quantized: Any) -> QuantizedParam:
        """An instance with these codes and scales."""
        register_with_flax()
        return QuantizedParam(quantized, self.lengths, self.inputs, self.dense_dtype)

    def text(self) -> str:
        """As JSON."""
        return json.dumps(self.__dict__)

    @classmethod
    def read(cls, text: str) -> ParamStructure:
        """The inverse of `text`."""
        fields = json.loads(text)
        return cls(tuple(fields["lengths"]), fields["inputs"], fields["dense_dtype"])


@array_container("quantized", structure=ParamStructure)
@dataclass(frozen=True, eq=False)
class QuantizedParam:
    """A parameter of a model in JAX that is stored quantized; `dequantize()` gives the array.

    quantized: matrices (*stack, outputs, inputs), packed, `axis` -1. lengths: the shape of one parameter, without the stack.
    inputs: the number of its first axes that a product sums over, or 0 for a table (`Axes`). dense_dtype: of the array.
    """

    quantized: Quantized
    lengths: tuple[int, ...]
    inputs: int
    dense_dtype: str

    @property
    def axes(self) -> Axes:
        """Which axes of one parameter a product sums over."""
        return Axes(self.inputs, len(self.lengths) - self.inputs)

    @property
    def scheme(self) -> Scheme:
        """The scheme of codes and scales."""
        return self.quantized.scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array, the stack included."""
        return (*self.quantized.codes.shape[:-2], *self.lengths)

    @property
    def ndim(self) -> int:
        """Axes of the array."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return jnp.dtype(self.dense_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.quantized))

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The array, in its own dtype or in another of float32, bfloat16 and float16. No gradient flows into the codes."""
        name = self.dense_dtype if dtype is None else dtype_name(dtype, DTYPES, "dtype")
        array: jax.Array = _dense(self, name)
        return array

    def __getitem__(self, index: Any) -> jax.Array:
        """Of the array; nnx reads the whole as [...]."""
        return self.dequantize()[index]

    def __jax_array__(self) -> jax.Array:
        """The array, for functions of JAX that are given the parameter itself."""
        return self.dequantize()

    def __repr__(self) -> str:
        """The scheme, the array's shape and dtype, and bytes: "QuantizedParam(int4_g32, (64, 128) float32, 5120 bytes)"."""
        return f"QuantizedParam({self.scheme.name}, {self.shape} {self.dense_dtype}, {self.nbytes} bytes)"

    # What `flax.core.meta.AxisMetadata` asks for.

    def unbox(self) -> jax.Array:
        """The array: what `Module.param` of linen gives a layer."""
        return self.dequantize()

    def replace_boxed(self, value: Any) -> QuantizedParam:
        """TypeError: codes are not assigned to."""
        raise TypeError(
            f"a parameter in {self.scheme.name} cannot be assigned an array; dequantize_params(params) makes them arrays, "
            f"quantize_params quantizes again"
        )

    def add_axis(self, index: int, params: dict[Any, Any]) -> QuantizedParam:
        """Itself: the stack is read from the codes."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> QuantizedParam:
        """Itself: the stack is read from the codes."""
        return self


def register_with_flax() -> None:
    """Make linen take the array out of a `QuantizedParam`, where flax is imported; again does nothing."""
    meta = sys.modules.get("flax.core.meta")
    if meta is not None and not issubclass(QuantizedParam, meta.AxisMetadata):
        meta.AxisMetadata.register(QuantizedParam)


def stored(x: Any, scheme: Scheme, axes: Axes) -> QuantizedParam:
    """x (*stack, inputs, outputs) quantized; one program for each shape. ValueError where blocks do not divide the matrix."""
    register_with_flax()
    x = jnp.asarray(x)
    lengths = tuple(x.shape[x.ndim - axes.count :])
    return QuantizedParam(_quantized(x, scheme, axes), lengths, axes.inputs, str(x.dtype))


def rounded(x: Any, scheme: Scheme, axes: Axes) -> jax.Array:
    """What `stored` stands for, with the gradients of `fake_quantize`."""
    x = jnp.asarray(x)
    array: jax.Array = _rounded(x, scheme, axes)
    return array


@partial(jax.jit, static_argnums=(1, 2))
def _quantized(x: Any, scheme: Scheme, axes: Axes) -> Any:
    matrices = _matrices(x, axes)
    return _over_stack(lambda w: quantize(w, scheme, packed=True), matrices.ndim - 2)(matrices)


@partial(jax.jit, static_argnums=(1, 2))
def _rounded(x: Any, scheme: Scheme, axes: Axes) -> Any:
    matrices = _matrices(x, axes)
    made = _over_stack(lambda w: fake_quantize(w, scheme), matrices.ndim - 2)(matrices)
    return _array(made, tuple(x.shape[x.ndim - axes.count :]), axes.inputs)


@partial(jax.jit, static_argnums=1)
def _dense(param: QuantizedParam, dtype: str) -> Any:
    values = _over_stack(lambda q: dequantize(q, dtype), len(param.quantized.codes.shape) - 2)(
        param.quantized
    )
    return _array(values, param.lengths, param.inputs)


def _over_stack(function: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    """function of each matrix of a stack with this many axes."""
    for _ in range(depth):
        function = jax.vmap(function)
    return function


def _matrices(x: Any, axes: Axes) -> Any:
    """x (*stack, inputs, outputs) as matrices (*stack, outputs, inputs)."""
    stack, lengths = x.shape[: x.ndim - axes.count], x.shape[x.ndim - axes.count :]
    rows, columns = axes.matrix(lengths)
    return x.reshape(*stack, rows, columns) if axes.inputs == 0 else x.reshape(*stack, columns, rows).mT


def _array(matrices: Any, lengths: tuple[int, ...], inputs: int) -> Any:
    """The inverse of `_matrices`."""
    matrices = matrices if inputs == 0 else matrices.mT
    return matrices.reshape(*matrices.shape[:-2], *lengths)


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a tree is a quantized parameter."""
    return isinstance(leaf, QuantizedParam)


def dequantize_params(params: Any) -> Any:
    """A tree of parameters, or `variables` of linen, with arrays in place of its quantized parameters."""
    return jax.tree.map(lambda p: p.dequantize() if is_quantized(p) else p, params, is_leaf=is_quantized)


__all__ = [
    "KERNEL",
    "TABLE",
    "Axes",
    "QuantizedParam",
    "dequantize_params",
    "is_quantized",
    "rounded",
    "stored",
]
