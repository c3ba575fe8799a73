"""What `sparsify_` is going to prune, once or in training, and why other layers stay; the report of what it did.

All that can be refused is, before a weight changes. Pruned are linear layers: nn.Linear, along its last axis, and
transformers' Conv1D, which stores (in, out), along its first. What is no linear layer, or not selected, stays and is listed.
What was selected and cannot be pruned is an error, as a model that is sparse but for a layer in the middle would be found out
much later: so are batched experts, which hold most weights of their model, where a filter accepts them.

At the end one weight is pruned (`prune_weight`), from its values and what calibration kept of its inputs. Masks are those of
`reference.prune` and `reference.prune_transposable` by the reference's scores, bit for bit, on any device. On the host they
are found some rows at a time, since scores are integers of 32 bits there. SparseGPT runs in float64 where the weight is: on
the host it takes minutes for the layers of a large model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import fast
import reference
from ao_lab.sparsity.config import SparsityConfig
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.tensor.sparse import quantized_compressed
from ao_lab.transforms.layers import (
    Slot,
    check_model,
    is_experts,
    is_linear,
    is_transposed,
    quantizable_parameters,
    routers,
    shorten,
    unsupported_reason,
)
from ao_lab.transforms.plan import ROUTES, Filter, Plan, Selection, Transforms, WeightChange, passed_over
from ao_lab.transforms.report import LayerLine, ModelReport
from ao_lab.transforms.walk import block_lists, block_of, is_inside
from fast.sparsity.prune import prune_into

#: Groups in which weights are pruned, beside those of the pattern that is asked for.
GROUPS = (4, 8)
NOT_FINITE = "it holds NaN or infinity"
#: The share of groups that have as many nonzeros as the fullest, from which on they are a pattern.
USUAL = 0.95


EXPERTS = "batched experts are not pruned, only linear layers are; a call without filter_fn leaves them and their routers dense"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPRESSED_DTYPES = (torch.bfloat16, torch.float16)
#: By score, why weights are finite.
SPREAD = {
    "sparsegpt": f"{NOT_FINITE}, which SparseGPT would spread; replace them",
    "ria": f"{NOT_FINITE}, which RIA would spread to the scores of its row and column; replace them",
}


@dataclass(frozen=True)
class SparseLayer(LayerLine):
    """One parameter that `sparsify_` looked at."""

    #: Why it was pruned, or left.
    reason: str
    #: "2:4"; "" where it was left.
    pattern: str = ""
    #: The score that decided: magnitude where no input told the channels apart; in training "its own zeros" where masks are
    #: those of an earlier pruning, after it "training".
    score: str = ""
    #: The share of its elements that are zero now.
    zeros: float = 0.0
    #: Tokens that its statistic has seen.
    tokens: int = 0
    #: SparseGPT's error of the layer's outputs, and the damping and the floor that its Hessian took.
    loss: float | None = None
    damping: float | None = None
    floor: float | None = None
    #: "compressed" where kept elements alone are stored, and the bytes that they and their places take; 0 where it is dense.
    storage: str = "dense"
    bytes: int = 0

    @property
    def changed(self) -> bool:
        """Whether it was pruned."""
        return bool(self.pattern)

    def __str__(self) -> str:
        if not self.changed:
            return f"left: {self.reason}"
        told = f"{self.pattern} by {self.score}, {100 * self.zeros:.1f} % zeros"
        if self.loss is not None:
            told += f", loss {self.loss:.3g}, damping {self.damping:g}"
            told += f", floor {self.floor:g}" if self.floor else ""
        told += f", compressed, {self.bytes} bytes" if self.storage == "compressed" else ""
        return f"{told}: {self.reason}"


@dataclass(frozen=True)
class SparsityReport(ModelReport[SparseLayer]):
    """Every layer that `sparsify_` looked at, in the order of the model's modules."""

    def heading(self) -> str:
        """How many of them were pruned; before a warm-up has ended, that they are going to be."""
        dense = bool(self.changed) and not any(layer.zeros for layer in self.changed)
        what = "are to train sparse, dense until warm-up ends" if dense else "pruned"
        return f"{len(self.changed)} of {len(self.layers)} layers {what}"


@dataclass
class Target(WeightChange):
    """One weight to be pruned, wherever it is."""

    #: Whether NaN or infinity are among its values.
    not_finite: bool = False

    @property
    def transposed(self) -> bool:
        """Whether it is stored (in, out)."""
        return is_transposed(self.places[self.name][0])

    @property
    def matrix(self) -> torch.Tensor:
        """Its values as (out, in)."""
        dense = self.parameter.detach()
        return dense.T.contiguous() if self.transposed else dense

    @torch.no_grad()
    def put_compressed(self, matrix: torch.Tensor) -> int:
        """A frozen parameter in 2:4 storage in every place, of a pruned (out, in); the bytes that it takes."""
        element = str(matrix.dtype).removeprefix("torch.")
        weight = quantized_compressed(matrix, element)
        self.put(nn.Parameter(weight.transposed() if self.transposed else weight, requires_grad=False))
        return sum(part.nbytes for part in weight.parts.values() if part is not None)

    @torch.no_grad()
    def put_pruned(self, matrix: torch.Tensor) -> None:
        """New values, in the parameter itself; a new parameter where others keep the dense one."""
        values, old = matrix.T if self.transposed else matrix, self.parameter
        if self.others:
            self.put(nn.Parameter(values.contiguous(), requires_grad=old.requires_grad))
        else:
            old.copy_(values)


#: What `sparsify_` does for a class of configurations that do something else than prune once: a function of the model, the
#: configuration, the filter and the names of further arguments that were given.
TRANSFORMS: Transforms[Callable[[nn.Module, Any, Filter | None, tuple[str, ...]], SparsityReport]] = (
    Transforms()
)

T = TypeVar("T", bound=WeightChange)


@dataclass
class SparsityPlan(Plan[T]):
    """The weights to be pruned, and the reason of each parameter that was looked at."""

    #: Reasons of those that were selected and cannot be pruned, by full name.
    unable: dict[str, str] = field(default_factory=dict)
    #: What the filter accepts and is no linear layer, as the report lists it.
    passed_over: tuple[SparseLayer, ...] = ()

    def check(self) -> None:
        """ValueError with the layers that were selected and cannot be pruned, and why; none where there are none."""
        alike: dict[str, list[str]] = {}
        for name, why in self.unable.items():
            alike.setdefault(why, []).append(name)
        if alike:
            told = shorten([f"{shorten(names)}: {why}" for why, names in alike.items()], 3)
            raise ValueError(f"sparsify_ changed nothing. {told}. Or exclude these layers with filter_fn")

    def report(self, model: nn.Module, done: dict[str, SparseLayer]) -> SparsityReport:
        """What was done to every parameter: these lines, and those of what was left."""
        layers = []
        for slot in quantizable_parameters(model):
            left = SparseLayer(
                slot.full, type(slot.module).__name__, tuple(slot.parameter.shape), self.reasons[slot.full]
            )
            layers.append(done.get(slot.full, left))
        return SparsityReport((*layers, *self.passed_over))


def selected(
    model: nn.Module,
    filter_fn: Filter | None,
    make: type[T],
    walked: tuple[str, ...] | None = None,
    module_reason: Callable[[nn.Module], str | None] = lambda module: None,
) -> SparsityPlan[T]:
    """A plan of the linear layers that are selected: by a filter, or those of the model's blocks.

    A model that has lists of blocks keeps what stands outside of them, embeddings and head, as the papers do. Batched experts
    are selected where a filter accepts them; their reason is why they cannot be pruned. walked: names of blocks outside of
    which nothing is selected without a filter, in place of those lists. module_reason: why a linear layer cannot be pruned.
    """
    check_model(model)
    lists = tuple(block_lists(model)) if walked is None else walked

    def in_blocks(module: nn.Module, path: str) -> tuple[bool, str]:
        if lists and not is_inside(path, lists):
            return False, f"outside of the blocks ({shorten(lists, 2)})"
        return True, type(module).__name__

    stay = dict.fromkeys(routers(model), ROUTES.replace("quantizes", "prunes"))
    select, plan = Selection(filter_fn, in_blocks, stay), SparsityPlan[T]()
    for slot in quantizable_parameters(model):
        wanted, reason = _decided(select, slot)
        plan.reasons[slot.full] = reason
        if wanted:
            why = module_reason(slot.module) if is_linear(slot.module) else reason
            if why is not None:
                plan.unable[slot.full] = why
            else:
                change = plan.changes.setdefault(id(slot.parameter), make())
                change.places[slot.full] = (slot.module, slot.name)
    plan.passed_over = tuple(
        SparseLayer(full, kind, tuple(weight.shape), f"{kind}: only linear layers are pruned")
        for full, (module, weight) in _passed_over(model, filter_fn).items()
        for kind in (type(module).__name__,)
    )
    plan.reasons.update((layer.name, layer.reason) for layer in plan.passed_over)
    if not plan.changes and not plan.unable:
        raise ValueError(_nothing(plan))
    plan.find_others(model)
    return plan


def _decided(select: Selection, slot: Slot) -> tuple[bool, str]:
    """Whether a parameter is selected, and the reason."""
    path, module, name, parameter = slot
    if not is_linear(module):
        reason = unsupported_reason(module, name, parameter)
        if reason is None and parameter.dim() == 3 and is_experts(module) and select.filter_fn is not None:
            return select.accepts(module, path), EXPERTS
        return False, reason or f"{type(module).__name__}: only linear layers are pruned"
    if name != "weight" or parameter.dim() != 2:
        return False, torch_prune_reason(module, name) or "it is not the weight of the layer's matmul"
    return select(module, path)


def _passed_over(model: nn.Module, filter_fn: Filter | None) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """What a filter accepts and is no linear layer."""
    if filter_fn is None:
        return {}
    return passed_over(model, lambda path, module, full: filter_fn(module, path))


def planned(
    model: nn.Module, config: SparsityConfig, filter_fn: Filter | None, blocks: Iterable[str] | None = None
) -> SparsityPlan[Target]:
    """The plan; raises as `sparsify_` says. `blocks`: names of the blocks that calibration walks, where it does."""
    walked = None if blocks is None else tuple(blocks)
    plan = selected(model, filter_fn, Target, walked)
    for target in plan.changes.values():
        if (why := _refused(target, config, walked)) is not None:
            plan.unable[target.name] = why
    plan.check()
    return plan


def _refused(target: Target, config: SparsityConfig, walked: tuple[str, ...] | None) -> str | None:
    """Why a selected weight cannot be pruned, and the way out."""
    checks = (_kind_reason(target, config), _shape_reason(target, config), _walk_reason(target, walked))
    return next((why for why in checks if why is not None), None) or _value_reason(target, config)


def _kind_reason(target: Target, config: SparsityConfig) -> str | None:
    parameter: torch.Tensor = target.parameter
    module, name = next(iter(target.places.values()))
    if isinstance(parameter, SparseQuantizedTensor):
        return "it is in 2:4 storage already"
    if isinstance(parameter, QuantizedTensor):
        return "it is quantized already; prune first, then quantize"
    if type(parameter) not in (torch.Tensor, nn.Parameter):
        return f"a {type(parameter).__name__} holds its values elsewhere; prune before it is made"
    if parameter.is_meta:
        return "on the meta device there are no values to prune; load the weights first"
    if parameter.dtype not in DTYPES:
        return f"{parameter.dtype} is not float32, bfloat16 or float16; convert the model first"
    if len({is_transposed(module) for module, _ in target.places.values()}) > 1:
        return f"{' and '.join(target.places)} share it and use it along different axes; untie them first"
    return (
        unsupported_reason(module, name, parameter)
        or layout_reason(parameter)
        or _write_reason(target, config, parameter)
    )


def _write_reason(target: Target, config: SparsityConfig, parameter: torch.Tensor) -> str | None:
    """Why it cannot be written where it is; it need not be where its place gets another parameter."""
    if target.others or config.storage == "compressed":
        return None
    return in_place_reason(parameter, torch.is_inference_mode_enabled() and not config.calibrates)


def _shape_reason(target: Target, config: SparsityConfig) -> str | None:
    """The contraction axis in groups of M; rows too for transposable masks."""
    shape, (_, group) = tuple(target.parameter.shape), config.kept_of
    rows, length = shape[::-1] if target.transposed else shape
    axis = "first" if target.transposed else "last"
    if not rows * length:
        return f"shape {shape} has no elements"
    if length % group:
        return f"{config.pattern} needs a {axis} axis that is a multiple of {group}, got shape {shape}"
    if config.storage == "compressed" and target.parameter.dtype not in COMPRESSED_DTYPES:
        dtype = target.parameter.dtype
        return (
            f"compressed storage holds bfloat16 and float16, got {dtype}; convert the model, or use quantize_"
        )
    if config.transposable and rows % 4:
        return f"transposable masks need rows and columns in multiples of 4, got shape {shape}"
    return None


def _walk_reason(target: Target, walked: tuple[str, ...] | None) -> str | None:
    """Calibration sees the layers of one block at a time."""
    if walked is None:
        return None
    blocks = {block_of(full, walked) for full in target.places}
    if None in blocks:
        return (
            f"it is outside of the blocks ({walked[0]} and on) that calibration walks; prune it by magnitude in a call of its "
            f"own, or give blocks='' to treat the whole model as one block"
        )
    return (
        None
        if len(blocks) == 1
        else f"blocks {' and '.join(sorted(map(str, blocks)))} share it; prune it by magnitude"
    )


def _value_reason(target: Target, config: SparsityConfig) -> str | None:
    """Sparse already, or not finite where scores or updates would spread it."""
    kept, group = config.kept_of
    matrix = target.parameter.detach()
    matrix = matrix.T if target.transposed else matrix
    target.not_finite = not bool(matrix.isfinite().all())
    most = most_kept(matrix != 0, group)
    if 0 < most <= kept and config.storage == "compressed" and not config.calibrates:
        return None  # its mask is what it is; it is only compressed
    if 0 < most <= kept:
        return f"it is {config.pattern} sparse already, with at most {most} of {group} weights in every group"
    return SPREAD[config.score] if target.not_finite and config.score in SPREAD else None


def _nothing(plan: SparsityPlan[T]) -> str:
    """Why a call would change nothing."""
    if not plan.reasons:
        return "sparsify_: no linear layer is selected, since the model has no linear layers"
    told = shorten([f"{name}: {reason}" for name, reason in plan.reasons.items()])
    return f"sparsify_: no linear layer is selected, so that nothing would change. Of {len(plan.reasons)} parameters: {told}"


def layout_reason(w: torch.Tensor) -> str | None:
    """Why a tensor's elements cannot be read as those of a matrix, and the way out."""
    if w.layout == torch.strided:
        return None
    return (
        f"layout {w.layout} holds values and places; make it dense (module.weight = "
        f"torch.nn.Parameter(module.weight.to_dense()))"
    )


def in_place_reason(w: torch.Tensor, inference: bool = False) -> str | None:
    """Why a tensor cannot be written in place, and the way out. inference: whether that is tried inside inference mode."""
    clone = "module.weight = torch.nn.Parameter(module.weight.detach().clone()) outside of it"
    if w.is_inference() and not inference:
        return f"it was made under torch.inference_mode and cannot be written in place; {clone} makes it an ordinary tensor"
    if any(step == 0 and length > 1 for length, step in zip(w.shape, w.stride(), strict=True)):
        clone = "module.weight = torch.nn.Parameter(module.weight.detach().contiguous())"
        return f"it was expanded: several elements are one in memory; {clone} gives each its own"
    return None


def torch_prune_reason(module: nn.Module, name: str) -> str | None:
    """What to do with a parameter that torch.nn.utils.prune masks."""
    plain = name.removesuffix("_orig")
    if plain == name or not hasattr(module, f"{plain}_mask"):
        return None
    return (
        f"torch.nn.utils.prune computes the layer's {plain} from it; torch.nn.utils.prune.remove(module, {plain!r}) turns it "
        f"into an ordinary tensor with zeros"
    )


def most_kept(mask: torch.Tensor, group: int) -> int:
    """The largest number of True in any group of a bool matrix's rows."""
    return int(mask.reshape(-1, group).sum(-1).max())


def pruned_pattern(mask: torch.Tensor, group: int) -> str | None:
    """ "N:M" of a bool matrix whose groups of M along its rows have N True each: some pruning left these zeros.

    M is `group`, or one of `GROUPS`, and rows have more than one group. Groups that are False altogether do not count, and a
    few may have fewer. None of dense weights, of a matrix that is False altogether, and of zeros here and there.
    """
    for size in dict.fromkeys((group, *GROUPS)):
        if size > 1 and mask.numel() and mask.shape[-1] % size == 0 and mask.shape[-1] > size:
            counts = mask.reshape(-1, size).sum(-1)
            most, some = int(counts.max()), counts[counts > 0]
            if 0 < most < size and float((some == most).float().mean()) >= USUAL:
                return f"{most}:{size}"
    return None


#: Elements whose mask is found at once on the host; on other devices sixteen times as many.
PIECE = 2**20


class Pruned(NamedTuple):
    """`weights` (out, in) with zeros, the score that decided, and what SparseGPT said."""

    weights: torch.Tensor
    score: str
    facts: dict[str, float]


def prune_weight(w: torch.Tensor, config: SparsityConfig, statistic: torch.Tensor | None) -> Pruned:
    """The pruned values of w (out, in), which stays as it is.

    statistic: square sums (in,) for "wanda" and "ria", the Hessian (in, in) for "sparsegpt"; None, or nothing but zeros, tells
    no channels apart, so that magnitude decides.
    """
    if config.calibrates and (statistic is None or not bool(statistic.any())):
        statistic, score = None, "magnitude"
    else:
        score = config.score
    if score == "sparsegpt" and statistic is not None:
        return _by_sparsegpt(w, config, statistic)
    scores = scores_of(w, score, statistic)
    return Pruned(w.masked_fill(~mask_of(w, config, scores), 0), score, {})


def scores_of(w: torch.Tensor, score: str, sums: torch.Tensor | None) -> torch.Tensor | None:
    """The reference's scores; None for magnitude, which w itself is."""
    if score == "magnitude" or sums is None:
        return None
    function: Any = {"wanda": reference.wanda_scores, "ria": reference.ria_scores}[score]
    scores: torch.Tensor = function(w, sums.to(w.device))
    return scores


def mask_of(
    w: torch.Tensor, config: SparsityConfig, scores: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Bool, True where a weight stays. out: a mask that is written, by default a new one."""
    ranked = w if scores is None else scores
    rows = max((PIECE if w.device.type == "cpu" else 16 * PIECE) // max(w.shape[1], 1) // 8 * 8, 8)
    if ranked.shape[0] <= rows:
        if out is None:
            return _mask(ranked, config)
        return prune_into(ranked, out, pattern=config.pattern, transposable=config.transposable)
    mask = torch.empty(ranked.shape, dtype=torch.bool, device=ranked.device) if out is None else out
    for start in range(0, ranked.shape[0], rows):
        part, piece = mask[start : start + rows], ranked[start : start + rows]
        prune_into(piece, part, pattern=config.pattern, transposable=config.transposable)
    return mask


def _mask(ranked: torch.Tensor, config: SparsityConfig) -> torch.Tensor:
    """The mask of some rows by their scores."""
    if config.transposable:
        return fast.prune_transposable(ranked)
    return fast.prune(ranked, pattern=config.pattern)


def _by_sparsegpt(w: torch.Tensor, config: SparsityConfig, hessian: torch.Tensor) -> Pruned:
    result = fast.sparsegpt(w, hessian, pattern=config.pattern, block=config.columns, damping=config.damping)
    facts = {"loss": result.loss, "damping": result.damping, "floor": result.floor}
    return Pruned(result.weights, "sparsegpt", facts)


__all__ = ["SparseLayer", "SparsityReport"]
