"""Sums of torch tensors in the order that `reference.quantize.statistics` states."""

from __future__ import annotations

import torch


def tree_sum(terms: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """The sum along one axis, which goes away: adjacent pairs, in a tree filled up with zeros to a power of two.

    terms: any float dtype, to which every addition is rounded; on any device, by torch's operations. +0 along an empty axis.
    """
    terms = terms.movedim(axis, 0)
    if not len(terms):
        return terms.new_zeros(terms.shape[1:])
    while len(terms) > 1:
        pairs = terms[: len(terms) // 2 * 2]
        sums = pairs[0::2] + pairs[1::2]
        # An odd one out meets the zero that would stand there.
        terms = torch.cat([sums, terms[-1:] + 0]) if len(terms) % 2 else sums
    return terms[0]


__all__ = ["tree_sum"]
