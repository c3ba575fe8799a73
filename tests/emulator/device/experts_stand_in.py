"""`fast.kernels.mixed_mm.experts` on CPU tensors: its launches run in the emulator."""

from __future__ import annotations

import torch

from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.mixed_mm.experts import ExpertsProduct
from fast.kernels.mixed_mm.variants import Variant
from tests.emulator.device.mixed_stand_in import MixedStandIn


class ExpertsStandIn(MixedStandIn):
    """A device for products of experts."""

    def of_experts(
        self, x: torch.Tensor, w: ArrangedWeight, ends: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """The product by a variant; rows that nothing writes are NaN."""
        operands = x, w.words, w.scale, w.zero, ends
        for one in operands:
            if one is not None:
                self.add(one)
        with self.installed():
            made = ExpertsProduct(x, w, variant)(*operands)
        assert made is not None
        self.check_guards()
        return made


__all__ = ["ExpertsStandIn"]
