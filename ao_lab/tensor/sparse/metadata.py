"""What a weight in 2:4 storage has beside a dense one: the name of its layout, a part, and the name of its scheme.

The scheme is the dense one under a name of its own ("int8_rowwise_2:4"): its numbers are the same, but what was tuned for a
dense weight of this shape does not hold for it, and reports say at once how it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ao_lab.config.recipe import SPARSE_KERNELS, Recipe, changed_recipe, numerics, registered
from ao_lab.tensor.metadata import PARTS, Meta, meta_from
from reference import SCHEMES, Scheme

#: `Meta.layout` of these tensors, and the pattern that they store.
LAYOUT = "2:4"
#: Names of the tensors inside, in the order in which tracers see them.
SPARSE_PARTS = (*PARTS, "metadata")
SUFFIX = f"_{LAYOUT}"
#: Dense columns of a byte of metadata.
COLUMNS = 8


@lru_cache(maxsize=1024)
def sparse_scheme(scheme: Scheme) -> Scheme:
    """The scheme of kept values alone; itself where it is one."""
    return scheme if scheme.name.endswith(SUFFIX) else replace(scheme, name=scheme.name + SUFFIX)


@lru_cache(maxsize=1024)
def dense_scheme(scheme: Scheme) -> Scheme:
    """The scheme of the dense equivalent."""
    if not scheme.name.endswith(SUFFIX):
        return scheme
    plain = replace(scheme, name=scheme.name.removesuffix(SUFFIX))
    known = SCHEMES.get(plain.name)
    return known if known is not None and numerics(known) == numerics(plain) else registered(plain)


def sparse_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a weight in 2:4 storage."""
    return replace(recipe, weight=sparse_scheme(recipe.weight))


def dense_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the dense equivalent."""
    return replace(recipe, weight=dense_scheme(recipe.weight))


def any_kernel(recipe: Recipe) -> Recipe:
    """The recipe with kernel "auto" in place of one that multiplies 2:4 storage alone; itself where it names none of those."""
    return changed_recipe(recipe, kernel="auto") if recipe.kernel in SPARSE_KERNELS else recipe


def sparse_meta_from(fields: Mapping[str, Any]) -> Meta:
    """`meta_from`, also of 2:4 weights whose recipe names a kernel of their own; ValueError where a dense one's does."""
    kernel = fields["kernel"]
    if kernel not in SPARSE_KERNELS:
        return meta_from(fields)
    meta = meta_from({**fields, "kernel": "auto"})
    if meta.layout != LAYOUT:
        raise ValueError(
            f"kernel {kernel!r} multiplies weights in {LAYOUT} storage alone, this one's is {meta.layout!r}"
        )
    return replace(meta, recipe=changed_recipe(meta.recipe, kernel=kernel))


def swapped_orientation(meta: Meta) -> Meta:
    """Of the transposed tensor: groups are stored along the last axis always, so the blocks' axis says which way round it is
    read."""
    return replace(meta, axis=-3 - meta.axis)


def signed(part: torch.Tensor) -> torch.Tensor:
    """uint16 codes as int16: torch's pickles and its indexing know no uint16, and no part is int16."""
    return part.view(torch.int16) if part.dtype == torch.uint16 else part


def unsigned(part: torch.Tensor) -> torch.Tensor:
    """The inverse of `signed`."""
    return part.view(torch.uint16) if part.dtype == torch.int16 else part


def sent(part: torch.Tensor) -> torch.Tensor:
    """A part, in rows, as collectives take it: of 16-bit codes, which gloo and NCCL do not know, the bytes."""
    part = part.reshape(1) if part.dim() == 0 else part.contiguous()
    return part.view(torch.uint8) if part.dtype == torch.uint16 else part


def received(part: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `sent`, for a part of which `like` is one."""
    return part.view(torch.uint16) if like is not None and like.dtype == torch.uint16 else part


__all__ = [
    "COLUMNS",
    "LAYOUT",
    "SPARSE_PARTS",
    "any_kernel",
    "dense_recipe",
    "dense_scheme",
    "received",
    "sent",
    "signed",
    "sparse_meta_from",
    "sparse_recipe",
    "sparse_scheme",
    "swapped_orientation",
    "unsigned",
]
