"""What FSDP2 sends of a shard and what it makes of what arrives: codes and scales of `fast.quantize` of the whole weight.

The shard is cast to the dtype that FSDP2 would gather in (`MixedPrecisionPolicy.param_dtype`) and then quantized, so that
gathering codes instead of values changes no bit of what follows. Scales along rows lie beside their rows and are sent with
them; one scale for the tensor is reduced over the ranks (`gather_scales`). How codes and scales travel, and what happens where
ranks do not divide the rows, is that of quantized weights: `ao_lab.tensor.fsdp`. There a rowwise weight takes two bytes an
element, as the bytes of its scales need a second tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fast
from ao_lab.config.recipe import Recipe as Storage
from ao_lab.tensor.fsdp import Metadata, gathered_parts, refill, whole_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from ao_lab.training.distributed.cast_on_gather import CastOnGather
from ao_lab.training.distributed.gather_scales import scale_of
from reference import Scales, Scheme
from reference.training.recipe import Recipe

Sent = tuple[QuantizedTensor, Metadata]


@torch.no_grad()
def fsdp_pre_all_gather(
    self: CastOnGather, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[torch.Tensor, ...], Sent]:
    """The tensors to gather, and what stays on this rank (codes and scales of the shard, and what they are): a method of
    `CastOnGather`."""
    dtype = mp_policy.param_dtype or self.dtype
    x, scales, whole = self.dense.to(dtype), None, tuple(outer_size)
    if self.shape[1:] != whole[1:]:
        raise ValueError(
            f"weights that travel as codes are split along axis 0, got a shard {tuple(self.shape)} of {whole}; leave out "
            f"shard_placement_fn, or the FP8 all-gather"
        )
    if self.scheme.scale.block == "tensor":
        scales = Scales(scale_of(self, whole[0], mesh.get_group(), module, dtype))
    q = fast.quantize(x, self.scheme, scales=scales)
    if not x.numel() and scales is None:  # without strides of 0, so that its bytes can be seen
        q = replace(q, scale=q.scale.new_empty(q.scale.shape))
    shard = from_quantized(q, Storage(weight=self.scheme), dtype)
    parts, metadata = gathered_parts(shard, mesh, whole)
    return parts, (shard, metadata)


@torch.no_grad()
def fsdp_post_all_gather(
    self: CastOnGather,
    outputs: tuple[torch.Tensor, ...],
    kept: Sent,
    param_dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """The whole weight and the tensors of which FSDP2 takes the memory back; or `out` brought up to date, and None: a method of
    `CastOnGather`."""
    shard, metadata = kept
    if shard.scale.is_cuda:  # made on the stream that sends, and read on this one
        shard.scale.record_stream(torch.cuda.current_stream())
    if out is None:
        # The scale of the shard may be one of many that were found together; the weight has one of its own.
        own = shard.remade({**shard.parts, "scale": shard.scale.clone()})
        return whole_weight(own, outputs, metadata, param_dtype)
    refill(out, outputs, metadata)
    if "scale" not in metadata[0]:
        out.scale.copy_(shard.scale)
    return None


# FSDP2 asks a shard for these two methods.
for hook in (fsdp_pre_all_gather, fsdp_post_all_gather):
    setattr(CastOnGather, hook.__name__, hook)


def gather_recipe(recipe: Recipe) -> Recipe:
    """The recipe where the weight arrives as codes of its output's product: w.T for the input's gradient is made of these.

    One scale for the tensor: the codes of w.T are those of w. Blocks along rows: w.T is quantized from what the codes stand
    for, which is exact for powers of two as scales but where a second rounding underflows. ValueError for a recipe whose
    weights cannot travel so.
    """
    reason = unsupported_reason(recipe)
    if reason is not None:
        raise ValueError(
            f"recipe {recipe.name!r} gathers weights in their own dtype, not as codes: {reason}; leave out the FP8 all-gather"
        )
    operand = recipe.input_grad.b
    if operand.scheme == recipe.output.b.scheme and operand.scheme and operand.scheme.scale.block == "tensor":
        return recipe
    product = replace(recipe.input_grad, b=replace(operand, source="output"))
    return replace(recipe, name=f"{recipe.name}_gathered", input_grad=product)


def unsupported_reason(recipe: Recipe) -> str | None:
    """Why a recipe's weights cannot be gathered as codes; None where they can."""
    operand = recipe.output.b
    scheme = operand.scheme
    if scheme is None:
        return "they are not quantized"
    if operand.hadamard or scheme.rounding == "stochastic" or scheme.outer is not None:
        return f"the scheme {scheme.name} needs more than its own block of the weight"
    if scheme.format.bits != 8:
        return f"{scheme.element} is no format of 8 bits"
    block = scheme.scale.block
    if block == "tensor":
        return None if recipe.input_grad.b.scheme == scheme else "the input's gradient takes other codes"
    if not isinstance(block, int):
        return f"blocks of {block} span rows, which lie on several ranks"
    return None if has_powers_of_two(scheme) else f"scales of {scheme.name} are no powers of two"


def has_powers_of_two(scheme: Scheme) -> bool:
    """Whether every scale is a power of two."""
    return scheme.scale.power_of_two or scheme.scale.rule == "ratio_pow2"


__all__ = ["gather_recipe", "unsupported_reason"]
