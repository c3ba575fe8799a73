"""`quantized_compressed`: a 2:4 weight into a `SparseQuantizedTensor`, all that can be refused refused before it is quantized.

The mask is that of the values before they are rounded: elements that are not zero. An element that rounds to zero stays kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import fast
from ao_lab.config.recipe import Recipe, named, unstorable_recipe
from ao_lab.tensor.chunked import quantized_by_rows
from ao_lab.tensor.metadata import DTYPES, SPARSE, Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor, from_quantized
from ao_lab.tensor.sparse_codes import (
    SUFFIX,
    dense_codes,
    dense_recipe,
    dense_scheme,
    metadata_of,
    positive_zeros,
    sparse_recipe,
    stored_codes,
)
from fast.dispatch import is_traced
from reference import Scales, Scheme
from reference.schemes.schemes import scheme_of
from reference.sparsity.compress import PLAIN_ELEMENTS, is_plain


def quantized_compressed(
    x: torch.Tensor, recipe: Recipe | Scheme | str, *, axis: int = -1, input_scales: Scales | None = None
) -> SparseQuantizedTensor:
    """A 2:4 tensor x (..., K) in the scheme of a recipe (or a scheme, by name or record), stored as its kept elements.

    x: float32, bfloat16, float16 or float64, at most two of each four consecutive elements of the last axis not zero (-0 is
    zero and comes back as +0), K a multiple of 4. Schemes "bfloat16" and "float16" store the elements of x as they are. Scales
    are those of the dense scheme, `reference.quantize` of x; `input_scales` static ones of the layer's input.

    Raises ValueError for x that is not 2:4, with the number of groups; NaN or infinity in schemes with scales; another axis or
    dtype; what is quantized already; a scheme in which pruned elements would not be zero (`reference.sparsity.compress`),
    or a kernel that reads dense codes. TypeError for what is no torch tensor.
    """
    recipe = sparse_recipe(as_recipe(recipe))
    if (reason := unstorable(x, recipe, axis) or not_sparse(x, recipe)) is not None:
        raise ValueError(reason)
    x = positive_zeros(x.detach())
    metadata = metadata_of(x)
    if is_plain(recipe.weight):
        return _of_elements(x, metadata, recipe)
    return compressed(quantized_by_rows(x, dense_recipe(recipe), input_scales=input_scales), metadata)


def compressed(dense: QuantizedTensor, metadata: torch.Tensor) -> SparseQuantizedTensor:
    """A dense quantized matrix (..., K), its blocks along its last axis, whose elements outside of `metadata` are zero.

    ValueError where one of them is not: `metadata` is not that of this weight.
    """
    dense = dense.plain
    q, scheme = dense.quantized, dense_scheme(dense.scheme)
    codes = fast.unpack(q.codes, scheme.format, q.shape) if q.packed else q.codes
    stored = stored_codes(codes, metadata, scheme)
    if not is_traced(codes) and not codes.is_meta:
        again = dense_codes(stored, metadata, q.zero, scheme, q.shape)
        if not torch.equal(again, codes):
            count = int((again != codes).sum())
            raise ValueError(
                f"{count} elements of {dense!r} outside of its 2:4 metadata are not zero after quantization; quantize with a "
                f"scheme and an observer that keep zeros, or leave sparsity out"
            )
    parts = {**dense.parts, "codes": stored, "metadata": metadata}
    meta = replace(dense.meta, recipe=sparse_recipe(dense.recipe), layout=SPARSE)
    return SparseQuantizedTensor(parts, meta, dense.shape)


def stored_like(
    t: SparseQuantizedTensor, dense: torch.Tensor, input_scales: Scales | None, scales: Scales | None = None
) -> SparseQuantizedTensor:
    """A dense 2:4 tensor in t's stored orientation, stored as t is; under scales from outside, if there are any.

    ValueError where it is not 2:4.
    """
    x = dense.contiguous().to(getattr(torch, t.scheme.element) if is_plain(t.scheme) else t.dtype)
    if (reason := not_sparse(x, t.recipe)) is not None:
        raise ValueError(
            f"{t!r} takes dense numbers that are 2:4: {reason}. An update that fills pruned places, as a merged adapter's "
            f"does, stays separate from the weight, or goes to its to_dense()"
        )
    if scales is None or is_plain(t.scheme):
        result = quantized_compressed(x, t.recipe, input_scales=input_scales)
    else:
        recipe = dense_recipe(t.recipe)
        q = fast.quantize(x, recipe.weight, scales=scales, packed=recipe.weight.format.bits < 8)
        result = compressed(from_quantized(q, recipe, t.dtype, input_scales), metadata_of(x))
    return result.remade(result.parts, dtype=dense.dtype)  # type: ignore[return-value]


def check_stored(t: SparseQuantizedTensor) -> None:
    """ValueError where parts that came from a file are no 2:4 weight: metadata that names no two places, a scale of plain
    elements."""
    if (reason := unstorable_recipe(dense_recipe(t.recipe))) is not None:
        raise ValueError(reason)
    if not t.scheme.name.endswith(SUFFIX):
        raise ValueError(f"the scheme of a 2:4 weight is called {t.scheme.name}{SUFFIX}, got {t.scheme.name}")
    wide = t.metadata.to(torch.int32)
    groups = torch.stack([wide & 15, wide >> 4], -1).flatten(-2)[..., : t.stored_shape[-1] // 4]
    wrong = int(((groups & 3) >= (groups >> 2)).sum())
    if wrong:
        raise ValueError(
            f"{wrong} groups of its metadata name no two places in order; it is not what reference.compress writes"
        )
    if is_plain(dense_scheme(t.scheme)) and float(t.scale) != 1:
        raise ValueError(f"elements that are stored as they are have a scale of 1, got {float(t.scale)}")


def as_recipe(recipe: Recipe | Scheme | str) -> Recipe:
    """A recipe of a scheme's name or record, the plain elements of 16 bits among them."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in PLAIN_ELEMENTS:
        return Recipe(weight=PLAIN_ELEMENTS[recipe])
    return Recipe(weight=named(recipe) or scheme_of(recipe))


def unstorable(x: torch.Tensor, recipe: Recipe, axis: int = -1) -> str | None:
    """Why 2:4 storage does not hold weights of x's shape and dtype by a recipe, whatever their values; None where it does."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"2:4 storage takes a torch tensor, got {type(x).__name__}: {x!r:.60}")
    if isinstance(x, QuantizedTensor):
        return "it is quantized already; prune the dense weight, then quantize and compress it"
    if x.dtype not in DTYPES:
        return f"2:4 storage is made of float32, bfloat16, float16 or float64, got {x.dtype}"
    scheme, shape = dense_scheme(recipe.weight), tuple(x.shape)
    if (reason := unstorable_recipe(dense_recipe(recipe))) is not None:
        return reason
    if is_plain(scheme) and str(x.dtype) != f"torch.{scheme.element}":
        return f"elements of {x.dtype} are not stored as {scheme.element}; convert the weight, or quantize it"
    if len(shape) < 2 or axis % len(shape) != len(shape) - 1:
        return f"2:4 storage holds matrices with groups of four along their last axis, got axis {axis} of shape {shape}"
    if shape[-1] % 4 or not shape[-1]:
        return f"2:4 storage needs a contraction axis that is a multiple of 4, got shape {shape}; leave this layer dense"
    return None


def not_sparse(x: torch.Tensor, recipe: Recipe) -> str | None:
    """Why the values of x cannot be compressed; None where they can, and where there are no values to look at."""
    if x.is_meta or is_traced(x):
        return None
    if not is_plain(dense_scheme(recipe.weight)) and not bool(x.isfinite().all()):
        return "it holds NaN or infinity, which would spread to pruned elements of their block; replace them"
    groups = (x.detach() != 0).reshape(-1, 4).sum(-1)
    crowded = int((groups > 2).sum())
    if crowded:
        return (
            f"2:4 storage holds at most two elements of every four, and {crowded} of {len(groups)} groups have more that are "
            f"not "
            f"zero; prune first: ao_lab.sparsify_(model, SparsityConfig('2:4'))"
        )
    return None


def _of_elements(x: torch.Tensor, metadata: torch.Tensor, recipe: Recipe) -> SparseQuantizedTensor:
    """The elements of x themselves, under a scale of 1."""
    scheme = dense_scheme(recipe.weight)
    stored = stored_codes(x.contiguous().view(torch.uint16), metadata, scheme)
    meta = Meta(recipe, -1, x.dtype, layout=SPARSE)
    parts = {"codes": stored, "scale": torch.ones((), device=x.device), "metadata": metadata}
    return SparseQuantizedTensor(parts, meta, x.shape)


__all__ = [
    "as_recipe", "check_stored", "compressed", "not_sparse", "quantized_compressed", "stored_like", "unstorable",
]  # fmt: skip
