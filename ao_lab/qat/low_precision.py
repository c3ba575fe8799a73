"""QAT layers whose products run by a training recipe: operands are rounded as they will be served, then cast as they train.

y = P(fq(x), fq(W)) + b with fq of the QAT recipe (`ao_lab.qat.layers`, straight-through gradients) and P the three products of
a training recipe (`ao_lab.training`). `convert_for_training_` makes such layers of prepared ones; `quantize_` with
step="convert" and `convert_from_training_` end either part.

QAT layers whose weight is N:M sparse: masked first, then rounded as it will be stored.

y = fq(x) fq(W * m)^T + b with fq of the QAT recipe (`ao_lab.qat.layers`) and the mask m of a sparse training
(`ao_lab.sparsity.training`), whose rule says what of the gradient of W * m the weight gets. `sparsify_` makes such layers of
prepared ones; `finish_sparsity_` makes them QAT layers again, with weights that are exactly N:M, and step="convert" quantizes
those. Schemes that have a zero keep the pattern.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

import fast
from ao_lab.qat.autograd import qat_linear
from ao_lab.qat.layers import QATLinear
from ao_lab.sparsity.training.config import SparseTrainingConfig
from ao_lab.sparsity.training.layers import TRAINS_AS, SparseLinear, mask_weight
from ao_lab.training.casts import own_memory
from ao_lab.training.layers import CLASSES, LowPrecisionLinear, autocast_dtype, mark_run


class SparseQATLinear(SparseLinear, QATLinear):
    """See the module text."""

    plain: ClassVar[type[nn.Linear]] = QATLinear

    @classmethod
    def unsupported_config(cls, config: SparseTrainingConfig) -> str | None:
        """Why QAT layers do not train by a configuration."""
        if config.products == "dense":
            return None
        return f"QAT layers multiply rounded matrices densely, not by products={config.products!r}; take products='dense'"

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """The product of the rounded operands, the weight masked before."""
        mark_run(self)
        weight = mask_weight(self.weight, self.sparse_mask, self.sparse_rule)
        return qat_linear(input, weight, self.bias, self.given(), self.qat.rule)

    def conversion_reason(self) -> str | None:
        """Why step "convert" cannot quantize the layer now: the parameter is not masked."""
        return (
            f"trains {self.sparse.pattern} sparse; call ao_lab.finish_sparsity_(model) before step='convert'"
        )

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        said = SparseLinear.parameter_reason(self, name)
        prepared = QATLinear.parameter_reason(self, name)
        return f"{said}; {prepared}" if said else prepared


TRAINS_AS[QATLinear] = SparseQATLinear


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
