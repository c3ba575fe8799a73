"""Which phase of a sparse training a number of steps is in, and when masks are found."""

from __future__ import annotations

from ao_lab.sparsity.training.config import SparseTrainingConfig

WARMUP, SPARSE, COOLDOWN = "warm-up", "sparse", "cool-down"


def phase(config: SparseTrainingConfig, done: int) -> str:
    """The phase of the step that comes after `done` steps: "warm-up", "sparse" or "cool-down".

    After the last of `steps` it stays the last one's: "cool-down" where there is one.
    """
    if done < config.warmup:
        return WARMUP
    if config.cooldown and config.steps is not None and done >= config.steps - config.cooldown:
        return COOLDOWN
    return SPARSE


def finds_masks(config: SparseTrainingConfig, done: int) -> bool:
    """Whether masks are found before the step that comes after `done` steps."""
    since = done - config.warmup
    if phase(config, done) != SPARSE:
        return False
    return since == 0 or (config.masks == "recomputed" and since % config.every == 0)


__all__ = ["COOLDOWN", "SPARSE", "WARMUP", "finds_masks", "phase"]
