"""The host side of `quantize_compressed`: which calls the kernel takes. Others get None, and the reference."""

from __future__ import annotations

from typing import Any, cast

import torch

from fast.kernels.sparsity.host import OCTET, RANKED
from fast.kernels.sparsity.marks import NAN_KEYS
from fast.kernels.sparsity.quantize import TILE, TILE_OF_WARP, quantize_compressed_kernel
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch
from reference import SCHEMES, Compressed
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme, scheme_of
from reference.sparsity.prune import parse_pattern

HALVES = (torch.bfloat16, torch.float16)
SERVED = ("fp8_rowwise", "fp8_rowwise_e5m2", "fp8_tensorwise", "fp8_tensorwise_e5m2")
#: Octets of a row are numbered in 32 bits.
MOST = 2**31


def quantize_compressed(
    record: str | Scheme,
    pattern: str | None,
    w: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    key: Any = None,
) -> Compressed | None:
    """Codes and metadata; None where the kernel does not serve. What is wrong with scales and patterns the reference says."""
    scheme = scheme_of(record)
    pruned = pattern is not None and mask is None and parse_pattern(pattern) == (2, 4)
    if not pruned or outer is not None or zero is not None or not _covers(w, scheme, scale):
        return None
    call = Call({"w": w, "mask": None, "scale": scale, "outer": None, "zero": None}, words=("w",))
    *rest, length = w.shape
    call.allocate("values", (*rest, length // 2), torch.uint8)
    call.allocate("metadata", (*rest, length // OCTET), torch.uint8)
    call.launch(_launch(w, scheme), ("w", "scale", "values", "metadata"))
    return cast(
        "Compressed", call.result(("values", "metadata"), key, record, lambda made: Compressed(*made))
    )


def _covers(w: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None) -> bool:
    """Whether w is 16-bit floats in whole octets, and the scheme one of those served, with a scale of its shape."""
    if (
        w.dtype not in HALVES
        or not w.dim()
        or not w.numel()
        or w.shape[-1] % OCTET
        or w.numel() >= MOST * OCTET
    ):
        return False
    if scheme.name not in SERVED or SCHEMES[scheme.name] != scheme or not isinstance(scale, torch.Tensor):
        return False
    wanted = Blocks.of(tuple(w.shape), scheme.scale, -1).scale_shape
    return scale.dtype == torch.float32 and scale.device == w.device and tuple(scale.shape) == tuple(wanted)


def _launch(w: torch.Tensor, scheme: Scheme) -> CompiledLaunch:
    """The kernel over rows; with one scale the whole tensor is a row."""
    rows = 1 if scheme.scale.block == "tensor" else w.numel() // w.shape[-1]
    length = w.numel() // rows
    # Programs that are filled, if a tile divides the row.
    whole = [tile for tile in (TILE, TILE // 2, TILE_OF_WARP) if length % tile == 0]
    tile = max(whole, default=min(TILE, max(TILE_OF_WARP, 1 << (length - 1).bit_length())))
    tail = (length // OCTET, scheme.element, NAN_KEYS[RANKED[w.dtype]], length % tile != 0, tile)
    grid = rows * -(-length // tile)
    return CompiledLaunch(quantize_compressed_kernel, grid, tail, tile // TILE_OF_WARP)


__all__ = ["quantize_compressed"]
