"""Stored integers as other programs have them: signed codes, scales and zero points by blocks of a given size, nibbles."""

from __future__ import annotations

import torch

import reference
from reference import Quantized


def check_integers(q: Quantized, way_out: str) -> None:
    """ValueError, with what would work, for weights that are not integers times a scale."""
    scheme, fmt = q.scheme, q.scheme.format
    by_code = scheme.zero is None or scheme.zero.rule == "code"
    if (
        fmt.kind != "int"
        or fmt.fraction_bits
        or not by_code
        or q.outer is not None
        or scheme.scale.stored != "decode"
    ):
        raise ValueError(f"{scheme.name} is no integer times a scale; {way_out}")


def signed_codes(q: Quantized) -> torch.Tensor:
    """Integers (N, K) as int16, with their signs; those that count from 0 as they are."""
    low = int(q.scheme.format.integer_range[0])
    codes = q.codes.to(torch.int16)
    high = 1 << q.scheme.format.bits
    return torch.where(codes >= high // 2, codes - high, codes) if low < 0 else codes


def block_size(q: Quantized, sizes: tuple[int, ...], client: str) -> int:
    """The largest of the sizes that divides the scheme's block and the row; ValueError where none does."""
    block = q.scheme.scale.block
    wide = block[1] if isinstance(block, tuple) else block
    whole = q.shape[1] if wide in (-1, "tensor") else wide
    for size in sizes:
        if isinstance(whole, int) and whole % size == 0 and q.shape[1] % size == 0:
            return size
    raise ValueError(
        f"{q.scheme.name} of shape {q.shape}: blocks of {client} are {', '.join(map(str, reversed(sizes)))} elements of a row"
    )


def scales_of(q: Quantized, size: int) -> torch.Tensor:
    """float32 scales, one for each `size` elements of a row: (N, K / size)."""
    storage = q.scheme.scale.storage
    return by_block(q, q.scale if storage == "float32" else reference.decode(q.scale, storage), size).float()


def one_scale_a_row(q: Quantized) -> torch.Tensor:
    """(N, 1)."""
    return scales_of(q, q.shape[1])


def by_block(q: Quantized, values: torch.Tensor, size: int) -> torch.Tensor:
    """Scales or zero points, repeated for each `size` elements of a row."""
    (rows, length), block = q.shape, q.scheme.scale.block
    tall, wide = block if isinstance(block, tuple) else (1, block)
    if wide in (-1, "tensor"):
        return values.reshape(-1, 1).expand(rows, length // size).contiguous()
    grid = values.repeat_interleave(tall, 0).repeat_interleave(int(wide) // size, 1)
    return grid[:rows, : length // size].contiguous()


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16 as bytes along the last axis, even places low; an odd end is filled with 0."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


__all__ = [
    "block_size",
    "by_block",
    "check_integers",
    "nibbles",
    "one_scale_a_row",
    "scales_of",
    "signed_codes",
]
