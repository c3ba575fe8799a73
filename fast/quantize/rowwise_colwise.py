"""`quantize_both` for torch tensors; see `reference.quantize.quantize`."""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import run
from fast.quantize.ops import QUANTIZE_BOTH, operands_of
from reference import Quantized, Scheme


def quantize_both(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> tuple[Quantized, Quantized]:
    """x along its last axis, and x.T along its last axis: arguments, edges and errors as in `reference.quantize_both`.

    On a GPU blocks of 8-bit floats (MX, groups, squares) and a given pair of scales of the tensor read x once; scales of rows
    or of the tensor read it twice. Everything else is quantized twice.
    """
    given, one_scale = _given(scales, random_bits)
    made: tuple[Quantized, Quantized] = run(QUANTIZE_BOTH, scheme, (packed, tiled, one_scale), (x, *given))
    return made


def _given(scales: Any, random_bits: Any) -> tuple[tuple[Any, ...], bool]:
    """The tensors after x, none where nothing is given; and whether both scales are one tensor, which a kernel reads once."""
    if scales is None and random_bits is None:
        return (), False
    pairs = (_pair(scales, "scales"), _pair(random_bits, "random_bits"))
    rows, columns = (operands_of(None, *side) for side in zip(*pairs, strict=True))
    rows, columns = (side[1:] or (None,) * 4 for side in (rows, columns))
    words = () if random_bits is None else (rows[3], columns[3])
    return (*rows[:3], *columns[:3], *words), rows[0] is columns[0]


def _pair(value: Any, what: str) -> Any:
    """A pair, (None, None) for None; the TypeError of the reference otherwise."""
    if value is not None and (not isinstance(value, (tuple, list)) or len(value) != 2):
        raise TypeError(
            f"{what} is None or a pair, for x along its rows and for x.T; got {type(value).__name__}"
        )
    return (None, None) if value is None else value
