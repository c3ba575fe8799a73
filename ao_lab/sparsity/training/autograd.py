"""The linear layer with a masked weight, in autograd: y = x (W * m)^T + b and its gradients.

Kept for backward are x, W and the mask, never a masked copy of W, which would double what FSDP2 gathers: it is masked again.
W * m is W where m is True and +0 elsewhere: the mask decides, so what was dropped may be anything, and finite weights give no
NaN. With dense products outputs and gradients are those of torch's own linear layer of the masked weight, bit for bit: the same
operators with the same operands.

Under autocast operands are cast to its dtype, W before it is masked; the gradient of W is cast back before the rule of
`gradient` sees it, so that this works on the master weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.sparsity.training.products import PRODUCTS, masked
from fast.device import functional_transform
from fast.kernels.sparse_mm.bits import unpack_bits
from fast.second_derivatives import once_differentiable

Grad = torch.Tensor | None


@dataclass(frozen=True)
class Rule:
    """What a layer's backward needs of its configuration. product: a name of `products.PRODUCTS`."""

    gradient: str
    decay: float
    product: str
    transposable: bool


class MaskedLinear(torch.autograd.Function):
    """y of x (..., K), W (N, K), its mask and a bias (N)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        rule: Rule,
    ) -> torch.Tensor:
        """The output; x is kept where the weight's gradient is wanted."""
        wants_x, wants_w = ctx.needs_input_grad[:2]
        # SR-STE reads W for its own gradient too.
        keeps_w = wants_x or (wants_w and rule.gradient == "sr-ste")
        keeps_mask = keeps_w or (wants_w and rule.gradient == "masked")
        ctx.save_for_backward(x if wants_w else None, w if keeps_w else None, mask if keeps_mask else None)
        ctx.rule, ctx.shape, ctx.dtype, ctx.own = rule, x.shape, x.dtype, w.dtype
        return PRODUCTS[rule.product].output(x, w.to(x.dtype), mask, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, None, Grad, None]:
        """Gradients of x, W and bias."""
        x, w, mask = ctx.saved_tensors
        rule, (wants_x, wants_w, _, wants_bias, _) = ctx.rule, ctx.needs_input_grad
        rows, product = g.reshape(-1, g.shape[-1]), PRODUCTS[rule.product]
        x, dx, dense, db = x.reshape(-1, x.shape[-1]) if wants_w else x, None, None, None
        if wants_x and wants_w and wants_bias and product.all_grads is not None:
            dx, dense, db = product.all_grads(rows, x, w.to(ctx.dtype), mask, rule.transposable)
        else:
            if wants_x:
                dx = product.input_grad(rows, w.to(ctx.dtype), mask, rule.transposable)
            if wants_w:
                dense, db = product.both_grads(rows, x) if wants_bias else (rows.t().mm(x), None)
            elif wants_bias:
                db = product.bias_grad(rows)
        dx = None if dx is None else dx.reshape(ctx.shape)
        dw = None if dense is None else weight_gradient(dense.to(ctx.own), w, mask, rule)
        return dx, dw, None, db, None


def weight_gradient(
    g: torch.Tensor, w: torch.Tensor | None, mask: torch.Tensor | None, rule: Rule
) -> torch.Tensor:
    """What W gets of the gradient g of the masked weight; w and mask are read where the rule needs them."""
    if rule.gradient == "straight-through" or mask is None:
        return g
    if rule.gradient == "masked":
        return masked(g, mask)
    if w is None or rule.decay == 0:
        return g
    kept = mask if mask.dtype == torch.bool else unpack_bits(mask, w.shape[-1])
    if torch.compiler.is_compiling() or functional_transform() is None:
        made: torch.Tensor = torch.ops.ao_lab.sr_ste_gradient(g, w, kept, rule.decay)
        return made
    # Transforms know operations, no operator of ours; and a sum in place holds no batch.
    return torch.where(kept, g, (w.float().mul(rule.decay) + g.float()).to(g.dtype))


class MaskWeight(torch.autograd.Function):
    """W * m for layers whose product is another's."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, mask: torch.Tensor, rule: Rule) -> torch.Tensor:
        """The masked weight."""
        ctx.save_for_backward(w if rule.gradient == "sr-ste" else None, mask)
        ctx.rule = rule
        return masked(w, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, None, None]:
        """`weight_gradient`."""
        w, mask = ctx.saved_tensors
        return weight_gradient(g, w, mask, ctx.rule), None, None


class TransformedMaskWeight(torch.autograd.Function):
    """`MaskWeight` for transforms of torch.func; compilers take no function that has a jvp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: torch.Tensor, mask: torch.Tensor, rule: Rule) -> torch.Tensor:
        """The masked weight."""
        return masked(w, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what `weight_gradient` reads."""
        w, mask, ctx.rule = inputs
        ctx.save_for_backward(w if ctx.rule.gradient == "sr-ste" else None, mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, None, None]:
        """`weight_gradient`."""
        w, mask = ctx.saved_tensors
        return weight_gradient(grads[0], w, mask, ctx.rule), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        """The tangent by the same rule; NotImplementedError for SR-STE, which adds a decay to gradients."""
        if ctx.rule.gradient == "sr-ste":
            raise NotImplementedError(
                f"SparseLinear: gradient='sr-ste' of a weight of shape {tuple(tangents[0].shape)} has no forward-mode "
                f"derivative (torch.func.jvp, jacfwd, hessian); use reverse mode (grad, vjp, jacrev)"
            )
        return weight_gradient(tangents[0], None, ctx.saved_tensors[-1], ctx.rule)


def mask_weight(w: torch.Tensor, mask: torch.Tensor, rule: Rule) -> torch.Tensor:
    """w where the bool mask of its shape is True, +0 elsewhere, in autograd: what w gets is the rule's."""
    transformed = not torch.compiler.is_compiling() and functional_transform() is not None
    kind = TransformedMaskWeight if transformed else MaskWeight
    made: torch.Tensor = kind.apply(w, mask, rule)  # type: ignore[no-untyped-call]
    return made


@torch.library.custom_op("ao_lab::sr_ste_gradient", mutates_args=())
def sr_ste_gradient(g: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, decay: float) -> torch.Tensor:
    """`reference.sr_ste_gradient` in torch's operations, the same bits.

    An operator, as compilers would contract the product and the sum into one rounding.
    """
    pull = w.float().mul(decay)  # a factor of float32: torch rounds it to that first
    return torch.where(mask, g, pull.add_(g.float()).to(g.dtype))


@sr_ste_gradient.register_fake
def _fake(g: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, decay: float) -> torch.Tensor:
    return torch.empty_like(g)


def masked_linear(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, rule: Rule
) -> torch.Tensor:
    """x (..., K) times (w * mask)^T plus bias, in autograd; see the module text. w: (N, K), mask: bool of its shape, or bits.

    Raises TypeError where x and w differ in dtype outside of autocast, ValueError where K is another, torch's RuntimeError
    where x has no axis, NotImplementedError for sparse products under a transform of torch.func.
    """
    if not x.dim():
        return torch.nn.functional.linear(x, w, bias)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
        bias = None if bias is None else bias.to(x.dtype)
    elif x.dtype != w.dtype:
        raise TypeError(
            f"SparseLinear: inputs are {x.dtype} and the weight is {w.dtype}; cast one, or use torch.autocast"
        )
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"SparseLinear: the last axis of inputs has {w.shape[1]} elements, got shape {tuple(x.shape)}"
        )
    if not torch.compiler.is_compiling() and (transform := functional_transform()) is not None:
        if rule.product != "dense":
            raise NotImplementedError(
                f"SparseLinear: {transform} of a layer of shape {tuple(w.shape)} with products={rule.product!r}; train it with "
                f"products='dense'"
            )
        return torch.nn.functional.linear(x, mask_weight(w.to(x.dtype), mask, rule), bias)
    y: torch.Tensor = MaskedLinear.apply(x, w, mask, bias, rule)  # type: ignore[no-untyped-call]
    return y


__all__ = ["MaskWeight", "MaskedLinear", "Rule", "mask_weight", "masked_linear", "weight_gradient"]
