"""Layers in quantization-aware training: nn.Linear and nn.Embedding whose forward rounds what they multiply.

`quantize_(model, QATConfig(..., step="prepare"))` gives a module one of these classes, in place: the module, its weight, its
hooks and the names in its state_dict stay what they were, and isinstance(module, nn.Linear) stays true. What was added is
`module.qat`, and, where the configuration asks for it, buffers and parameters whose names begin with `qat_`. At the end stand
where learned scales start, and layers that also train sparse or by a recipe.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import nn

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.qat import linear
from ao_lab.qat.linear import Given, Rule, qat_linear, refuse_dtensor, with_nan
from ao_lab.sparsity.training.config import SparseTrainingConfig
from ao_lab.sparsity.training.layers import TRAINS_AS, SparseLinear, mask_weight
from ao_lab.training.casts import own_memory
from ao_lab.training.layers import (
    CLASSES,
    RAN,
    LowPrecisionLinear,
    autocast_dtype,
    low_precision_linear,
    mark_run,
)
from ao_lab.transforms.layers import ConvertedModule
from fast.dispatch import PLAIN, functional_transform, is_traced
from fast.ops import record_name
from reference import Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import record_of

#: The smallest scale of the default schemes.
SMALLEST = 2.0**-126
#: Parts of the rule's scale that are tried, down to a tenth: two bits go to a quarter, more bits stay far above.
PARTS = tuple(1 - number / 40 for number in range(37))
NOTHING = Given()
PREPARED = (
    "it is prepared for QAT; QATConfig(..., step='convert') quantizes it, QATConfig(step='convert') makes it dense again, "
    "which 2:4 storage takes then"
)
#: What a prepared module may have beside its own state.
ADDED = ("qat_scale", "qat_zero", "qat_input_scale", "qat_input_zero", "qat_step")
#: Names of adapters (`ao_lab.qat.lora`).
ADAPTERS = ("lora_a", "lora_b")
#: In a module's __dict__: torch's count of writes to what trains, when it was prepared.
WRITES = "qat_writes"


@dataclass(frozen=True)
class Training:
    """How a layer trains: its recipe, and what `QATConfig` says beside it."""

    recipe: Recipe
    axis: int = -1
    #: Whether scales are parameters, and whether their gradients are divided by sqrt(elements * largest code).
    learn_scales: bool = False
    scale_gradient: str = "lsq"
    #: Steps (`advance_qat`) before the layer rounds anything.
    start_step: int = 0
    #: Whether the module has anything of `ADDED`.
    added: bool = False
    #: The recipe as plain values, and whether a row of the weight is rounded on its own as it is in the whole.
    rule: Rule = field(init=False)
    rows_alone: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", Rule.of(self.recipe, self.axis))
        scheme, inside = self.recipe.weight, isinstance(self.recipe.weight.scale.block, int)
        object.__setattr__(self, "rows_alone", inside and scheme.outer is None and self.axis == -1)

    def __str__(self) -> str:
        return f"QAT: trained as {self.described}; step='convert' quantizes it"

    @property
    def described(self) -> str:
        """The recipe, whether scales are learned, and the step of the start."""
        learned = ", scales learned" if self.learn_scales else ""
        late = f", from step {self.start_step}" if self.start_step else ""
        return f"{self.recipe}{learned}{late}"


@torch.library.custom_op("ao_lab::scaled_gradient", mutates_args=())
def scaled_gradient(x: torch.Tensor, elements: int, scheme: str) -> torch.Tensor:
    """x; its gradient is multiplied by `lsq_factor`."""
    return x.clone()


@scaled_gradient.register_fake
def _scaled_fake(x: torch.Tensor, elements: int, scheme: str) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_elements(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.elements, ctx.scheme = inputs[1:]


def _scaled_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return g * lsq_factor(record_of(ctx.scheme), ctx.elements), None, None


scaled_gradient.register_autograd(_scaled_backward, setup_context=_keep_elements)


def with_scaled_gradient(x: torch.Tensor, elements: int, scheme: str) -> torch.Tensor:
    """`scaled_gradient`, under transforms of torch.func too."""
    if type(x) not in PLAIN:
        refuse_dtensor(x)
    if torch.compiler.is_compiling() or functional_transform() is None:
        op: torch.Tensor = scaled_gradient(x, elements, scheme)
        return op
    factor = lsq_factor(record_of(scheme), elements)
    made: torch.Tensor = linear.ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return made


class QATModule(ConvertedModule, nn.Module):
    """What both layers have."""

    qat: Training
    weight: torch.Tensor
    #: What reports say of it.
    preparation: ClassVar[str] = "for QAT"

    def given(self) -> Given:
        """The layer's learned and static tensors now."""
        training = self.qat
        if not training.added:
            return NOTHING
        scale, zero, input_scale, input_zero, step = (getattr(self, name, None) for name in ADDED)
        if scale is not None:
            scale = raised(scale.to(torch.float32))
            zero = zero.to(torch.float32) if zero is not None and zero.is_floating_point() else zero
        if input_scale is not None:
            input_scale = input_scale.to(torch.float32)
            input_scale = raised(input_scale) if training.learn_scales else input_scale
        scaled = training.learn_scales and training.scale_gradient == "lsq"
        # torch.jit.trace compares what it records with a second run, which has no gradients.
        if scaled and torch.is_grad_enabled() and not torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            if scale is not None:
                elements = self.weight.numel() // max(scale.numel(), 1)
                scale = with_scaled_gradient(scale, elements, training.rule.weight)
            if input_scale is not None:
                # Features, as in the paper: the rows of a batch, or of its parts, do not count.
                input_scale = with_scaled_gradient(
                    input_scale, self.weight.shape[-1], training.rule.activation
                )
        started = None if step is None else step >= training.start_step
        return Given(scale, zero, input_scale, input_zero, started)

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the layer as it is."""
        return PREPARED

    def conversion_reason(self) -> str | None:
        """Why step "convert" cannot quantize the layer now; None where it can."""
        return None

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        if name == "weight":
            return str(self.qat)
        return "learned by QAT in addition to the weight" if name in ADDED else None

    def training_record(self) -> dict[str, str]:
        """The recipe that the layer is trained for."""
        return {**super().training_record(), "QAT": self.qat.described}

    def extra_repr(self) -> str:
        """torch's own, and the recipe."""
        return f"{super().extra_repr()}, {self.qat.recipe}"


def raised(scale: torch.Tensor) -> torch.Tensor:
    """A learned scale as layers use it: one that training made zero or negative counts as the smallest that there is.

    Its gradient goes straight through, so that the parameter can come back. NaN and infinity stay.
    """
    return torch.where(scale <= SMALLEST, scale - scale.detach() + SMALLEST, scale)


def lsq_factor(scheme: Scheme, elements: int) -> float:
    """1 / sqrt(elements * largest code) of learned step sizes (Esser et al., arXiv 1902.08153, section 2.2)."""
    return 1 / sqrt(max(elements, 1) * scheme.format.max)


class QATLinear(QATModule, nn.Linear):
    """nn.Linear in training for a recipe."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product of the rounded operands; see `ao_lab.qat.linear`."""
        mark_run(self)
        return qat_linear(input, self.weight, self.bias, self.given(), self.qat.rule)


class QATEmbedding(QATModule, nn.Embedding):
    """nn.Embedding in training for a recipe."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the rounded table; only those that are asked for are rounded where a row can be on its own."""
        mark_run(self)
        given = self.given()
        alone = given.scale is None and self.qat.rows_alone
        table = self.weight if alone else self.rounded(self.weight, given)
        rows = nn.functional.embedding(
            input, table, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return self.rounded(rows, given) if alone else rows

    def rounded(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        """The table, or rows of it, as the scheme represents them."""
        scheme, axis = self.qat.recipe.weight, self.qat.axis
        scales = None if given.scale is None else Scales(given.scale, None, given.zero)
        if not torch.compiler.is_compiling() and functional_transform() is not None:
            return linear.transformed_rounding(x, scheme, axis, scales, x.dtype, given.started)
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            # It records one operator: inside of it lengths are tensors.
            name = record_name(scheme)
            result = torch.ops.ao_lab.fake_quantize(x, given.scale, None, given.zero, name, axis, None)
        else:
            result = fast.fake_quantize(x, scheme, axis=axis, scales=scales)
        result = result if scales is None else with_nan(result, x, scheme)
        return result if given.started is None else torch.where(given.started, result, x)


#: The class of a layer, and the one that it trains as.
QAT_CLASSES: dict[type[nn.Module], type[QATModule]] = {nn.Linear: QATLinear, nn.Embedding: QATEmbedding}


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a module cannot train as one of these classes; None where it can."""
    kind = type(module).__name__
    if isinstance(module, QATModule):
        return PREPARED
    if type(module) not in QAT_CLASSES:
        return f"QAT trains nn.Linear and nn.Embedding themselves; a {kind} may compute otherwise"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "QAT trains no embedding with max_norm (its lookups change the table) or sparse gradients"
    return None


def count_writes(module: nn.Module, parameter: torch.Tensor) -> None:
    """Note how often a parameter of a module has been written, for `was_written`."""
    module.__dict__[WRITES] = 0 if parameter.is_inference() else parameter._version


def was_written(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter was written since its module was prepared, as by an optimizer."""
    return not parameter.is_inference() and parameter._version > module.__dict__.get(
        WRITES, parameter._version
    )


def train_as(module: nn.Module, training: Training) -> None:
    """Make a module a layer in training."""
    module.__dict__.pop(RAN, None)
    count_writes(module, module.weight)  # type: ignore[arg-type]
    module.__class__ = QAT_CLASSES[type(module)]
    module.qat = training  # type: ignore[assignment]


def plain_again(module: nn.Module) -> None:
    """Undo `train_as`, and drop what it has brought."""
    if isinstance(module, QATModule):
        kinds = {trained: plain for plain, trained in QAT_CLASSES.items()}
        module.__class__ = next(kinds[kind] for kind in type(module).__mro__ if kind in kinds)  # type: ignore[assignment]
        del module.__dict__["qat"]
        for name in ("lora", "low_precision", RAN, WRITES):
            module.__dict__.pop(name, None)
    for name in (*ADDED, *ADAPTERS):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)


def first_scales(weight: torch.Tensor, scheme: Scheme, axis: int, start: str = "rule") -> Scales:
    """Scales of the weight as it is, by the scheme's rule or (start="error") with the least error.

    A rule that maps the largest magnitude of a block onto the largest code never clips. At 8 bits nothing is gained by
    clipping; at 3 and 2 bits most of a block lies within a code or two of zero, and scales much below the rule's are far
    better.

    A block with NaN or infinity keeps the rule's NaN: it is as visible as in a model that is quantized at once. A block of
    zeros starts at the largest scale of the others: its own is the smallest that there is, and a weight that leaves zero would
    saturate there, and stay.
    """
    weight = weight.detach()
    scales = fast.choose_scales(weight, scheme, axis=axis)
    if not scales.scale.numel():
        return scales
    if start == "error":
        scales = closest_scales(weight, scheme, axis, scales)
    return with_usual(scales)


def with_usual(scales: Scales) -> Scales:
    """Scales with the largest of them in the place of the smallest that there is; see `first_scales`."""
    most = torch.where(scales.scale.isfinite(), scales.scale, 0.0).amax()
    usual = torch.where(most > SMALLEST, most, 1.0)
    return Scales(torch.where(scales.scale <= SMALLEST, usual, scales.scale), None, scales.zero)


def closest_scales(weight: torch.Tensor, scheme: Scheme, axis: int, scales: Scales) -> Scales:
    """Of PARTS of given scales, block by block that with the least sum of squared errors; the larger one of two as good.

    Zero points stay. A block whose error is no number keeps its scale.
    """
    best, least = scales.scale, squared_error(weight, scheme, axis, scales)
    for part in PARTS[1:]:
        tried = torch.clamp(scales.scale * part, min=SMALLEST)
        error = squared_error(weight, scheme, axis, Scales(tried, None, scales.zero))
        better = error < least
        best, least = torch.where(better, tried, best), torch.where(better, error, least)
    return Scales(best, None, scales.zero)


def squared_error(weight: torch.Tensor, scheme: Scheme, axis: int, scales: Scales) -> torch.Tensor:
    """Of every block, in the shape of the scales."""
    result = fast.fake_quantize(weight, scheme, axis=axis, scales=scales)
    error = (result.to(torch.float32) - weight.to(torch.float32)).square()
    blocks, ns = Blocks.of(tuple(weight.shape), scheme.scale, axis), namespace_of(weight)
    summed: torch.Tensor = blocks.expose(blocks.split(ns, error, zeros=True).sum(-1)[..., None], ns)
    return summed


class SparseQATLinear(SparseLinear, QATLinear):
    """A QAT layer whose weight is N:M sparse: masked first, then rounded as it will be stored.

    y = fq(x) fq(W * m)^T + b with fq of the QAT recipe and the mask m of a sparse training (`ao_lab.sparsity.training`), whose
    rule says what of the gradient of W * m the weight gets. `sparsify_` makes such layers of prepared ones; `finish_sparsity_`
    makes them QAT layers again, with weights that are exactly N:M, and step="convert" quantizes those. Schemes that have a zero
    keep the pattern.
    """

    plain: ClassVar[type[nn.Linear]] = QATLinear

    @classmethod
    def unsupported_config(cls, config: SparseTrainingConfig) -> str | None:
        """Why QAT layers do not train by a configuration."""
        if config.products == "dense":
            return None
        return f"QAT layers use dense matmuls, not products={config.products!r}; use products='dense'"

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
    """A QAT layer whose products run by a training recipe: operands are rounded as served, then cast as they train.

    y = P(fq(x), fq(W)) + b with fq of the QAT recipe (straight-through gradients) and P the three products of a training recipe
    (`ao_lab.training`). What the products keep of fq(W) for backward is not kept: it is rounded again, the same bits, so that
    no copy of the weights lives from forward to backward. `convert_for_training_` makes such layers of prepared ones;
    `quantize_` with step="convert" and `convert_from_training_` end either part.
    """

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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The recipe's products of the rounded operands."""
        mark_run(self)
        x, weight = self.operands(input)
        with rounded_again(weight, self.weight, self.qat):
            return low_precision_linear(x, weight, self.bias, self.low_precision, evaluated=not self.training)

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the layer as it is: it is prepared for QAT."""
        return QATLinear.unsupported_reason(self)

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        by_recipe = LowPrecisionLinear.parameter_reason(self, name)
        return by_recipe and f"{by_recipe}; {QATLinear.parameter_reason(self, name)}"


@dataclass(frozen=True)
class Again:
    """What stands for a rounded weight, or its transpose, among the tensors of a graph."""

    shape: torch.Size
    stride: tuple[int, ...]


def rounded_again(rounded: torch.Tensor, weight: torch.Tensor, qat: Training) -> AbstractContextManager[None]:
    """Inside, a graph that would keep the rounded weight rounds the weight again in backward. Hooks for saved tensors that are
    set outside (recomputation, offloading) see all other tensors.

    Not where a tracer or a transform keeps tensors in ways of its own.
    """
    plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and functional_transform() is None
    if not plain or type(rounded) not in PLAIN or rounded.is_meta or is_traced(rounded):
        return nullcontext()
    outside = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack_other, unpack_other = outside if outside is not None else (_same, _same)
    place, version = (rounded.data_ptr(), rounded.numel(), rounded.dtype), weight._version

    def pack(tensor: torch.Tensor) -> Any:
        if (tensor.data_ptr(), tensor.numel(), tensor.dtype) != place:
            return pack_other(tensor)
        return Again(tensor.shape, tensor.stride())

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, Again):
            other: torch.Tensor = unpack_other(packed)
            return other
        if weight._version != version:
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} has been modified by an inplace operation between forward and "
                f"backward of a QAT layer that trains by a recipe: it is at version {weight._version}, expected {version}"
            )
        with torch.no_grad():
            again = fast.fake_quantize(own_memory(weight), qat.recipe.weight, axis=qat.axis)
        return again.as_strided(packed.shape, packed.stride)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _same(x: Any) -> Any:
    return x


def class_of(layer: QATLinear) -> type[LowPrecisionLinear] | str:
    """The class of a QAT layer that trains by a recipe, or why it has none."""
    if layer.qat.added:
        return "training recipes support no QAT layer with learned or static scales or a start step, which use dense matmuls"
    return LowPrecisionQATLinear


CLASSES[QATLinear] = class_of
