"""Sorting tokens by expert, and their results added up again."""

import pytest
import torch

from ao_lab.training.grouped.sort import combine, sort_by_expert


def test_pairs_stand_by_expert_in_the_order_of_tokens():
    indices = torch.tensor([[2, 0], [0, 5], [2, 2], [-1, 0]])
    order, offsets, counts = sort_by_expert(indices, 4)
    assert order.tolist() == [1, 2, 7, 0, 4, 5, 3, 6]
    assert offsets.tolist() == [3, 3, 6, 6]
    assert counts.tolist() == [3, 0, 3, 0]
    assert offsets.dtype == counts.dtype == torch.int32


def test_no_tokens():
    order, offsets, counts = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.shape == (0,)
    assert offsets.tolist() == counts.tolist() == [0, 0, 0]
    assert combine(torch.empty(0, 5), order, torch.empty(0, 2)).shape == (0, 5)


def test_values_are_no_indices():
    with pytest.raises(TypeError, match="topk's indices"):
        sort_by_expert(torch.rand(3, 2), 4)


def test_results_come_back_to_their_tokens():
    """The weighted sum that a loop over tokens gives, rounded once, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(4, (9, 3), generator=generator)
    weights = torch.rand(9, 3, generator=generator).requires_grad_()
    table = torch.randn(4, 9, 6, generator=generator).bfloat16()
    order, _, _ = sort_by_expert(indices, 4)
    rows = table[indices.reshape(-1)[order], order // 3].requires_grad_()
    found = combine(rows, order, weights)
    truth = sum(table[indices[:, c], torch.arange(9)].float() * weights[:, c : c + 1] for c in range(3))
    assert torch.equal(found, truth.bfloat16())
    found.float().sum().backward()
    torch.testing.assert_close(weights.grad, table[indices, torch.arange(9)[:, None]].float().sum(-1))
    assert torch.equal(rows.grad, weights.detach().reshape(-1)[order, None].expand(-1, 6).bfloat16())
