"""Inputs of cases, and pieces of them on the host. Values are normal, never constant: every kernel is faster on constants."""

from __future__ import annotations

from dataclasses import replace

import torch

import reference
from experiments.kernels.cases.case import Compared, Sample
from experiments.kernels.cases.floors import Shape
from reference import Quantized, Scales, Scheme

EPS = 1e-6


def normal(shape: Shape | tuple[int], device: str, seed: int) -> torch.Tensor:
    """bfloat16, normal; its first row is zero, the edge that every scale has to survive."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if x.ndim == 2:
        x[0] = 0
    return x


def words(shape: Shape, device: str, seed: int) -> torch.Tensor:
    """Random words for stochastic rounding, one uint32 an element."""
    generator = torch.Generator(device=device).manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32)
    return bits.view(torch.uint32)


def codes(shape: Shape, below: int, device: str, seed: int) -> torch.Tensor:
    """Random codes, one uint8 an element."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, device=device, dtype=torch.uint8)


def peak(x: torch.Tensor, width: int = 16, height: int = 1) -> torch.Tensor:
    """Rows of zeros and the largest element of x: its tensor-wide scale is that of x."""
    # A row at a time, so that no other tensor of x's size is in memory.
    rows = torch.linalg.vector_norm(x, ord=float("inf"), dim=1)
    row = x[int(rows.argmax())]
    found = torch.zeros(height, width, dtype=x.dtype)
    found[0, 0] = row[row.abs().argmax()].cpu()
    return found


def tensor_scales(x: torch.Tensor, scheme: Scheme) -> Scales:
    """The tensor-wide part of x's scales by the reference, on the host: the only scale, or the outer one."""
    block = scheme.scale.block
    whole = peak(x, height=block[0]) if isinstance(block, tuple) else peak(x)
    found = reference.choose_scales(whole, scheme)
    return Scales(outer=found.outer) if scheme.outer is not None else Scales(found.scale)


def moved_to(scales: Scales, device: str | torch.device) -> Scales:
    """The same scales on a device."""
    parts = (None if part is None else part.to(device) for part in (scales.scale, scales.outer, scales.zero))
    return Scales(*parts)


def piece(part: torch.Tensor | None, rows: int, sample: Sample) -> torch.Tensor | None:
    """The part of scales that belongs to a sample of `rows` rows; what is tensor-wide stays whole."""
    if part is None or part.ndim == 0:
        return None if part is None else part.detach().cpu()
    if sample.stop - sample.start == rows:
        return part.detach().cpu().contiguous()
    size = -(-rows // part.shape[0])
    return part[sample.start // size : -(-sample.stop // size)].detach().cpu().contiguous()


def quantized_piece(q: Quantized, sample: Sample) -> Quantized:
    """The rows of a quantized matrix, on the host."""
    rows, columns = q.shape
    scale, outer, zero = (piece(part, rows, sample) for part in (q.scale, q.outer, q.zero))
    shape = (min(sample.stop, rows) - sample.start, columns)
    return replace(q, codes=sample.rows(q.codes), scale=scale, outer=outer, zero=zero, shape=shape)


def compare_quantized(got: Quantized, expected: Quantized, sample: Sample, what: str = "") -> list[Compared]:
    """Codes, scales and zero points of a result's rows against the reference's on these rows."""
    mine = quantized_piece(got, sample)
    parts = ("codes", "scale", "outer", "zero")
    return [(f"{what}{part}", getattr(mine, part), getattr(expected, part)) for part in parts]


def compare_columns(got: Quantized, expected: Quantized, sample: Sample) -> list[Compared]:
    """The same for blocks along the first axis: columns."""
    return [
        ("codes", sample.columns(got.codes), expected.codes),
        ("scale", sample.columns(got.scale), expected.scale),
        ("zero", None if got.zero is None else sample.columns(got.zero), expected.zero),
    ]
