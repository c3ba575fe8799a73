"""Layers that train sparse: nn.Linear whose forward masks its weight.

`sparsify_(model, SparseTrainingConfig(...))` gives a module this class, in place: the module, its weight, its hooks and the
names in its state_dict stay what they were, and isinstance(module, nn.Linear) stays true. What was added is `module.sparse` and
two buffers: `sparse_mask` on every rank, all True in dense phases, and `sparse_step`, how many steps have been done
(`step_sparsity_`). Layers that share a weight share both. Saved training goes on from them, with the same bits; checkpoints of
the dense model load too, strictly: the mask is found again from what was loaded, and the count stays. Weights with the zeros of
another pattern are an error there, as they are in `sparsify_`.

The buffer of a mask, which is what a state_dict has, is bool of the weight's shape; with products="sparse_wgmma" uint8
(out, ceil(in / 8)), its bits (`fast.kernels.sm90_sparse24_gemm.arrange`, as `numpy.packbits`): an eighth of the memory. A
state_dict with either one loads into both. The attribute `layer.sparse_mask` is bool always: the buffer where that is, else a
copy, and so gives `get_buffer`: only the buffer (`layer.stored_mask`) can be written to. Nobody may average bits: leave buffers
out of averaged models (`AveragedModel(use_buffers=False)`, torch's default).

A hook of torch's that runs before the step of every optimizer, of eager and compiled models and under FSDP2 alike: a weight
whose last step was not counted is not stepped again. That is an error before the optimizer changes anything. What writes to
weights without a `torch.optim.Optimizer`, or in a compiled `optimizer.step`, is not seen.

The product is y = x (W * m)^T + b. Kept for backward are x, W and the mask, never a masked copy of W, which would double what
FSDP2 gathers: it is masked again. W * m is W where m is True and +0 elsewhere: the mask decides, so what was dropped may be
anything, and finite weights give no NaN. With dense products outputs and gradients are those of torch's own linear layer of
the masked weight, bit for bit: the same operators with the same operands.

Under autocast operands are cast to its dtype, W before it is masked; the gradient of W is cast back before the rule of
`gradient` sees it, so that this works on the master weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ao_lab.sparsity.training.config import SPARSE_PHASE, SparseTrainingConfig, phase
from ao_lab.sparsity.training.masks import (
    bool_mask,
    counted_in_graph,
    find_mask,
    is_distributed,
    other_pattern_reason,
    stored_as,
    zero_pruned_,
)
from ao_lab.sparsity.training.products import PRODUCTS
from ao_lab.transforms.layers import ConvertedModule
from fast.dispatch import functional_transform
from fast.kernels.sm90_sparse24_gemm.arrange import unpack_bits
from fast.ops import once_differentiable
from fast.sparsity.compress import masked
from reference.sparsity.activation import squared_relu_24


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


#: Of a layer: whether an optimizer has stepped its weight since its steps were last counted.
PENDING = "sparse_pending"
_watched: WeakSet[nn.Module] = WeakSet()
_hooks: list[Any] = []


def watch(layer: nn.Module) -> None:
    """Look at a layer's weight from now on; the hook is set with the first one."""
    settle(layer)
    _watched.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def settle(layer: nn.Module) -> None:
    """The layer's steps have been counted."""
    setattr(layer, PENDING, False)


def forget(layer: nn.Module) -> None:
    """Look at the layer no more."""
    _watched.discard(layer)
    layer.__dict__.pop(PENDING, None)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """RuntimeError where a weight that is about to be stepped has a step that was not counted."""
    if torch.compiler.is_compiling() or not _watched:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Of layers whose steps a CUDA graph counts, replays say nothing here.
    layers = [
        layer
        for layer in _watched
        if id(layer.weight) in held and _has_gradient(layer) and not counted_in_graph(layer.sparse_step)  # type: ignore[arg-type]
    ]
    if any(getattr(layer, PENDING) for layer in layers):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called twice without ao_lab.step_sparsity_(model), so that masks of sparse "
            f"layers would be out of date and pruned weights move; call it after each optimizer.step()"
        )
    for layer in layers:
        setattr(layer, PENDING, True)


def _has_gradient(layer: nn.Module) -> bool:
    weight: Any = layer.weight
    return weight.grad is not None


MASK, STEP = "sparse_mask", "sparse_step"
ADDED = (MASK, STEP)


class SparseLinear(ConvertedModule, nn.Linear):
    """nn.Linear that trains with an N:M sparse weight; see the module text."""

    sparse: SparseTrainingConfig
    sparse_step: torch.Tensor
    #: Backward's part of the configuration, in the phase that the layer is in.
    sparse_rule: Rule
    #: What the module was before.
    plain: ClassVar[type[nn.Linear]] = nn.Linear

    @classmethod
    def unsupported_config(cls, config: SparseTrainingConfig) -> str | None:
        """Why layers of this class do not train by a configuration; None where they do."""
        return None

    @property
    def stored_mask(self) -> torch.Tensor:
        """The buffer of the mask: bool, or uint8 of its bits."""
        return cast("torch.Tensor", self._buffers[MASK])

    @property
    def sparse_mask(self) -> torch.Tensor:
        """The mask, bool of the weight's shape: the buffer itself where that is bool."""
        return bool_mask(self.stored_mask, self.in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (..., K) times the masked weight (N, K) transposed, plus bias; see `ao_lab.sparsity.training.layers`.

        Raises TypeError for a weight that is split between ranks, and as `masked_linear` does.
        """
        if is_distributed(self.weight):
            raise TypeError(
                "SparseLinear: the weight is a DTensor; shard layers by fully_shard, and call the module that was sharded. "
                "Tensor parallelism has no sparse layers"
            )
        return self.product(input)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the masked weight."""
        return masked_linear(input, self.weight, self.stored_mask, self.bias, self.sparse_rule)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies: their steps are counted for themselves."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self)

    def renew_mask(self, done: int) -> torch.Tensor:
        """`stored_mask`, written: that of the weight as it is, after `done` steps; all True in dense phases."""
        mask = self.stored_mask
        if phase(self.sparse, done) == SPARSE_PHASE:
            return find_mask(self.weight, self.sparse, mask)
        # Lengths of rows that are stored as bits are multiples of 16: no bit is left over.
        return mask.fill_(True if mask.dtype == torch.bool else 0xFF)

    def settle(self, done: int) -> None:
        """After `done` steps or loaded values: products of the phase, zeros where masks are fixed."""
        self.sparse_rule = rule(self.sparse, done)
        if self.sparse.masks == "fixed" and phase(self.sparse, done) == SPARSE_PHASE:
            zero_pruned_(self.weight, self.stored_mask)
        settle(self)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *rest: Any,
    ) -> None:
        """What is missing of the buffers is no error: a dense checkpoint has none. Without a mask it is found again; a
        mask that is stored as bool loads where bits are, and the other way round."""
        given, own = state_dict.get(prefix + MASK), self.stored_mask
        if isinstance(given, torch.Tensor):
            # Zeros and ones of the weight's own shape are no bits.
            whole = given.dtype == torch.uint8 and given.shape == self.weight.shape
            given = given.bool() if whole else given
            if {given.dtype, own.dtype} == {torch.bool, torch.uint8}:
                given = stored_as(given, own.dtype, self.in_features)
            state_dict = {**state_dict, prefix + MASK: given}
        if (why := self._refused(state_dict, prefix)) is not None:
            rest[-1].append(
                f"{prefix}weight: {why}"
            )  # load_state_dict raises with it; nothing of the layer is loaded
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        missing = [name for name in ADDED if prefix + name not in state_dict]
        missing_keys[:] = [key for key in missing_keys if key not in [prefix + name for name in missing]]
        if self.weight.is_meta or self.stored_mask.is_meta:
            return
        done = int(self.sparse_step)
        if MASK in missing and prefix + "weight" in state_dict:
            self.renew_mask(done)
        self.settle(done)

    def _refused(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Why no mask can be found for a weight that comes without one; None where it can, or comes with one."""
        given, steps = state_dict.get(prefix + "weight"), state_dict.get(prefix + STEP, self.sparse_step)
        if (
            not isinstance(given, torch.Tensor)
            or prefix + MASK in state_dict
            or given.is_meta
            or steps.is_meta
        ):
            return None
        if given.shape != self.weight.shape or phase(self.sparse, int(steps)) != SPARSE_PHASE:
            return None
        return other_pattern_reason(given, self.sparse)

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the layer as it is."""
        return (
            f"it trains {self.sparse.pattern} sparse; ao_lab.finish_sparsity_(model) makes it {self.plain.__name__} again (for "
            f"both at once, quantize_ with a QATConfig comes before sparsify_)"
        )

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        return f"trains {self.sparse}" if name == "weight" else None

    def training_record(self) -> dict[str, str]:
        """The configuration, beside what the layer trains with otherwise."""
        return {**super().training_record(), "sparsity": str(self.sparse)}

    def extra_repr(self) -> str:
        """torch's own, and the configuration."""
        return f"{super().extra_repr()}, {self.sparse}"


#: By the class of a layer, the one as which it trains sparse.
TRAINS_AS: dict[type[nn.Module], type[SparseLinear]] = {nn.Linear: SparseLinear}


def rule(config: SparseTrainingConfig, done: int) -> Rule:
    """What backward needs after `done` steps: dense phases have dense products."""
    product = config.products if phase(config, done) == SPARSE_PHASE else "dense"
    return Rule(config.gradient, config.decay, product, config.transposable)


def train_sparse(
    module: nn.Linear, config: SparseTrainingConfig, mask: torch.Tensor, step: torch.Tensor
) -> SparseLinear:
    """Make an nn.Linear train sparse; mask and step are those of all layers with its weight."""
    module.register_buffer(MASK, mask)
    module.register_buffer(STEP, step)
    module.__class__ = TRAINS_AS[type(module)]
    layer = cast("SparseLinear", module)
    layer.sparse, layer.sparse_rule = config, rule(config, 0)
    watch(layer)
    return layer


def plain_again(module: nn.Module) -> None:
    """Undo `train_sparse`, also where it was not finished; the weight stays as it is."""
    for name in ADDED:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    forget(module)
    for name in ("sparse", "sparse_rule"):
        module.__dict__.pop(name, None)
    if isinstance(module, SparseLinear):
        module.__class__ = module.plain  # type: ignore[assignment]


class SquaredReLU24(torch.autograd.Function):
    """Values of `reference.squared_relu_24`, and their gradient; the mask is a constant of it.

    With u an operation rounded to float32 and g the gradient of y: kept and positive elements get 2 u(g x), cast to x's dtype
    once; others +0, and NaN of x gives NaN. Kept for backward is x alone; the mask is found again. Finite x and g give no NaN:
    g x is made first, and what overflows is infinite. Source: Haziza et al., "Accelerating Transformer Inference and Training
    with 2:4 Activation Sparsity" (arXiv 2503.16672). The product with the next weight is a dense one of a matrix with zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The values; x is kept."""
        ctx.save_for_backward(x)
        return activated(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        """See the class."""
        (x,) = ctx.saved_tensors
        mask = activated(x)[1] & ~(x <= 0)
        product = (g.float() * x.float()).mul_(2).to(x.dtype)
        return torch.where(mask, product, torch.zeros((), dtype=x.dtype, device=x.device))


def activated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and mask of x, as operators."""
    values, mask = torch.ops.ao_lab.squared_relu_24(x)
    return values, mask


@torch.library.custom_op("ao_lab::squared_relu_24", mutates_args=())
def squared_relu_24_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.squared_relu_24` of a tensor."""
    result = squared_relu_24(x)
    return result.values, result.mask


@squared_relu_24_op.register_vmap
def _batched(
    info: Any, in_dims: tuple[int], x: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    # The mask is of the last axis: others, a batch's among them, are alike.
    return activated(x.movedim(in_dims[0], 0)), (0, 0)


@squared_relu_24_op.register_fake
def _activation_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def sparse_squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The squared ReLU of x (..., K), 2:4 along K: shape and dtype of x (float32, bfloat16, float16), with a gradient.

    Rounding and edges as `SquaredReLU24` says. Raises TypeError for what is no such tensor, ValueError where 4 does not divide
    K.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"sparse_squared_relu takes a torch tensor, got {type(x).__name__}: {x!r:.60}")
    if not torch.compiler.is_compiling() and functional_transform() is not None:
        kept = activated(x.detach())[1] & (x.detach() > 0) | x.detach().isnan()
        return torch.where(kept, x, 0).square()
    y: torch.Tensor = SquaredReLU24.apply(x)  # type: ignore[no-untyped-call]
    return y


class SparseSquaredReLU(nn.Module):
    """`sparse_squared_relu` as a module, in the place of a squared ReLU between two linear layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See `sparse_squared_relu`."""
        return sparse_squared_relu(input)


Grad = torch.Tensor | None


__all__ = ["SparseSquaredReLU", "sparse_squared_relu"]
