"""Configurations with few levels: `NF4WeightOnlyConfig`, and `LowBitWeightOnlyConfig` for the levels that ParetoQ trains.

Those (Liu et al., arXiv 2502.02631) have one scale per row or group:

    quantize_(model, QATConfig(LowBitWeightOnlyConfig(bits=1.58), step="prepare", learn_scales=True))

Below 3 bits levels are stretched: 3 or 4 of them, balanced, each the middle of an interval of one width, and the largest
magnitude is the end of the outermost interval (`ternary`: -1, 0, 1; `stretched2`: -1.5, -0.5, 0.5, 1.5). From 3 bits on they
are the default symmetric integers, trained by learned step sizes. Learned scales start where the paper's do, at the largest
magnitude of their row; their gradient is that of `reference.fake_quantize_vjp`, the derivative of what was computed.

Where this is not the authors' program: an element exactly at zero takes -0.5 in `stretched2` (there +0.5); elements saturate
beyond the end of the outermost interval (there from 0.99 of it on); a saturated ternary element moves the scale by its value
(there by 1.5 times it); "lsq" counts the elements of a block (there those of the tensor).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ao_lab.config.base import Config
from ao_lab.config.granularity import ROWS, block_of
from ao_lab.config.recipe import integer_scheme, stretched
from reference import SCHEMES, Scheme

#: Elements of fewer than 3 bits; log2(3) is 1.58.
STRETCHED = {1.58: "ternary", 2: "stretched2"}


@dataclass(frozen=True)
class LowBitWeightOnlyConfig(Config):
    """Weights of 1.58 (three levels), 2, 3 or 4 bits."""

    bits: float = 2
    granularity: Any = ROWS

    def _weight(self) -> Scheme:
        if self.bits not in (*STRETCHED, 3, 4):
            raise ValueError(
                f"LowBitWeightOnlyConfig: bits is 1.58 (three levels), 2, 3 or 4; got {self.bits!r}"
            )
        block, element = block_of(self.granularity), STRETCHED.get(self.bits)
        if element is not None:
            return stretched(element, block)
        return integer_scheme(int(self.bits), block, asymmetric=False)


@dataclass(frozen=True)
class NF4WeightOnlyConfig(Config):
    """NF4 with double quantization (QLoRA) for the weight."""

    block_size: int = 64
    scaler_block_size: int = 256
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (64,), "scaler_block_size": (256,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nf4"]


__all__ = ["LowBitWeightOnlyConfig", "NF4WeightOnlyConfig"]
