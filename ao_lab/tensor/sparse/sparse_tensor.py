"""`SparseQuantizedTensor`: a `QuantizedTensor` whose weight is 2:4, stored as the codes of its kept elements.

Its parts are those of the dense tensor, but `codes` (..., N, K/2) holds the kept two of every four along the contraction axis,
packed below 8 bits along that axis, and `metadata` uint8 (..., N, ceil(K/8)) their places, in the canonical layout of
`reference.compress`. Scales and zero points are those of the dense scheme: a group of g columns has g/2 stored codes. So

    dense equivalent = codes at their places, the code of zero elsewhere, dequantized

has the bits of quantizing the pruned dense weight (`reference.sparsity.stored_codes`); every product may compute with it.
Groups lie along the last stored axis always; `meta.axis` -1 or -2 says which way round the tensor is read, and `t()` moves
nothing.

Elements of 16 bits are stored as they are (schemes bfloat16 and float16): the dense equivalent is the pruned weight itself, NaN
payloads included.

To modules, files and `explain` it is a `QuantizedTensor`. Its operations are a table of their own in front of the common one
(`ao_lab.tensor.sparse.registry`); rows may be cut anywhere, columns where bytes of metadata and codes, and blocks, stay whole.

Sources: Mishra et al. (arXiv 2104.08378), section 3.1; storage as in `torch.sparse.to_sparse_semi_structured` before
reordering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import fast
from ao_lab.config.recipe import changed_recipe
from ao_lab.gemm import cusparselt as cusparselt  # enters its product
from ao_lab.tensor.metadata import PARTS, Meta, described, swapped
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.sparse.compressed_codes import dense_codes
from ao_lab.tensor.sparse.metadata import (
    LAYOUT,
    SPARSE_PARTS,
    any_kernel,
    dense_recipe,
    dense_scheme,
    signed,
    sparse_meta_from,
    swapped_orientation,
    unsigned,
)
from ao_lab.tensor.sparse.registry import SPARSE_OPERATIONS
from reference import Quantized
from reference.quantize.quantize import unpacked
from reference.sparsity.stored_codes import is_plain


class SparseQuantizedTensor(QuantizedTensor):
    """A 2:4 weight in a scheme; see the module text. Made by `quantized_compressed`, `ao_lab.sparsify_` or `ao_lab.quantize_`.

    torch.load(weights_only=True) reads it once this class was imported (`from ao_lab import SparseQuantizedTensor`).
    """

    metadata: torch.Tensor
    _part_names = SPARSE_PARTS

    @staticmethod
    def __new__(
        cls,
        parts: Mapping[str, torch.Tensor | None] | QuantizedTensor,
        meta: Meta | None = None,
        shape: Sequence[int] = (),
        *,
        requires_grad: bool = False,
    ) -> SparseQuantizedTensor:
        """A tensor of these parts and this (logical) shape, unchecked; `quantized_compressed` is the way in.

        Of a SparseQuantizedTensor alone it is a parameter that shares its parts, as for `QuantizedTensor`.
        """
        if isinstance(parts, QuantizedTensor):
            return torch.nn.Parameter(parts.detach(), requires_grad)  # type: ignore[return-value]
        if meta is None:
            raise TypeError(
                "a SparseQuantizedTensor is made of parts, their description and a shape; use quantized_compressed()"
            )
        codes, metadata = parts["codes"], parts["metadata"]
        if codes is None or metadata is None:
            raise ValueError("a SparseQuantizedTensor needs codes and metadata")
        shape = tuple(shape)
        strides = torch.empty(_oriented(shape, meta), device="meta").stride()
        result: SparseQuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=_oriented(strides, meta), dtype=meta.dtype, device=codes.device
        )
        result.__dict__.update({name: parts.get(name) for name in SPARSE_PARTS}, meta=meta)
        return result

    @property
    def parts(self) -> dict[str, torch.Tensor | None]:
        """The tensors inside by name."""
        return {name: getattr(self, name) for name in SPARSE_PARTS}

    @property
    def turned(self) -> bool:
        """Whether the last two axes are read the other way round than they are stored."""
        return self.meta.axis != -1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The dense shape in the stored orientation (..., N, K): groups of four along the last axis."""
        shape = tuple(self.shape) if self.meta.flat is None else self.meta.flat
        return swapped(shape) if self.turned else shape

    @property
    def quantized(self) -> Quantized:
        """The dense equivalent as `reference.quantize` makes it, in the logical orientation; made anew for each call."""
        q = self.dense_stored()
        return _turned(q) if self.turned else q

    def dense_stored(self) -> Quantized:
        """The dense equivalent in the stored orientation, its codes packed below 8 bits."""
        shape, scheme = self.stored_shape, dense_scheme(self.scheme)
        codes = dense_codes(self.codes, self.metadata, self.zero, scheme, shape)
        packed = scheme.format.bits < 8
        codes = fast.pack(codes, scheme.format) if packed else codes
        return Quantized(codes, self.scale, self.outer, self.zero, shape, len(shape) - 1, scheme, packed)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense tensor that this stands for, in `dtype` or its own: the bits of the pruned weight, quantized."""
        dtype = dtype or self.dtype
        if is_plain(self.scheme):
            elements = self.codes.view(getattr(torch, self.scheme.element))
            dense = fast.decompress(elements, self.metadata).to(dtype)
        else:
            dense = fast.dequantize(self.dense_stored(), dtype)
        dense = dense.transpose(-2, -1) if self.turned else dense
        return dense if self.meta.flat is None else dense.reshape(self.shape)

    def to_layout(self, name: str) -> QuantizedTensor:
        """Itself as "2:4", the dense equivalent as "plain" or another layout of dense tensors."""
        if name == LAYOUT:
            return self
        return self.to_dense().to_layout(name)

    def to_dense(self) -> QuantizedTensor:  # type: ignore[override]  # of a torch.sparse tensor, with other arguments
        """The dense equivalent as a `QuantizedTensor`, in the same orientation; kernels of 2:4 weights become "auto"."""
        self.check_shaped()
        recipe = any_kernel(dense_recipe(self.recipe))
        q = self.dense_stored()
        parts = {**{name: getattr(self, name) for name in PARTS}, "codes": q.codes}
        meta = replace(self.meta, recipe=recipe, layout="plain", axis=-1)
        dense = QuantizedTensor(parts, meta, self.stored_shape)
        return dense.transposed() if self.turned else dense

    def with_recipe(self, **changes: Any) -> SparseQuantizedTensor:
        """The same parts under a recipe with other fields, for instance kernel="sparse_wgmma"."""
        return self.remade(self.parts, recipe=changed_recipe(self.recipe, **changes))

    def remade(
        self, parts: Mapping[str, torch.Tensor | None], shape: Sequence[int] | None = None, **changes: Any
    ) -> SparseQuantizedTensor:
        """A tensor of other parts, with this one's description but for the changes."""
        meta = replace(self.meta, **changes) if changes else self.meta
        return SparseQuantizedTensor(parts, meta, self.shape if shape is None else shape)

    def adopt(self, other: torch.Tensor) -> None:
        """Another one's parts and description, for `t.data = other`; a dense one that is 2:4 is quantized and compressed.

        TypeError for a quantized one in dense storage, ValueError for a dense one that is not 2:4.
        """
        if isinstance(other, QuantizedTensor) and not isinstance(other, SparseQuantizedTensor):
            raise TypeError(
                f"data of {self!r} is a SparseQuantizedTensor, not {type(other).__name__}; copy_ compresses"
            )
        super().adopt(other)

    def transposed(self) -> SparseQuantizedTensor:
        """The last two axes the other way round, over the same parts."""
        self.check_shaped()
        return SparseQuantizedTensor(self.parts, swapped_orientation(self.meta), swapped(tuple(self.shape)))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: Meta, size: Sequence[int], stride: Sequence[int]
    ) -> SparseQuantizedTensor:
        return SparseQuantizedTensor(inner, meta, size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = SPARSE_OPERATIONS.get(func)
        if function is not None:
            return function(func, args, kwargs or {})
        if func.namespace == "ao_lab":
            raise NotImplementedError(
                f"{func} takes the parts of a dense weight, not 2:4 storage: run it outside of torch.compile, or give it "
                f"to_layout('plain')"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sparse{super().__repr__()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Parts and plain values alone, so that torch.load(weights_only=True) reads it."""
        is_parameter = getattr(self, "_is_param", False)
        fields = described(self.meta)
        # A tensor with attributes is pickled with them; what products keep with the codes is not written.
        parts = {name: part if part is None else signed(part).detach() for name, part in self.parts.items()}
        return rebuilt_sparse, (parts, fields, tuple(self.shape), is_parameter, self.requires_grad)


def rebuilt_sparse(
    parts: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    shape: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> Any:
    """What `SparseQuantizedTensor.__reduce_ex__` took apart."""
    parts = {name: part if part is None else unsigned(part) for name, part in parts.items()}
    result = SparseQuantizedTensor(parts, sparse_meta_from(fields), shape)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


def _turned(q: Quantized) -> Quantized:
    """q with its last two axes swapped, blocks along the last but one; one code an element."""
    q = unpacked(q)
    parts = {name: getattr(q, name) for name in ("codes", "scale", "zero")}
    turned = {
        name: part if part is None or part.dim() < 2 else part.transpose(-2, -1)
        for name, part in parts.items()
    }
    return replace(q, **turned, shape=swapped(q.shape), axis=q.axis - 1)


def _oriented(values: tuple[int, ...], meta: Meta) -> tuple[int, ...]:
    """Lengths or strides in the stored orientation, and back."""
    return swapped(values) if meta.axis != -1 and len(values) > 1 else values


# As of QuantizedTensor itself: read by torch.load(weights_only=True).
torch.serialization.add_safe_globals([rebuilt_sparse])

__all__ = ["SparseQuantizedTensor", "rebuilt_sparse"]
