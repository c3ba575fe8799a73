"""The host side of 2:4: which tensors the kernels take, and the calls. Others get None, and the reference."""

from __future__ import annotations

from typing import Any, cast

import torch

import reference
from fast.kernels.sparsity.compress import (
    BYTES_OF_PROGRAM,
    TILE,
    TILE_OF_WARP,
    WARPS,
    compress_kernel,
    decompress_kernel,
    quantize_compressed_kernel,
)
from fast.kernels.sparsity.groups import NAN_KEYS
from fast.kernels.sparsity.prune import MASK_TILE, groups_kernel, mask_kernel, ranks_kernel
from fast.launch.launcher import Call, CompiledLaunch
from reference import SCHEMES, Compressed
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme, scheme_of
from reference.sparsity.prune import parse_pattern

#: Dtypes whose elements are stored, and whether they have a -0 of their top bit alone.
STORED = {
    torch.float32: True, torch.bfloat16: True, torch.float16: True, torch.float8_e4m3fn: True, torch.float8_e5m2: True,
    torch.int8: False, torch.uint8: False, torch.int16: False, torch.int32: False,
}  # fmt: skip
#: Scores of 2:4 by octets, and by ranks.
RANKED = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8", torch.uint8: "uint8"
}  # fmt: skip
SCORES = (*RANKED, torch.int16, torch.int32)
OCTET = 8
#: Patterns of more than this many the reference ranks: a thread reads its whole group.
LARGEST_GROUP = 16
#: Groups of which a thread has whole ones.
COUNTED = (4, 8, 16)


def _whole(x: torch.Tensor) -> bool:
    """Whether a tensor is one line of octets."""
    return x.dim() > 0 and x.numel() > 0 and x.shape[-1] % OCTET == 0


def _tile(octets: int, size: int) -> tuple[int, int, bool]:
    """Programs, elements of one, and whether they do not fill the last, for elements of `size` bytes."""
    tile = BYTES_OF_PROGRAM // size
    return -(-octets * OCTET // tile), tile, octets * OCTET % tile != 0


def compress(
    w: torch.Tensor, mask: torch.Tensor | None, pattern: str | None, key: Any = None
) -> Compressed | None:
    """Values and metadata; None where the kernel does not serve. What is wrong with a mask the reference says.

    With a mask, or none, the host waits for one number: whether a group has more than two elements. It cannot be captured in a
    CUDA graph then.
    """
    if pattern is not None:
        served = parse_pattern(pattern) == (2, 4) and w.dtype in RANKED
    else:
        served = mask is None or (
            mask.dtype == torch.bool and mask.shape == w.shape and mask.device == w.device
        )
    if not served or w.dtype not in STORED or not _whole(w):
        return None
    return _compressed(
        w, mask, "largest" if pattern is not None else "nonzero" if mask is None else "mask", key
    )


def _compressed(w: torch.Tensor, mask: torch.Tensor | None, rule: str, key: Any) -> Compressed:
    """The call whose buffers are "values", "metadata" and, where groups can have too many, "refused"."""
    call = Call({"w": w, "mask": mask}, words=("w", "mask"))
    *rest, length = w.shape
    call.allocate("values", (*rest, length // 2), w.dtype)
    call.allocate("metadata", (*rest, length // OCTET), torch.uint8)
    if rule != "largest":
        call.allocate("refused", (1,), torch.int32, (0,))
    octets, size = w.numel() // OCTET, w.dtype.itemsize
    grid, tile, masked = _tile(octets, size)
    kind = RANKED.get(w.dtype, "")
    tail = (octets, rule, kind, STORED[w.dtype], NAN_KEYS.get(kind, 0), size, masked, tile)
    call.launch(
        CompiledLaunch(compress_kernel, grid, tail, WARPS), ("w", "mask", "values", "metadata", "refused")
    )
    if rule == "largest":
        return cast("Compressed", call.result(("values", "metadata"), key, None, _pair))
    given = None if mask is None else "mask"
    template = ("values", "metadata", "refused", "w", given)
    return cast("Compressed", call.result(template, key, None, _counted))


def _pair(made: tuple[torch.Tensor, torch.Tensor]) -> Compressed:
    return Compressed(*made)


def _counted(made: tuple[Any, ...]) -> Compressed:
    """Values and metadata, unless a group had too many: then the reference counts them, and raises."""
    values, metadata, refused, w, mask = made
    if int(refused):
        counted: Compressed = reference.compress(w, mask)
        return counted
    return Compressed(values, metadata)


def decompress(
    values: torch.Tensor, metadata: torch.Tensor, shape: tuple[int, ...] | None, key: Any = None
) -> torch.Tensor | None:
    """The dense tensor; None where the kernel does not serve. What is wrong with shapes the reference says."""
    if values.dtype not in STORED or metadata.dtype != torch.uint8 or metadata.device != values.device:
        return None
    if not values.dim() or not values.numel() or values.shape[-1] % (OCTET // 2):
        return None
    *rest, half = values.shape
    if metadata.shape != (*rest, half // 4) or shape not in (None, (*rest, 2 * half)):
        return None
    call = Call({"values": values, "metadata": metadata}, words=("values",))
    call.allocate("w", (*rest, 2 * half), values.dtype)
    octets, size = metadata.numel(), values.dtype.itemsize
    grid, tile, masked = _tile(octets, size)
    launch = CompiledLaunch(decompress_kernel, grid, (octets, size, masked, tile), WARPS)
    call.launch(launch, ("values", "metadata", "w"))
    result: torch.Tensor = call.result("w", key)
    return result


def mask_call(w: torch.Tensor, scores: torch.Tensor | None, out: torch.Tensor | None) -> Call:
    """A call that writes "mask": out, which is contiguous, or a buffer of its own. Its inputs are the operands of the key."""
    if out is not None:
        return Call({"w": w, "mask": out}, words=("w",))
    call = Call({"w": w, "scores": scores}, words=("w", "scores"))
    call.allocate("mask", w.shape, torch.bool)
    return call


def prune(
    w: torch.Tensor,
    scores: torch.Tensor | None,
    pattern: str,
    key: Any = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The mask, by default a new one; None where the kernels do not serve. What is wrong with scores and patterns the reference
    says. out: contiguous, without scores."""
    kept, group = parse_pattern(pattern)
    ranked = w if scores is None else scores
    if group > LARGEST_GROUP or not w.dim() or w.shape[-1] % group or ranked.shape != w.shape:
        return None
    if ranked.dtype not in SCORES or ranked.device != w.device or not w.numel():
        return None
    # Of w only the shape is read where there are scores.
    call = mask_call(w, scores, out)
    launch = _mask_launch(ranked, kept, group)
    call.launch(launch, ("w" if scores is None else "scores", "mask"))
    result: torch.Tensor = call.result("mask", key)
    return result


def _mask_launch(ranked: torch.Tensor, kept: int, group: int) -> CompiledLaunch:
    """2:4 of whole octets by `mask_kernel`, M of 4, 8 and 16 in whole units by `groups_kernel`, others by `ranks_kernel`."""
    if (kept, group) == (2, 4) and ranked.dtype in RANKED and _whole(ranked):
        octets, size, kind = ranked.numel() // OCTET, ranked.dtype.itemsize, RANKED[ranked.dtype]
        grid, tile, masked = _tile(octets, size)
        return CompiledLaunch(mask_kernel, grid, (octets, kind, NAN_KEYS[kind], size, masked, tile), WARPS)
    count = ranked.numel()
    unit = group if ranked.dtype.itemsize == 4 else 2 * group
    if ranked.dtype in RANKED and group in COUNTED and count % unit == 0:
        size, kind = ranked.dtype.itemsize, RANKED[ranked.dtype]
        tile = BYTES_OF_PROGRAM // size
        tail = (count // unit, kept, group, kind, NAN_KEYS[kind], size, count % tile != 0, tile)
        return CompiledLaunch(groups_kernel, -(-count // tile), tail, WARPS)
    return CompiledLaunch(ranks_kernel, -(-count // MASK_TILE), (count, kept, group, MASK_TILE), WARPS)


# The host side of `quantize_compressed`: which calls the kernel takes. Others get None, and the reference.

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


__all__ = ["compress", "decompress", "prune", "quantize_compressed"]
