"""`SparseTrainingConfig`: how the layers that `ao_lab.sparsify_` converts train with N:M sparse weights.

    sparsify_(model, SparseTrainingConfig(...))
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_sparsity_(model)
    finish_sparsity_(model)

A layer computes y = x (W * m)^T + b: its weight W stays a dense parameter, m is its mask. The gradient of x is that of the
masked weight, the gradient g of the masked weight is dense, and `gradient` says what of it W gets:

* "masked": g where m keeps a weight, +0 elsewhere;
* "straight-through": g everywhere;
* "sr-ste": `reference.sr_ste_gradient`, g and, where m drops a weight, `decay` times it (arXiv 2102.04010; the masked decay of
  arXiv 2404.01847).

Under autocast the rule sees the parameter and its gradient. Under FSDP2's mixed precision it sees the weight that was gathered,
and its gradient before that is reduced.

Masks are those of `reference.prune` (or `prune_transposable`) by magnitude, of the parameter itself: the master weight where
products run in another dtype. Under FSDP2 each rank finds the mask of the whole weight, so that all have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ao_lab.sparsity.config import SparsityConfig, is_number
from reference.arrays.namespace import choice
from reference.sparsity.prune import LARGEST_DECAY

# Which phase of a sparse training a number of steps is in, and when masks are found.

WARMUP_PHASE, SPARSE_PHASE, COOLDOWN_PHASE = "warm-up", "sparse", "cool-down"


def phase(config: SparseTrainingConfig, done: int) -> str:
    """The phase of the step that comes after `done` steps: "warm-up", "sparse" or "cool-down".

    After the last of `steps` it stays the last one's: "cool-down" where there is one.
    """
    if done < config.warmup:
        return WARMUP_PHASE
    if config.cooldown and config.steps is not None and done >= config.steps - config.cooldown:
        return COOLDOWN_PHASE
    return SPARSE_PHASE


def finds_masks(config: SparseTrainingConfig, done: int) -> bool:
    """Whether masks are found before the step that comes after `done` steps."""
    since = done - config.warmup
    if phase(config, done) != SPARSE_PHASE:
        return False
    return since == 0 or (config.masks == "recomputed" and since % config.every == 0)


MASKS = ("fixed", "recomputed")
GRADIENTS = ("masked", "straight-through", "sr-ste")
PRODUCTS = ("dense", "cusparselt", "sparse_wgmma")
#: Those that multiply compressed 2:4 weights.
SPARSE = PRODUCTS[1:]


@dataclass(frozen=True)
class SparseTrainingConfig:
    """How linear layers train with N:M sparse weights, from a dense phase to sparse weights and back.

    pattern: "N:M", N of every M consecutive weights along the contraction axis stay. transposable: 2:4 masks whose transpose is
    2:4 too, so that the matmul of the input gradient has a 2:4 matrix as well.
    masks: "fixed" are found once, when the sparse phase begins (in the call of `sparsify_` without warm-up): the zeros of a
    weight that has the pattern already, else by magnitude; a weight that was pruned to another pattern is refused. Pruned
    weights are set to zero then and after each step.
    "recomputed" are found when the sparse phase begins and after every `every`-th of its steps; pruned weights keep their
    values.
    gradient: "masked" reaches kept weights alone, "straight-through" all, and "sr-ste" also pulls pruned ones towards zero by
    decay times their value. decay is 0 to 2**127; it is read by "sr-ste" alone.
    weight_gradient: "dense", a dense matmul; there is no other.
    warmup, cooldown: numbers of steps at the beginning and at the end in which layers are dense; cooldown needs `steps`, the
    number of all of them. Afterwards the model stays as it ended: dense with a cool-down, sparse without.
    products: the matmuls. "dense" uses dense matrices with zeros, on any device; "cusparselt" compresses weights and uses
    cuSPARSELt (CUDA, float16 or bfloat16 inputs, multiples of 16; the inputs' gradient where masks are transposable);
    "sparse_wgmma" does so with our own kernels for Hopper.

    Raises ValueError for values outside of these, TypeError for a pattern that is no string or a flag that is no bool.
    """

    pattern: str = "2:4"
    masks: str = "fixed"
    every: int = 1
    transposable: bool = False
    gradient: str = "masked"
    decay: float = 2e-4
    weight_gradient: str = "dense"
    warmup: int = 0
    cooldown: int = 0
    steps: int | None = None
    products: str = "dense"

    def __post_init__(self) -> None:
        choice(self.masks, MASKS, "SparseTrainingConfig: masks")
        choice(self.gradient, GRADIENTS, "SparseTrainingConfig: gradient")
        choice(self.weight_gradient, ("dense",), "SparseTrainingConfig: weight_gradient")
        choice(self.products, PRODUCTS, "SparseTrainingConfig: products")
        self.scoring()
        if self.products in SPARSE and self.pattern != "2:4":
            raise ValueError(
                f"SparseTrainingConfig: products={self.products!r} needs 2:4 matrices, got pattern {self.pattern!r}; "
                f"products='dense' supports every pattern"
            )
        if not is_number(self.decay) or not (isfinite(self.decay) and 0 <= self.decay < LARGEST_DECAY):
            raise ValueError(
                f"SparseTrainingConfig: decay is a number from 0 to 2**127, got {self.decay!r}; 2e-4 is usual"
            )
        self._check_steps()

    def _check_steps(self) -> None:
        """Whole numbers that fit into each other."""
        for name, least in (("every", 1), ("warmup", 0), ("cooldown", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"SparseTrainingConfig: {name} is a number of steps, {least} or more, got {value!r}"
                )
        if self.every != 1 and self.masks == "fixed":
            raise ValueError(
                f"SparseTrainingConfig: fixed masks are found once, got every={self.every}; masks='recomputed' renews them"
            )
        if self.steps is None and self.cooldown:
            raise ValueError(
                f"SparseTrainingConfig: cooldown={self.cooldown} ends the training; give steps, the number of all steps"
            )
        if self.steps is not None and (
            type(self.steps) is not int or self.steps < self.warmup + self.cooldown
        ):
            raise ValueError(
                f"SparseTrainingConfig: steps is the number of all steps, warmup={self.warmup} and cooldown={self.cooldown} "
                f"among them, got {self.steps!r}"
            )

    def scoring(self) -> SparsityConfig:
        """The configuration of one-shot pruning that finds the same masks."""
        return SparsityConfig(self.pattern, "magnitude", self.transposable)

    def __str__(self) -> str:
        renewed = "" if self.masks == "fixed" or self.every == 1 else f" every {self.every} steps"
        turned = ", transposable" if self.transposable else ""
        return f"{self.pattern}, masks {self.masks}{renewed}{turned}, gradient {self.gradient}"


__all__ = ["SparseTrainingConfig"]
