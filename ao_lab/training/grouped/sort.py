"""Tokens sorted by expert and back, on their device: no count is read by the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Sorted(NamedTuple):
    """What `sort_by_expert` found of S = T * k pairs of a token and an expert."""

    #: (S,) int64: the pair at each sorted place; pair i is choice i % k of token i // k.
    order: torch.Tensor
    #: (E,) int32: the place after each expert's pairs; places from the last on are of no expert.
    offsets: torch.Tensor
    #: (E,) int32: pairs of each expert.
    counts: torch.Tensor


def sort_by_expert(router_indices: torch.Tensor, experts: int) -> Sorted:
    """Pairs of tokens and experts, sorted by expert; those of one expert stay in the order of the tokens.

    router_indices: (T, k) integers. Numbers outside 0 to experts - 1 are of no expert and come last, as expert-parallel
    routers mark pairs of other ranks. Raises TypeError for indices that are no integers.
    """
    if router_indices.is_floating_point() or router_indices.is_complex():
        raise TypeError(
            f"router_indices are integers, got {router_indices.dtype}; give topk's indices, not its values"
        )
    chosen = router_indices.reshape(-1)
    chosen = torch.where((chosen < 0) | (chosen >= experts), experts, chosen)
    found, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(found, numbers, right=True).to(torch.int32)
    return Sorted(order, offsets, torch.diff(offsets, prepend=offsets.new_zeros(1)))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return x[order // choices]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        rows = g[inverse(order)].reshape(-1, ctx.choices, g.shape[1])
        return rows.sum(1, dtype=torch.float32).to(g.dtype), None, None


def dispatch(x: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
    """(S, K): the token of each sorted pair, for x (T, K) and S = T * choices.

    Its gradient is the sum over each token's choices in float32, in their order: no atomic addition.
    """
    made: torch.Tensor = _Dispatch.apply(x, order, choices)  # type: ignore[no-untyped-call]
    return made


def combine(y: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(T, N): the sum over each token's k pairs of its weight times its row of y, in float32, in y's dtype.

    y: (S, N) sorted by expert; order: of `sort_by_expert`; weights: (T, k). The sum's order is that of the choices: no atomic
    addition, the same bits in every run. A pair of no expert has a row of zeros in y.
    """
    tokens, choices = weights.shape
    rows = y[inverse(order)].reshape(tokens, choices, y.shape[1]).to(torch.float32)
    return (rows * weights.to(torch.float32).unsqueeze(-1)).sum(1).to(y.dtype)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes another."""
    place = torch.empty_like(order)
    return place.scatter_(0, order, torch.arange(order.shape[0], device=order.device))


__all__ = ["Sorted", "combine", "dispatch", "inverse", "sort_by_expert"]
