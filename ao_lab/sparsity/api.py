"""`sparsify_`: one-shot pruning of a model's linear layers to N:M, in place, with zeros in dense weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ao_lab.calibration.statistics import Hessian, SquareSums, Statistics
from ao_lab.sparsity.config import SparsityConfig
from ao_lab.sparsity.plan import (
    NOT_FINITE,
    TRANSFORMS,
    SparseLayer,
    SparsityPlan,
    SparsityReport,
    Target,
    planned,
    prune_weight,
)
from ao_lab.transforms.data import calibrating, observe
from ao_lab.transforms.layers import check_model, shorten, untying
from ao_lab.transforms.plan import Filter, Progress, noting
from ao_lab.transforms.report import remember_pruned
from ao_lab.transforms.walk import Block, Capture, block_of, captured, check_reached, find_blocks, walk

if TYPE_CHECKING:
    from ao_lab.sparsity.training.config import SparseTrainingConfig


def sparsify_(
    model: nn.Module,
    config: SparsityConfig | SparseTrainingConfig,
    filter_fn: Filter | None = None,
    *,
    calibration: Iterable[Any] | None = None,
    blocks: str | None = None,
    offload: bool = False,
    progress: Progress | None = None,
) -> SparsityReport:
    """Prune linear layers of `model` in place, as `config` says; the report lists each layer, pruned or left, with its reason.

    Weights stay dense tensors with zeros; parameters, names and hooks stay the same. With SparsityConfig(storage="compressed")
    they become frozen parameters in 2:4 storage, for inference (with score "magnitude", weights that are 2:4 already are only
    compressed). To quantize as well, prune with storage "dense" and give quantize_'s configuration sparsity="2:4".
    filter_fn(module, name) selects linear layers. Default: all nn.Linear (and transformers' Conv1D) in the model's lists of
    blocks, or of the whole model if it has none; routers stay dense. A weight that is shared with a layer that is not pruned
    gets its own copy.

    calibration: for every score but "magnitude", an iterable of batches (a tensor, a tuple of positional or a mapping of
    keyword arguments of a call of the model). Blocks are processed in order, each with the inputs that the pruned blocks before
    it produce (`ao_lab.transforms.walk`); in eval mode, without gradients and caches. Inputs are summed per call, so batches
    are part of the result. blocks: name of the list of blocks. Default: the longest one; "" treats the whole model as one
    block. offload: keep block inputs in host memory. progress(name, done, total) is called after each weight. "sparsegpt"
    computes in float64.

    Raises ValueError for scores without calibration and calibration without such a score, if no layer is selected, and for
    selected layers that cannot be pruned: dimensions that the pattern does not divide, weights that are sparse or quantized
    already or cannot be written in place, batched experts that the filter selects, layers outside of the blocks, or that no
    data reach, or data that are not finite or whose squares overflow float32; for batches and blocks that are not supported.
    TypeError for another model or config. Nothing has changed then. After a later error (out of memory, sums that overflow
    after pruned blocks, an interruption) each weight is original or pruned; a note on the error says which.
    """
    check_model(model)
    if (transform := TRANSFORMS.of(config)) is not None:
        further = {"calibration": calibration is not None, "blocks": blocks is not None, "offload": offload}
        further["progress"] = progress is not None
        return transform(model, config, filter_fn, tuple(name for name, given in further.items() if given))
    if not isinstance(config, SparsityConfig):
        raise TypeError(
            f"sparsify_ takes a SparsityConfig, got {type(config).__name__}; configurations of quantize_ come after it, in a "
            f"call of quantize_"
        )
    _check_calibration(config, calibration, blocks)
    walked = find_blocks(model, blocks) if config.calibrates else None
    job = Job(model, config, planned(model, config, filter_fn, walked), progress)
    if calibration is None or walked is None:
        with untying(model), noting(job.stopped):
            job.prune(job.plan.changes.values(), None)
        return job.plan.report(model, job.done)
    with calibrating(model):
        capture = _captured(job, calibration, walked, offload)
        with untying(model), noting(job.stopped):
            walk(capture, partial(job.visit, names=tuple(walked)))
    return job.plan.report(model, job.done)


@dataclass
class Job:
    """One call of `sparsify_`, once its plan is made."""

    model: nn.Module
    config: SparsityConfig
    plan: SparsityPlan[Target]
    progress: Progress | None = None
    #: What was done, by full names of weights.
    done: dict[str, SparseLayer] = field(default_factory=dict)

    def visit(self, block: Block, names: tuple[str, ...]) -> None:
        """Prune one block by the inputs that its layers have now."""
        mine = [t for t in self.plan.changes.values() if block_of(t.name, names) == block.name]
        if not mine:
            return
        statistics = Statistics(Hessian if self.config.score == "sparsegpt" else SquareSums)
        observe([(t.name, module, statistics) for t in mine for module, _ in t.places.values()], block.run)
        statistics.forget_inputs()
        _check_usable(statistics)
        self.prune(mine, statistics)

    def prune(self, targets: Iterable[Target], statistics: Statistics | None) -> None:
        """Prune weights one after the other."""
        for target in targets:
            self._prune(target, statistics)

    def _prune(self, target: Target, statistics: Statistics | None) -> None:
        shared = None if statistics is None else statistics.layers.get(target.name)
        value: torch.Tensor | None = None if shared is None else getattr(shared.statistic, "value", None)
        shape = tuple(target.parameter.shape)
        try:
            pruned = prune_weight(target.matrix, self.config, value)
        except ValueError as error:
            error.add_note(f"this is of {target.name}")
            raise
        size = 0
        if self.config.storage == "compressed":
            size = target.put_compressed(pruned.weights)
        else:
            target.put_pruned(pruned.weights)
        zeros = float((pruned.weights == 0).sum()) / pruned.weights.numel()
        for full, (module, _) in target.places.items():
            reason = self.plan.reasons[full]
            if target.not_finite:
                reason += f"; {NOT_FINITE}, which rank above finite weights"
            if pruned.score != self.config.score:
                reason += f"; its inputs tell no channels apart, so that not {self.config.score} decided but magnitude"
            self.done[full] = SparseLayer(
                full, type(module).__name__, shape, reason, self.config.pattern, pruned.score, zeros,
                0 if shared is None else shared.tokens, storage=self.config.storage, bytes=size, **pruned.facts,
            )  # fmt: skip
            remember_pruned(self.model, full, f"{self.config.pattern} by {pruned.score}")
        if self.progress is not None:
            self.progress(target.name, len(self.pruned), len(self.plan.changes))

    @property
    def pruned(self) -> list[str]:
        """The weights that are pruned, each by its first name."""
        return [t.name for t in self.plan.changes.values() if t.name in self.done]

    def stopped(self) -> str:
        if not self.done:
            return "sparsify_ stopped before it changed a weight"
        return (
            f"sparsify_ stopped with {len(self.pruned)} of {len(self.plan.changes)} weights pruned ({shorten(self.pruned)}); "
            f"the others are as they were. Load the model again, or prune the others by a filter_fn that leaves these out"
        )


def _captured(job: Job, calibration: Iterable[Any], blocks: dict[str, nn.Module], offload: bool) -> Capture:
    """What the walk needs; ValueError where data do not reach a layer."""
    targets = job.plan.changes.values()
    layers = [(t.name, module) for t in targets for module, _ in t.places.values()]
    capture = captured(job.model, calibration, blocks, offload=offload, layers=layers)
    check_reached(capture, (t.name for t in targets), "sparsify_")
    return capture


def _check_usable(statistics: Statistics) -> None:
    """ValueError where sums over inputs tell no channels apart, before a weight of their block is pruned."""
    if names := statistics.unusable():
        raise ValueError(
            f"{shorten(names)}: sums of squared inputs hold NaN or overflow float32, so that they tell no channels apart; "
            f"leave out batches of huge values, look for the weights that make them, or exclude these layers with filter_fn"
        )


def _check_calibration(config: SparsityConfig, calibration: object, blocks: object) -> None:
    if config.calibrates and calibration is None:
        raise ValueError(
            f"score {config.score!r} needs calibration data: give calibration=, an iterable of batches; score 'magnitude' "
            f"needs none"
        )
    if not config.calibrates and (calibration is not None or blocks is not None):
        raise ValueError(
            "score 'magnitude' reads weights alone; leave calibration= and blocks= out, or choose score 'wanda', 'ria' or "
            "'sparsegpt'"
        )


__all__ = ["sparsify_"]
