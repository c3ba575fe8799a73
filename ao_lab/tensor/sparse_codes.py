"""From the codes of a 2:4 weight to those of its kept elements, and back: `reference.compress` beside a scheme's code of zero.

Metadata is that of the weight's values before they were rounded: it says which two of each group are stored, and what a group
lacks to two is filled with zeros, as `reference.compress` does. A code that is not stored is the code of zero
(`reference.sparsity.compress.zero_code`), so that the way back gives the bits of quantizing the pruned weight.

The scheme of stored codes is the dense one under a name of its own ("int8_rowwise_2:4"): its numbers are the same, but what was
tuned for a dense weight of this shape does not hold for it, and reports say at once how it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

import fast
from ao_lab.config.recipe import Recipe, numerics, registered
from ao_lab.tensor.metadata import SPARSE
from reference import SCHEMES, Scheme
from reference.sparsity.compress import FROM_ZERO_POINT, zero_code

SUFFIX = f"_{SPARSE}"
#: Elements that are compressed at once on the host, where the reference needs several integers for each.
PIECE = 2**21


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


def positive_zeros(x: torch.Tensor) -> torch.Tensor:
    """x with +0 in the place of -0, which multiplying negative weights by a mask leaves: 2:4 storage has one zero."""
    return x.masked_fill(x == 0, 0)


def metadata_of(x: torch.Tensor) -> torch.Tensor:
    """Metadata uint8 (..., ceil(K / 8)) of a dense 2:4 tensor (..., K); ValueError for more than two nonzeros in a group."""
    return _by_rows(lambda piece: fast.compress(piece).metadata, x)


def stored_codes(codes: torch.Tensor, metadata: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The kept ones of codes (..., K), one code an element: (..., K/2), packed below 8 bits."""
    values = _by_rows(
        lambda piece, data: fast.compress(piece, keep_mask(data, piece.shape[-1])).values, codes, metadata
    )
    return fast.pack(values, scheme.format) if scheme.format.bits < 8 else values


def dense_codes(
    stored: torch.Tensor,
    metadata: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: Scheme,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Codes of every element of `shape` (..., K), one code an element, from the kept ones and the block's zero points."""
    half = (*shape[:-1], shape[-1] // 2)
    values = fast.unpack(stored, scheme.format, half) if scheme.format.bits < 8 else stored
    codes = _by_rows(lambda piece, data: fast.decompress(piece, data), values, metadata)
    fill = zero_code(scheme)
    if fill == 0:
        return codes
    others = _zero_points(zero, scheme, shape) if fill == FROM_ZERO_POINT else torch.full_like(codes, fill)
    return torch.where(keep_mask(metadata, shape[-1]), codes, others)


def keep_mask(metadata: torch.Tensor, length: int) -> torch.Tensor:
    """Bool (..., length): what metadata keeps, two of every four."""
    ones = torch.ones((*metadata.shape[:-1], length // 2), dtype=torch.uint8, device=metadata.device)
    return fast.decompress(ones, metadata).to(torch.bool)


def _zero_points(zero: torch.Tensor | None, scheme: Scheme, shape: tuple[int, ...]) -> torch.Tensor:
    """The code of zero of every element: the zero point of its block, in the element's bits."""
    if zero is None:
        raise ValueError(f"{scheme.name} needs zero points, and the weight has none")
    codes = zero.view(torch.uint8) & ((1 << scheme.format.bits) - 1)
    block = scheme.scale.block
    if codes.dim() and isinstance(block, tuple):
        codes = codes.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    columns = block[1] if isinstance(block, tuple) else block
    if codes.dim() and isinstance(columns, int) and columns > 0:
        codes = codes.repeat_interleave(columns, -1)[..., : shape[-1]]
    return codes.expand(shape)


def _by_rows(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function` of tensors (..., n) whose leading axes are the same, some rows at a time on the host."""
    first = tensors[0]
    if first.device.type != "cpu" or type(first) is not torch.Tensor or first.numel() <= PIECE:
        return function(*tensors)
    lead = first.shape[:-1]
    rows = max(PIECE // max(first.shape[-1], 1), 1)
    flat = [torch.split(tensor.reshape(prod(lead), tensor.shape[-1]), rows) for tensor in tensors]
    result = torch.cat([function(*pieces) for pieces in zip(*flat, strict=True)])
    return result.reshape(*lead, result.shape[-1])


__all__ = [
    "SUFFIX",
    "dense_codes",
    "dense_recipe",
    "dense_scheme",
    "keep_mask",
    "metadata_of",
    "positive_zeros",
    "sparse_recipe",
    "sparse_scheme",
    "stored_codes",
]
