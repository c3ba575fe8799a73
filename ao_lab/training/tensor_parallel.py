"""Tensor parallelism of layers that train by a recipe: torch's two styles, with scales of the whole matrices.

    convert_for_training_(model, "rowwise")
    parallelize_module(model, mesh, {"up": LowPrecisionColwiseParallel(), "down": LowPrecisionRowwiseParallel()})

Each rank multiplies its parts; codes are those that one process would have, as scales are reduced over the ranks where what
they scale is split (`split_scales`). Partial sums over K are rounded to the output's dtype before ranks add them, as in torch's
style. FSDP2 may follow (`fully_shard` over another dimension of the mesh), and gathers weights in their own dtype.

Scales of matrices that lie on several ranks under tensor parallelism: those of the whole matrix.

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
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ao_lab.training.casts import FindScales
from ao_lab.training.layers import LowPrecisionLinear, low_precision_linear, mark_run
from ao_lab.training.scales_over_ranks import amax_over, magnitudes, scales_of
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


class SplitLinear(LowPrecisionLinear):
    """`LowPrecisionLinear` of which this rank computes a part; inputs and outputs are DTensors, which the styles make."""

    split: AxisSplit

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output: split along N, or partial sums over K, without bias."""
        mark_run(self)
        columns = self.split.axis == "N"
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        # A gradient of the input along a split N is a partial sum.
        x = input.to_local(grad_placements=[Partial()] if columns else None)  # type: ignore[attr-defined]
        bias = self.bias.to_local() if columns and self.bias is not None else None  # type: ignore[attr-defined]
        w = self.weight.to_local()  # type: ignore[attr-defined]
        y = low_precision_linear(x, w, bias, self.low_precision, self.split, evaluated=not self.training)
        return DTensor.from_local(y, mesh, [Shard(-1) if columns else Partial()], run_check=False)

    def restore_weight(self) -> None:
        """ValueError: the parts of a split layer are no nn.Linear."""
        raise ValueError(
            "the layer is split by tensor parallelism; convert it back before parallelize_module"
        )


class LowPrecisionColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a converted layer: N is split. Arguments as there; ValueError where a part has no whole blocks."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        split(module, device_mesh, "N")
        return super()._apply(module, device_mesh)


class LowPrecisionRowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a converted layer: K is split. Arguments as there; ValueError where a part has no whole blocks."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        split(module, device_mesh, "K")
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any
    ) -> Any:
        """The sums over ranks, and then the bias, once."""
        outputs = outputs.redistribute(placements=output_layouts)
        if mod.bias is not None:
            outputs = outputs + mod.bias
        return outputs.to_local() if use_local_output else outputs


def split(module: nn.Module, mesh: Any, axis: str) -> None:
    """Let a converted layer compute a part of its axis; ValueError or TypeError, and nothing has changed, where it cannot."""
    if type(module) is not LowPrecisionLinear:
        raise TypeError(
            f"this style is for layers that convert_for_training_ converted, without the FP8 all-gather; got "
            f"{type(module).__name__}"
        )
    settings, ranks = module.low_precision, mesh.size()
    outer = [
        op.scheme.name
        for op in settings.recipe.operands
        if op.scheme is not None and op.scheme.outer is not None
    ]
    if outer:
        raise ValueError(
            f"recipe {settings.recipe.name!r} has a scale over the whole tensor above those of blocks ({outer[0]}), which is "
            f"not reduced over ranks; use another recipe, or FSDP2"
        )
    _, n, k = settings.steps
    name, length, step = (
        ("out_features", module.out_features, n) if axis == "N" else ("in_features", module.in_features, k)
    )
    if length % (ranks * step):
        raise ValueError(
            f"{name} = {length} over {ranks} ranks leaves parts that are no multiple of {step}, as recipe "
            f"{settings.recipe.name!r} asks"
        )
    module.__class__ = SplitLinear
    module.split = AxisSplit(axis, mesh.get_group())  # type: ignore[assignment]


__all__ = ["LowPrecisionColwiseParallel", "LowPrecisionRowwiseParallel"]
