"""`fold_gain` and `rotate` for torch tensors; `reference.calibration.rotation` states the rules.

CPU tensors run the reference; elsewhere the same sums run in the same order as float64 operations of torch, the same bits. A
matrix that is given is multiplied by the library's product, whose order is its own.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.calibration.inputs import float_tensor, numpy_of, rounded, torch_of
from reference.calibration import rotation as rule
from reference.calibration.rotation import block_of, check_gain, mixed
from reference.quantize.blocks import normalize_axis

#: Elements that are mixed at a time.
CHUNK = 1 << 26


def fold_gain(gain: torch.Tensor, w: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """w * gain along the last axis, rounded once to w's dtype or `dtype`, on w's device: see `reference.fold_gain`."""
    gain, w = float_tensor(gain, "fold_gain", "gain"), float_tensor(w, "fold_gain", "w")
    check_gain(tuple(gain.shape), tuple(w.shape))
    return rounded(w.double() * gain.to(w.device).double(), w.dtype if dtype is None else dtype)


def rotate(
    w: torch.Tensor,
    rotation: int | torch.Tensor,
    *,
    axis: int = -1,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """w R along an axis, block by block, or w R^T, rounded once to w's dtype or `dtype`: see `reference.rotate`.

    rotation: a block size, or an orthogonal (b, b) tensor on any device.
    """
    w = float_tensor(w, "rotate", "w")
    if w.device.type != "cpu":
        return rotate_on_device(w, rotation, axis=axis, inverse=inverse, dtype=dtype)
    dtype = w.dtype if dtype is None else dtype
    result = rule.rotate(numpy_of(w), _rotation(rotation), axis=axis, inverse=inverse, dtype=dtype)
    return torch_of(result)  # type: ignore[no-any-return]


def rotate_on_device(
    w: torch.Tensor,
    rotation: Any,
    *,
    axis: int = -1,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same by torch operations on w's device, whatever it is."""
    if not w.dim():
        raise ValueError("rotate takes an array with an axis, got a single number; reshape it")
    axis = normalize_axis(axis, tuple(w.shape))
    block, matrix = block_of(_rotation(rotation), w.shape[axis])
    moved = w.movedim(axis, -1)
    flat = moved.reshape(-1, block)
    dtype = w.dtype if dtype is None else dtype
    rotated = torch.empty(flat.shape, dtype=dtype, device=w.device)
    table = None if matrix is None else torch.from_numpy(matrix).to(w.device)
    step = max(CHUNK // block, 1)
    for start in range(0, len(flat), step):
        rows = flat[start : start + step].double()
        product = mixed(rows, inverse) if table is None else rows @ (table.T if inverse else table)
        rotated[start : start + step] = rounded(product, dtype)
    return rotated.reshape(moved.shape).movedim(-1, axis).contiguous()


def _rotation(rotation: Any) -> Any:
    """A block size as it is, also one in a tensor without axes; a matrix as a NumPy array."""
    return numpy_of(rotation) if isinstance(rotation, torch.Tensor) and rotation.dim() else rotation


__all__ = ["fold_gain", "rotate"]
