"""Scales of matrices that lie on several ranks under tensor parallelism: those of the whole matrix.

A layer y = x w.T is split along N (`axis="N"`: each rank has rows of w, and columns of y) or along K (columns of w and of x).
Every operand of its three products is a matrix whose last axis is the one that is summed over:

    operand  x      w      g      w.T    g.T    x.T
    shape    M, K   N, K   M, N   K, N   N, M   K, M

One scale for the tensor spans all ranks wherever the split axis is one of the two; a scale for each row where it is the last.
Blocks of a fixed length lie on one rank, as `tensor_parallel` sees to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.training.casts import FindScales
from ao_lab.training.distributed.gather_scales import amax_over, magnitudes, scales_of
from reference import Scales, Scheme
from reference.training.recipe import Operand

#: Axes of each operand; the last is summed over.
AXES = {"x": "MK", "w": "NK", "g": "MN", "w.T": "KN", "g.T": "NM", "x.T": "KM"}


@dataclass(frozen=True)
class AxisSplit:
    """Which axis of a layer is split over a group of ranks; an `autograd.Split`."""

    axis: str
    group: Any

    def find_scales(self, which: str, operand: Operand) -> FindScales:
        """What finds the scales of an operand; None where this rank's part has its own."""
        if operand.scheme is None or self.axis not in AXES[which]:
            return None
        block = operand.scheme.scale.block
        return self.whole if block == "tensor" or (block == -1 and AXES[which][-1] == self.axis) else None

    def whole(self, x: torch.Tensor, scheme: Scheme) -> Scales:
        """Scales of the matrix of which x is this rank's part: of all its rows, or one in all."""
        rows = scheme.scale.block == -1
        amaxes = x.abs().amax(1).float() if rows else magnitudes([x])
        scales = scales_of(amax_over(amaxes, self.group), scheme, x.dtype)
        return Scales(scales.reshape(-1, 1) if rows else scales.reshape(()))


__all__ = ["AxisSplit"]
