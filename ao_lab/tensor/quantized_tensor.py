"""`QuantizedTensor`: one tensor subclass for every scheme.

It holds what `reference.quantize` makes of a weight: codes (packed below 8 bits), scale, outer scale, zero point, and beside
them a `Recipe`, static scales of the layer's input and 2:4 metadata if there are any, and where these lie (`Layout`). To
autograd, modules and tracers it is a tensor of the weight's shape and dtype; its operations are one table
(`ao_lab.tensor.op_registry`), and what is not in the table raises and says what is.

The parts stay as they were stored. `transposed` says that the last two axes are to be read the other way round, so `t()`
moves nothing, and packed codes can be transposed. `axis` (negative) is the blocks' axis in the stored orientation.

A weight with metadata (`SparseQuantizedTensor`) is 2:4: `codes` (..., N, K/2) holds the kept two of every four along the
contraction axis, packed below 8 bits along it, and `metadata` uint8 (..., N, ceil(K/8)) their places, in the canonical layout
of `reference.compress`. Scales and zero points are those of the dense scheme: a group of g columns has g/2 stored codes. So

    dense equivalent = codes at their places, the code of zero elsewhere, dequantized

has the bits of quantizing the pruned dense weight (`reference.sparsity.compress`); every product may compute with it.
Elements of 16 bits are stored as they are (schemes bfloat16 and float16): the dense equivalent is the pruned weight itself, NaN
payloads included.

Sources: Mishra et al. (arXiv 2104.08378), section 3.1; storage as in `torch.sparse.to_sparse_semi_structured` before
reordering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

import fast
from ao_lab.config.recipe import SPARSE_KERNELS, Recipe, changed_recipe, named
from ao_lab.gemm.choices import standing
from ao_lab.tensor.metadata import (
    DTYPES,
    LAYOUTS,
    PARTS,
    PRESHUFFLED,
    SPARSE,
    Meta,
    described,
    meta_from,
    recipe_reason,
    stored_shape,
    unsupported_reason,
)
from ao_lab.tensor.metadata import swapped as swapped
from ao_lab.tensor.op_registry import EAGER_FUNCTIONS, NAMED_OPERATIONS, OPERATIONS, TRANSFORMED_FUNCTIONS
from ao_lab.tensor.sparse_codes import dense_codes, dense_recipe, dense_scheme
from ao_lab.tensor.torch_changes import ANSWERS, PENDING, make_changes, refuse_files, refuse_onnx
from ao_lab.tensor.weight_guards import Form, changes_in_place
from fast.dispatch import is_traced, is_transformed
from fast.layers.hadamard import rotated_back
from fast.user_cache import sources_key
from reference import Quantized, Scales, Scheme
from reference.arrays.namespace import and_nearest
from reference.schemes.schemes import scheme_of
from reference.sparsity.compress import is_plain

#: Parts that a tensor lacks.
ABSENT = dict.fromkeys(PARTS)
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class QuantizedTensor(torch.Tensor):
    """A weight in a scheme: quantized values, scales, zero points. Made by `quantized` or `ao_lab.quantize_`.

    torch.load(weights_only=True) reads it once this class was imported (`from ao_lab import QuantizedTensor`).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    outer: torch.Tensor | None  # type: ignore[assignment]  # hides Tensor.outer, the product
    zero: torch.Tensor | None
    input_scale: torch.Tensor | None
    input_zero: torch.Tensor | None
    metadata: torch.Tensor | None
    meta: Meta
    #: What `__tensor_flatten__` answers; None until it is asked.
    _flattened: tuple[list[str], Meta] | None = None
    #: What guards of compiled programs compare (`weight_guards`); None until one does.
    _form: Form | None = None

    @staticmethod
    def __new__(
        cls,
        parts: Mapping[str, torch.Tensor | None] | QuantizedTensor,
        meta: Meta | None = None,
        shape: Sequence[int] = (),
        *,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor of these parts and this (logical) shape, unchecked; `quantized` is the way in.

        In layout "2:4" it is a `SparseQuantizedTensor`.
        Of a QuantizedTensor alone it is a parameter that shares its parts: accelerate calls the class of a parameter so.
        """
        if isinstance(parts, QuantizedTensor):
            return torch.nn.Parameter(parts.detach(), requires_grad)  # type: ignore[return-value]
        if meta is None:
            raise TypeError(
                "a QuantizedTensor is made of parts, their description and a shape; use quantized()"
            )
        codes = parts["codes"]
        if codes is None:
            raise ValueError("a QuantizedTensor needs codes")
        if meta.layout == SPARSE and parts.get("metadata") is None:
            raise ValueError("a QuantizedTensor in layout '2:4' needs codes and metadata")
        kind = SparseQuantizedTensor if meta.layout == SPARSE else cls
        result = wrapper(kind, tuple(shape), meta, codes.device)
        result.__dict__.update(ABSENT, **parts, meta=meta)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        """A part or the description that takes another's place takes what was made of it away."""
        super().__setattr__(name, value)
        if name == "meta" or name in PARTS:
            self._forget()
            changes_in_place(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """In eager inference F.linear is computed at once (`EAGER_FUNCTIONS`); all else goes through the dispatcher.

        Through the dispatcher a linear layer is a transposition and a product, each longer than a small kernel.
        """
        compute = EAGER_FUNCTIONS.get(func)
        if compute is not None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y = compute(*args, **(kwargs or {}))
            if y is not None:
                return y
        if func in TRANSFORMED_FUNCTIONS and is_transformed():
            y = TRANSFORMED_FUNCTIONS[func](*args, **(kwargs or {}))
            if y is not None:
                return y
        with torch._C.DisableTorchFunctionSubclass():
            if torch._C._get_tracing_state() is not None:
                refuse_onnx(_first((*args, *(kwargs or {}).values())))
            if func == SET_DATA and isinstance(args[0], QuantizedTensor):
                return args[0].adopt(args[1])
            if (answer := ANSWERS.get(func)) is not None and isinstance(args[0], QuantizedTensor):
                return answer(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @property
    def recipe(self) -> Recipe:
        """Schemes of the weight and the input, and the kernel."""
        return self.meta.recipe

    @property
    def scheme(self) -> Scheme:
        """How the weight is stored."""
        return self.meta.recipe.weight

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape as stored: before `view(-1)`, and the last two axes swapped where the tensor is transposed."""
        return stored_shape(self.meta, tuple(self.shape))

    @property
    def block_axis(self) -> int:
        """The (negative) axis along which blocks run, of the logical shape."""
        return (
            {-1: -2, -2: -1}.get(self.meta.axis, self.meta.axis) if self.meta.transposed else self.meta.axis
        )

    @property
    def parts(self) -> dict[str, torch.Tensor | None]:
        """The tensors inside by name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def quantized(self) -> Quantized:
        """What is stored, as `reference` has it: in the stored orientation and the plain layout."""
        return LAYOUTS[self.meta.layout].inverse(self.stored)

    @property
    def stored(self) -> Quantized:
        """The parts as they are, in the layout in which they lie. Kept: they are the tensor's own, which change in place."""
        known: Quantized | None = self.__dict__.get("_stored")
        if known is None:
            shape, tiled, packed = self.stored_shape, self.meta.layout == "tiled", self.scheme.format.bits < 8
            parts = self.codes, self.scale, self.outer, self.zero
            known = Quantized(*parts, shape, self.meta.axis % len(shape), self.scheme, packed, tiled)
            self.__dict__["_stored"] = known
        return known

    @property
    def input_scales(self) -> Scales | None:
        """The static scales of the layer's input; None where they are found anew for each input.

        Of an activation with two levels the static one is that over all elements; those of blocks are found for each input.
        """
        if self.input_scale is None:
            return None
        activation = self.recipe.activation
        if activation is not None and activation.outer is not None:
            return Scales(None, self.input_scale)
        return Scales(self.input_scale, None, self.input_zero)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense tensor that this stands for, in `dtype` or its own: the bits of `reference.dequantize`."""
        dense = self._dequantized(dtype or self.dtype)
        dense = dense.transpose(-2, -1) if self.meta.transposed else dense
        return dense if self.meta.flat is None else dense.reshape(self.shape)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """What is stored, dense; where inputs are rotated, rotated back, so that it is the weight of inputs as they are."""
        length = self.recipe.rotation
        if not length:
            return fast.dequantize(self.quantized, dtype)
        return rotated_back(fast.dequantize(self.quantized, torch.float32), length).to(dtype)

    @property
    def without_rotation(self) -> QuantizedTensor:
        """What is stored, as the weight of inputs that are rotated already."""
        return self.remade(self.parts, recipe=changed_recipe(self.recipe, rotation=0))

    @property
    def in_rows(self) -> QuantizedTensor:
        """Itself where its parts lie in rows of the weight ("plain", "2:4"), of which pieces are cut, else a plain copy."""
        return self if self.meta.layout in ("plain", SPARSE) else self.to_layout("plain")

    def to_layout(self, name: str) -> QuantizedTensor:
        """The same tensor with its parts in another layout; ValueError for a layout that there is not, or not for it."""
        if name not in LAYOUTS:
            raise ValueError(
                f"unknown layout {name!r}{and_nearest(name, LAYOUTS)}; there are {', '.join(LAYOUTS)}"
            )
        if name == self.meta.layout:
            return self.remade(self.parts)
        if name == PRESHUFFLED and (reason := unsupported_reason(self)) is not None:
            raise ValueError(f"{self!r} is not {name}: {reason}; keep layout 'plain'")
        return self.rearranged(name)

    def rearranged(self, name: str) -> QuantizedTensor:
        """`to_layout` of another layout that is known to be there for it: its values are not looked at."""
        q = LAYOUTS[name].forward(self.quantized)
        parts = {part: getattr(q, part) for part in ("codes", "scale", "zero")}
        return self.remade({**self.parts, **parts}, layout=name)

    @property
    def plain(self) -> QuantizedTensor:
        """Itself where its parts are as `reference` has them; where it is preshuffled, a copy of which they are."""
        return self.to_layout("plain") if self.meta.layout == PRESHUFFLED else self

    def with_recipe(self, **changes: Any) -> QuantizedTensor:
        """The same codes under a recipe with other fields, for instance kernel="reference"."""
        recipe = replace(self.recipe, **changes)
        stored = self if recipe_reason(recipe) is None else self.plain
        return stored.remade(stored.parts, recipe=recipe)

    def remade(
        self, parts: Mapping[str, torch.Tensor | None], shape: Sequence[int] | None = None, **changes: Any
    ) -> QuantizedTensor:
        """A tensor of other parts, with this one's description but for the changes."""
        meta = replace(self.meta, **changes) if changes else self.meta
        return QuantizedTensor(parts, meta, self.shape if shape is None else shape)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> QuantizedTensor:
        """`function` of every tensor inside."""
        parts = {name: None if part is None else function(part) for name, part in self.parts.items()}
        return self.remade(parts, **changes)

    def adopt(self, other: torch.Tensor) -> None:
        """Another one's parts and description, for `t.data = other`; a dense one's values are quantized by this one's scheme.

        As for `copy_`, but that shape and dtype may be others. TypeError for numbers that are no weight's.
        """
        if not isinstance(other, QuantizedTensor):
            other = self.like(other)
        changes_in_place(self)
        SET_DATA(self, other)
        self._forget()
        self.__dict__.update(other.parts, meta=other.meta)

    def _forget(self) -> None:
        """Drop what is kept of the parts and the description as they were."""
        for name in ("_stored", "_settled", "_flattened", "_form"):
            self.__dict__.pop(name, None)

    def like(self, dense: torch.Tensor) -> QuantizedTensor:
        """A dense tensor of as many axes, stored as this one is: scheme, recipe, orientation, static scales of inputs."""
        if dense.dtype not in DTYPES or dense.dim() != self.dim():
            raise TypeError(
                f"data of {self!r} is a QuantizedTensor, or {self.dim()} axes of floating-point numbers to quantize; got "
                f"{type(dense).__name__} of shape {tuple(dense.shape)}, {dense.dtype}"
            )
        result: Any = self.new_empty(dense.shape, dtype=dense.dtype, device=dense.device)
        result.copy_(dense)
        arranged = self.meta.layout == PRESHUFFLED and unsupported_reason(result) is None
        return result.to_layout(PRESHUFFLED) if arranged else result  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's stubs have an attribute
        """Bytes of the parts, as they are stored."""
        return sum(part.nbytes for part in self.parts.values() if part is not None)

    def _use_count(self) -> int:
        """How many hold this tensor, as `torch.utils.swap_tensors` counts them for `module.to()` and `module.half()`.

        It refuses a tensor that others hold, since a trainable one would get its gradient at the wrong place. A frozen weight
        gets none: whoever holds it (the graph of an output, a view) keeps what it was, so it counts as held once. What asks is
        about to make the tensor another one in place, which compiled programs have to hear.
        """
        changes_in_place(self)
        return super()._use_count() if self.requires_grad else 1  # type: ignore[misc]

    def share_memory_(self) -> QuantizedTensor:
        """The parts in memory that processes share; torch's own would look for memory behind the whole."""
        for part in self.parts.values():
            if part is not None:
                part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether every part is on a GPU, or in memory that processes share."""
        parts: list[Any] = [part for part in self.parts.values() if part is not None]
        return all(part.is_shared() for part in parts)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """TypeError: other libraries would read memory behind the whole, and there is none."""
        raise TypeError(f"{self!r} has no memory that other libraries can read; dequantize() it first")

    def check_shaped(self) -> None:
        """ValueError for a tensor that shows one axis over parts of several."""
        if self.meta.flat is not None:
            raise ValueError(
                f"{self!r} shows one axis of a tensor of shape {self.meta.flat}; view() it as that first"
            )

    def transposed(self) -> QuantizedTensor:
        """The last two axes the other way round, over the same parts: what `transpose(-2, -1)` gives, outside of dispatch."""
        self.check_shaped()
        return QuantizedTensor(self.parts, self.meta.swapped_axes, swapped(tuple(self.shape)))

    def __tensor_flatten__(self) -> tuple[list[str], Meta]:
        """Names of the parts and the description, kept: guards of a compiled program ask twice in every call."""
        if PENDING:
            make_changes(QuantizedTensor)
        if self._flattened is None:
            self._flattened = [name for name, part in self.parts.items() if part is not None], self.meta
        return self._flattened

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: Meta, size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedTensor:
        return QuantizedTensor(inner, meta, size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = OPERATIONS.get(func)
        if function is None and (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return result  # inference mode sends operations that are made of others
        function = NAMED_OPERATIONS.get(func.name()) if function is None else function
        if function is None:
            raise NotImplementedError(
                f"{func} of a QuantizedTensor ({_first(args).scheme.name}): {_instead(func)}"
            )
        return function(func, args, kwargs or {})

    def _stable_hash_for_caching(self) -> str:
        """What compiled programs may depend on, as text that is the same in every process (torch's cache asks for it).

        Operations of a weight are of a program's making: one that other sources made, or other choices of `tune`, is another.
        """
        inner = [
            (name, str(part.dtype), tuple(part.shape), part.stride(), str(part.device))
            for name, part in self.parts.items()
            if part is not None
        ]
        made_by = sources_key("ao_lab", "fast", "reference"), standing(self.shape[-2:], self.device)
        text = repr((described(self.meta), tuple(self.shape), self.requires_grad, inner, made_by))
        return sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:  # type: ignore[override]
        name = "SparseQuantizedTensor" if self.meta.layout == SPARSE else "QuantizedTensor"
        layout = f", {PRESHUFFLED}" if self.meta.layout == PRESHUFFLED else ""
        return f"{name}({self.recipe}, shape={tuple(self.shape)}, {self.dtype}, device={self.device}{layout})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Parts and plain values alone, so that torch.load(weights_only=True) reads it; a preshuffled weight plain."""
        is_parameter, plain = getattr(self, "_is_param", False), self.plain
        # A tensor with attributes is pickled with them; what products keep with the codes is not written.
        parts = {name: part if part is None else signed(part).detach() for name, part in plain.parts.items()}
        state = (parts, described(plain.meta), tuple(self.shape), is_parameter, self.requires_grad)
        # Before torch 2.13 its cache of programs reads this of weights that are traced.
        return rebuilt, (*state, self._stable_hash_for_caching()) if is_traced(self.codes) else state


class SparseQuantizedTensor(QuantizedTensor):
    """A 2:4 weight in a scheme, of which kept values alone are stored.

    Made by `quantized_compressed`, `ao_lab.sparsify_` or `ao_lab.quantize_`.

    torch.load(weights_only=True) reads it once this class was imported (`from ao_lab import SparseQuantizedTensor`).
    """

    metadata: torch.Tensor

    @property
    def quantized(self) -> Quantized:
        """The dense equivalent as `reference.quantize` makes it, in the stored orientation; made anew for each call."""
        q, scheme = self.stored, dense_scheme(self.scheme)
        codes = dense_codes(q.codes, self.metadata, q.zero, scheme, q.shape)
        return replace(q, codes=fast.pack(codes, scheme.format) if q.packed else codes, scheme=scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense tensor that this stands for, in `dtype` or its own: the bits of the pruned weight, quantized."""
        if not is_plain(self.scheme):
            return super().dequantize(dtype)
        elements = self.codes.view(getattr(torch, self.scheme.element))
        dense = fast.decompress(elements, self.metadata).to(dtype or self.dtype)
        dense = dense.transpose(-2, -1) if self.meta.transposed else dense
        return dense if self.meta.flat is None else dense.reshape(self.shape)

    def to_layout(self, name: str) -> QuantizedTensor:
        """Itself as "2:4", the dense equivalent as "plain" or another layout of dense tensors."""
        return self if name == SPARSE else self.to_dense().to_layout(name)

    def to_dense(self) -> QuantizedTensor:  # type: ignore[override]  # of a torch.sparse tensor, with other arguments
        """The dense equivalent as a `QuantizedTensor`, in the same orientation; kernels of 2:4 weights become "auto"."""
        self.check_shaped()
        recipe = dense_recipe(self.recipe)
        recipe = changed_recipe(recipe, kernel="auto") if recipe.kernel in SPARSE_KERNELS else recipe
        parts = {**self.parts, "codes": self.quantized.codes, "metadata": None}
        return self.remade(parts, recipe=recipe, layout="plain")

    def with_recipe(self, **changes: Any) -> QuantizedTensor:
        """The same parts under a recipe with other fields, for instance kernel="sparse_wgmma"."""
        return self.remade(self.parts, recipe=changed_recipe(self.recipe, **changes))

    def adopt(self, other: torch.Tensor) -> None:
        """Another one's parts and description, for `t.data = other`; a dense one that is 2:4 is quantized and compressed.

        TypeError for a quantized one in dense storage, ValueError for a dense one that is not 2:4.
        """
        if isinstance(other, QuantizedTensor) and not isinstance(other, SparseQuantizedTensor):
            raise TypeError(
                f"data of {self!r} is a SparseQuantizedTensor, not {type(other).__name__}; copy_ compresses"
            )
        super().adopt(other)


def quantized(
    x: torch.Tensor, recipe: Recipe | Scheme | str, *, axis: int = -1, input_scales: Scales | None = None
) -> QuantizedTensor:
    """Quantize a torch tensor: x in a scheme (by name or record) or in the scheme of a recipe, with blocks along `axis`.

    Values, scales and zero points are those of `reference.quantize`. input_scales: static scales of the layer's activations.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe(weight=named(recipe) or scheme_of(recipe))
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"quantized takes a torch tensor, got {type(x).__name__}: {x!r:.60}; ao_lab.quantize takes arrays"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"a QuantizedTensor is made of float32, bfloat16, float16 or float64, got {x.dtype}")
    if hasattr(x, "full_tensor"):
        raise TypeError(
            "a DTensor is not quantized: quantize the model first, then parallelize or distribute it"
        )
    q = fast.quantize(x.detach(), recipe.weight, axis=axis, packed=recipe.weight.format.bits < 8)
    return from_quantized(q, recipe, x.dtype, input_scales)


def from_quantized(
    q: Quantized, recipe: Recipe, dtype: torch.dtype, input_scales: Scales | None = None
) -> QuantizedTensor:
    """The tensor of stored parts (packed where codes are below 8 bits, scales plain)."""
    parts = {"codes": q.codes, "scale": q.scale, "outer": q.outer, "zero": q.zero}
    static = Scales(None) if input_scales is None else input_scales
    scale = static.outer if static.scale is None else static.scale
    for name, part in (("input_scale", scale), ("input_zero", static.zero)):
        parts[name] = None if part is None else part.to(q.codes.device)
    meta = Meta(recipe, q.axis - len(q.shape), dtype)
    return QuantizedTensor(parts, meta, q.shape)


def wrapper(
    kind: type[QuantizedTensor], shape: tuple[int, ...], meta: Meta, device: torch.device
) -> QuantizedTensor:
    """A tensor of a class, without its parts and its description."""
    strides = _strides(shape, meta.transposed)
    return torch.Tensor._make_wrapper_subclass(kind, shape, strides=strides, dtype=meta.dtype, device=device)


def rebuilt(
    parts: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    shape: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
    key: str = "",
) -> Any:
    """What `QuantizedTensor.__reduce_ex__` took apart. key: of caches, not read."""
    parts = {name: part if part is None else unsigned(part) for name, part in parts.items()}
    result = QuantizedTensor(parts, meta_from(fields), shape)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


def signed(part: torch.Tensor) -> torch.Tensor:
    """uint16 codes as int16: torch's pickles and its indexing know no uint16, and no part is int16."""
    return part.view(torch.int16) if part.dtype == torch.uint16 else part


def unsigned(part: torch.Tensor) -> torch.Tensor:
    """The inverse of `signed`."""
    return part.view(torch.uint16) if part.dtype == torch.int16 else part


def _strides(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Strides of a dense tensor of this logical shape; one axis over parts of several is read as it is shown."""
    transposed = transposed and len(shape) > 1
    strides: list[int] = [1]
    for length in reversed((swapped(shape) if transposed else shape)[1:]):
        strides.insert(0, strides[0] * length)
    result = tuple(strides) if shape else ()
    return swapped(result) if transposed else result


def _first(args: Any) -> QuantizedTensor:
    """The first QuantizedTensor among arguments, nested lists included."""
    for value in args:
        if isinstance(value, QuantizedTensor):
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(item, QuantizedTensor) for item in value):
            return _first(value)
    raise TypeError("no QuantizedTensor among the arguments")


def _instead(func: Any) -> str:
    """What can be done in place of an operator that is not in the table."""
    if func._schema.is_mutable:
        return (
            "in-place it supports sums, products and copies only, which quantize it again, and not an optimizer's steps, "
            "which would be rounded away: freeze it, and train adapters, its dequantize()d copy, or a model prepared with "
            "QATConfig"
        )
    return (
        "dequantize() it first. It supports matmuls, embedding lookup and arithmetic, and can be sliced along blocks, "
        "viewed, moved and copied, and read by arithmetic; ao_lab.tensor.op_registry.OPERATIONS has it all"
    )


refuse_files(QuantizedTensor)
torch.serialization.add_safe_globals([rebuilt])

__all__ = [
    "QuantizedTensor",
    "SparseQuantizedTensor",
    "from_quantized",
    "quantized",
    "signed",
    "unsigned",
    "wrapper",
]
