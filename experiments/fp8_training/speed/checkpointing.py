"""Activation checkpointing of decoder layers: none, every second layer, all of each layer, or per operation.

Per operation, as torchtitan does it: the outputs of attention and of every second matrix product are kept, all else is computed
again in backward. Products are counted in forward and in recomputation on their own, so that both keep the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

NONE, SECOND, FULL, PER_OP = "none", "every 2nd layer", "full", "per operation"
#: Names of operators: matrix products, of any library, and what is always kept.
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm")
KEPT = ("scaled_dot_product", "_scaled_dot", "aten.max.")


def apply(layers: Iterable[nn.Module], kind: str) -> None:
    """Let layers compute again in backward what `kind` does not keep; ValueError for another kind."""
    if kind not in (NONE, SECOND, FULL, PER_OP):
        raise ValueError(f"checkpointing is {NONE}, {SECOND}, {FULL} or {PER_OP}; got {kind!r}")
    for number, layer in enumerate(layers):
        if kind in (FULL, PER_OP) or (kind == SECOND and number % 2 == 0):
            layer.forward = _recomputed(layer.forward, kind == PER_OP)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], per_op: bool) -> Callable[..., Any]:
    """forward, computed again in backward. Functions: of a module whose forward is a `functools.partial` torch.compile compiles
    nothing, and does not say so."""

    def all_again(*args: Any, **options: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options)

    def some_again(*args: Any, **options: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **options)

    return some_again if per_op else all_again


def contexts() -> Any:
    """The contexts of forward and recomputation, with counts of their own."""
    return create_selective_checkpoint_contexts(policy())


def policy() -> Callable[..., CheckpointPolicy]:
    """What is kept: see the module's text."""
    counts = {False: 0, True: 0}

    def decide(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        name = str(operator)
        if name.startswith(PRODUCTS):
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        else:
            kept = any(word in name for word in KEPT)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


__all__ = ["FULL", "NONE", "PER_OP", "SECOND", "apply", "contexts", "policy"]
