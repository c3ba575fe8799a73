"""QAT layers whose weight is N:M sparse: masked first, then rounded as it will be stored.

y = fq(x) fq(W * m)^T + b with fq of the QAT recipe (`ao_lab.qat.layers`) and the mask m of a sparse training
(`ao_lab.sparsity.training`), whose rule says what of the gradient of W * m the weight gets. `sparsify_` makes such layers of
prepared ones; `finish_sparsity_` makes them QAT layers again, with weights that are exactly N:M, and step="convert" quantizes
those. Schemes that have a zero keep the pattern.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from ao_lab.qat.autograd import qat_linear
from ao_lab.qat.layers import QATLinear
from ao_lab.sparsity.training.autograd import mask_weight
from ao_lab.sparsity.training.config import SparseTrainingConfig
from ao_lab.sparsity.training.layers import CLASSES, SparseLinear
from ao_lab.training.layers import mark_run


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


CLASSES[QATLinear] = SparseQATLinear

__all__ = ["SparseQATLinear"]
