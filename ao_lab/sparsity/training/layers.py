"""Layers that train sparse: nn.Linear whose forward masks its weight.

`sparsify_(model, SparseTrainingConfig(...))` gives a module this class, in place: the module, its weight, its hooks and the
names in its state_dict stay what they were, and isinstance(module, nn.Linear) stays true. What was added is `module.sparse` and
two buffers: `sparse_mask` on every rank, all True in dense phases, and `sparse_step`, how many steps have been done
(`step_sparsity_`). Layers that share a weight share both. Saved training goes on from them, with the same bits; checkpoints of
the dense model load too, strictly: the mask is found again from what was loaded, and the count stays. Weights with the zeros of
another pattern are an error there, as they are in `sparsify_`.

The buffer of a mask, which is what a state_dict has, is bool of the weight's shape; with products="sparse_wgmma" uint8
(out, ceil(in / 8)), the bits of that (`fast.kernels.sparse_mm.bits`, as `numpy.packbits`): an eighth of the memory. A
state_dict with either one loads into both. The attribute `layer.sparse_mask` is bool always: the buffer where that is, else a
copy, and so gives `get_buffer`: only the buffer (`layer.stored_mask`) can be written to. Nobody may average bits: leave buffers
out of averaged models (`AveragedModel(use_buffers=False)`, torch's default).

Steps of optimizers that `step_sparsity_` has not been told of.

A hook of torch's that runs before the step of every optimizer, of eager and compiled models and under FSDP2 alike: a weight
whose last step was not counted is not stepped again. That is an error before the optimizer changes anything. What writes to
weights without a `torch.optim.Optimizer`, or in a compiled `optimizer.step`, is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ao_lab.sparsity.training.autograd import Rule, masked_linear
from ao_lab.sparsity.training.config import SPARSE_PHASE, SparseTrainingConfig, phase
from ao_lab.sparsity.training.counts import counted_in_graph
from ao_lab.sparsity.training.masks import (
    bool_mask,
    find_mask,
    is_distributed,
    other_pattern_reason,
    stored_as,
    zero_pruned_,
)

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
            f"layers would be old and pruned weights move; call it after each optimizer.step()"
        )
    for layer in layers:
        setattr(layer, PENDING, True)


def _has_gradient(layer: nn.Module) -> bool:
    weight: Any = layer.weight
    return weight.grad is not None


MASK, STEP = "sparse_mask", "sparse_step"
ADDED = (MASK, STEP)


class SparseLinear(nn.Linear):
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
        """input (..., K) times the masked weight (N, K) transposed, plus bias; see `ao_lab.sparsity.training.autograd`.

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

    def extra_repr(self) -> str:
        """torch's own, and the configuration."""
        return f"{super().extra_repr()}, {self.sparse}"


#: By the class of a layer, the one as which it trains sparse.
CLASSES: dict[type[nn.Module], type[SparseLinear]] = {nn.Linear: SparseLinear}


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
    module.__class__ = CLASSES[type(module)]
    layer = cast("SparseLinear", module)
    layer.sparse, layer.sparse_rule = config, rule(config, 0)
    watch(layer)
    return layer


def plain_again(module: SparseLinear) -> None:
    """Undo `train_sparse`; the weight stays as it is."""
    for name in ADDED:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    forget(module)
    for name in ("sparse", "sparse_rule"):
        module.__dict__.pop(name, None)
    module.__class__ = module.plain  # type: ignore[assignment]


__all__ = ["ADDED", "CLASSES", "SparseLinear", "plain_again", "rule", "settle", "train_sparse"]
