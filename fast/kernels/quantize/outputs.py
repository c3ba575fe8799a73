"""What a kernel that makes a tensor and quantizes it at once writes: codes and scales, and whether it can."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast.kernels.quantize.plan import Buffer, Problem, code_buffer, packs, problem_of, scale_buffers
from fast.kernels.scheme.constants import SchemeConstants
from fast.kernels.tile.block_op import BlockOp, block_op
from fast.launch.launcher import interpreted
from reference import Quantized
from reference.formats.rounding import check_mode
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme


@dataclass(frozen=True)
class Outputs:
    """Buffers for the codes and scales of a tensor in blocks of `length` along the last axis."""

    problem: Problem
    length: int
    packed: bool
    block_op: BlockOp
    buffers: dict[str, Buffer]

    @property
    def rule(self) -> SchemeConstants:
        """The constants of the scheme."""
        return self.problem.rule

    def quantized(self) -> Quantized:
        """The result, with the names of its tensors."""
        blocks, zero = self.problem.blocks, "zero" if "zero" in self.buffers else None
        return Quantized(
            "codes", "scale", None, zero, blocks.shape, blocks.axis, self.problem.scheme, self.packed
        )


def outputs(like: torch.Tensor, dtype: str, scheme: Scheme, packed: bool) -> Outputs | None:
    """Outputs for a tensor of the shape and device of `like`, or None where it is quantized by a pass of its own.

    That is so unless a block is a row, or a power of two that divides rows, and unless its scale depends on nothing else.
    """
    if packed:
        packed_shape(tuple(like.shape), scheme.format)  # refuses a 0-d tensor
    check_mode(scheme.rounding, None)
    blocks = Blocks.of(tuple(like.shape), scheme.scale, -1)
    of = problem_of(dtype, scheme, blocks, not interpreted())
    length = _block_length(scheme, tuple(like.shape))
    if of is None or length is None or of.rule.two_level or of.rule.has_outer:
        return None
    sub_byte = packed and scheme.format.bits < 8
    if sub_byte and not packs(of):
        return None
    do = block_op(codes=True, scales=True, packed=sub_byte)
    return Outputs(of, length, packed, do, {"codes": code_buffer(of, sub_byte), **scale_buffers(of)})


def _block_length(scheme: Scheme, shape: tuple[int, ...]) -> int | None:
    """Elements of a block along the last axis, or None where a kernel over rows does not cover them."""
    block = scheme.scale.block
    if not isinstance(block, int) or not shape:
        return None
    length = shape[-1] if block == -1 else min(block, shape[-1])
    if length == 0 or shape[-1] % length or (length & (length - 1) and length != shape[-1]):
        return None
    return length
