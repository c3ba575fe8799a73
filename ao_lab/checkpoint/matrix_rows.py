"""Rows of quantized matrices put together as transformers puts those of dense ones together, without a number rounded.

transformers says how a model's parameters are made of a checkpoint's tensors by operations on dense tensors (`torch.stack`,
`torch.cat`, `torch.chunk` ...). A quantized matrix cannot go through them. So they are given the numbers of its rows instead
(`row_numbers`), a column for each matrix, and what comes out says where every row of the result is from. Codes and scales are
then gathered (`gathered`): no number is rounded, and no block is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, signed

#: Row r of source i has the number i * STEP + r.
STEP = 2**40
WAY_OUT = "read the original model with quantize_pretrained instead"


def row_numbers(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """For each shape (rows, columns) a column of numbers, one a row, different for all of them; leading axes count rows."""
    result = []
    for index, shape in enumerate(shapes):
        rows = shape[:-1]
        result.append((torch.arange(prod(rows)) + index * STEP).reshape(*rows, 1))
    return result


def gathered(load: Callable[[int], QuantizedTensor], numbers: torch.Tensor) -> QuantizedTensor:
    """The matrices (or batch of them) whose rows have these numbers, of shape (..., rows, 1); `load` gives a source.

    Sources are asked for once, in the order of their numbers. ValueError where their schemes differ, where a scale belongs to
    a whole matrix and another one, and where a block would be cut or joined.
    """
    if numbers.dim() < 2 or numbers.shape[-1] != 1:
        raise ValueError(f"its rows become columns, which a quantized matrix does not support; {WAY_OUT}")
    flat = numbers.reshape(-1)
    parts: dict[str, torch.Tensor] = {}
    meta: Meta | None = None
    common: dict[str, torch.Tensor | None] = {}
    columns = 0
    for index in sorted(set((flat // STEP).tolist())):
        source = with_row_scales(load(index))
        if meta is None:
            meta, columns = source.meta, source.shape[-1]
            common = {name: source.parts[name] for name in ("outer", "input_scale", "input_zero")}
        _check_alike(source, meta, common)
        height = row_block(source)
        starts = _block_starts(numbers, height)
        for name in ("codes", "scale", "zero"):
            part = source.parts[name]
            if part is None:
                continue
            wanted, step = (flat, 1) if name == "codes" else (starts, height)
            mine = wanted // STEP == index
            if name not in parts:
                parts[name] = part.new_empty((len(wanted), *part.shape[1:]))
            if part.is_meta:
                continue
            signed(parts[name])[mine] = signed(part)[(wanted[mine] % STEP) // step]
    if meta is None:
        raise ValueError("there are no rows")
    lead = tuple(numbers.shape[:-1])
    shaped: dict[str, torch.Tensor | None] = {
        name: part.reshape(*lead[:-1], -1, *part.shape[1:]) for name, part in parts.items()
    }
    return QuantizedTensor({**shaped, **common}, meta, (*lead, columns))


def with_row_scales(t: QuantizedTensor) -> QuantizedTensor:
    """A matrix whose one scale is that of a block as large as itself: so matrices with a scale each can be put together."""
    meta = t.meta
    if (
        meta.transposed
        or meta.flat is not None
        or meta.layout != "plain"
        or meta.axis != -1
        or len(t.shape) != 2
    ):
        raise ValueError(f"{t!r} is not a matrix with blocks along its rows; {WAY_OUT}")
    scale = t.scheme.scale
    if scale.block != "tensor" or t.outer is not None or t.zero is not None:
        return t
    rows, columns = t.shape
    scheme = replace(
        t.scheme,
        name=f"{t.scheme.name}_of_each_matrix",
        scale=replace(scale, block=(rows, columns), partial=True),
    )
    return t.remade({**t.parts, "scale": t.scale.reshape(1, 1)}, recipe=replace(t.recipe, weight=scheme))


def row_block(t: QuantizedTensor) -> int:
    """How many rows share a scale; ValueError for blocks that know no rows."""
    block = t.scheme.scale.block
    if isinstance(block, str):
        raise ValueError(f"{t.scheme.name} has blocks of {block}, which do not lie along rows; {WAY_OUT}")
    return block[0] if isinstance(block, tuple) else 1


def _check_alike(source: QuantizedTensor, meta: Meta, common: dict[str, torch.Tensor | None]) -> None:
    """ValueError where a source is stored otherwise than the first, or what belongs to all of it differs."""
    if source.meta != meta:
        raise ValueError(f"its parts are quantized in {meta.recipe} and in {source.recipe}; {WAY_OUT}")
    for name, first in common.items():
        part = source.parts[name]
        same = part is first or (part is not None and first is not None and torch.equal(part, first))
        if not same:
            raise ValueError(
                f"its parts have an {name} each, and {meta.recipe} has one for the whole weight; {WAY_OUT}"
            )


def _block_starts(numbers: torch.Tensor, height: int) -> torch.Tensor:
    """The number of the first row of each block of rows; ValueError where blocks of the sources are cut or joined."""
    matrices = numbers.reshape(-1, numbers.shape[-2])
    starts = matrices[:, ::height]
    inside = torch.arange(matrices.shape[1]) % height
    whole = starts.repeat_interleave(height, 1)[:, : matrices.shape[1]] + inside
    if not torch.equal(whole, matrices) or bool((starts % STEP % height).any()):
        raise ValueError(
            f"blocks of {height} rows do not end where its parts do: a scale would belong to two of them; {WAY_OUT}"
        )
    return starts.reshape(-1)
