"""QAT layers whose products run by a training recipe: operands are rounded as they will be served, then cast as they train.

y = P(fq(x), fq(W)) + b with fq of the QAT recipe (`ao_lab.qat.layers`, straight-through gradients) and P the three products of
a training recipe (`ao_lab.training`). `convert_for_training_` makes such layers of prepared ones; `quantize_` with
step="convert" and `convert_from_training_` end either part.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

import fast
from ao_lab.qat.layers import QATLinear
from ao_lab.training.casts import own_memory
from ao_lab.training.layers import CLASSES, LowPrecisionLinear, autocast_dtype


class LowPrecisionQATLinear(LowPrecisionLinear, QATLinear):
    """See the module text."""

    plain: ClassVar[type[nn.Linear]] = QATLinear

    def operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and the weight, both rounded. Under autocast inputs are cast first, and the weight is rounded in its own
        dtype, as in QAT alone."""
        recipe, dtype = self.qat.recipe, autocast_dtype(input)
        weight = fast.fake_quantize(own_memory(self.weight), recipe.weight, axis=self.qat.axis)
        input = input if dtype is None else input.to(dtype)
        if self.qat.rule.activation and recipe.activation is not None:
            input = fast.fake_quantize(input, recipe.activation)
        return input, weight

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the layer as it is: it is prepared for QAT."""
        return QATLinear.unsupported_reason(self)

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        by_recipe = LowPrecisionLinear.parameter_reason(self, name)
        return by_recipe and f"{by_recipe}; {QATLinear.parameter_reason(self, name)}"


def class_of(layer: QATLinear) -> type[LowPrecisionLinear] | str:
    """The class of a QAT layer that trains by a recipe, or why it has none."""
    if layer.qat.added:
        return "recipes train no QAT layer with learned or static scales, or with a start step: products of these are dense"
    return LowPrecisionQATLinear


CLASSES[QATLinear] = class_of

__all__ = ["LowPrecisionQATLinear", "class_of"]
