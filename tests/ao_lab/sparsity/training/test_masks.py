"""Masks of weights in training."""

import pytest
import torch

import reference
from ao_lab import SparseTrainingConfig
from ao_lab.sparsity.training.masks import find_mask, zero_pruned_

RECOMPUTED = SparseTrainingConfig(masks="recomputed")


def weight(dtype=torch.float32, shape=(8, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["fixed", "recomputed"])
def test_by_magnitude(dtype, masks):
    w = weight(dtype)
    config = SparseTrainingConfig(masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune(w)))
    config = SparseTrainingConfig(pattern="1:8", masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune(w, pattern="1:8")))
    config = SparseTrainingConfig(transposable=True, masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune_transposable(w)))


def test_fixed_masks_are_the_zeros_that_are_there():
    """By another score than magnitude: pruned are the largest; a group with one weight keeps one."""
    w = weight()
    kept = ~torch.as_tensor(reference.prune(w))
    kept[0, :4] = torch.tensor([False, True, False, False])
    sparse = torch.where(kept, w, 0)
    assert torch.equal(find_mask(sparse, SparseTrainingConfig()), kept)
    assert find_mask(sparse, RECOMPUTED)[0, :4].sum() == 2
    # Three of four somewhere: the zeros are no mask.
    sparse[1, :4] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert torch.equal(find_mask(sparse, SparseTrainingConfig()), torch.as_tensor(reference.prune(sparse)))


def test_a_weight_of_zeros_is_not_dropped_whole():
    mask = find_mask(torch.zeros(4, 8), SparseTrainingConfig())
    assert mask.tolist() == [[True, True, False, False] * 2] * 4


def test_zeros_of_rows_are_no_transposable_mask():
    rows = torch.where(torch.as_tensor(reference.prune(weight())), weight(), 0)
    both = find_mask(rows, SparseTrainingConfig(transposable=True))
    assert int(both.T.reshape(-1, 4).sum(-1).max()) == 2
    turned = torch.where(both, rows + 1, 0)
    assert torch.equal(find_mask(turned, SparseTrainingConfig(transposable=True)), turned != 0)


def test_the_mask_decides_what_becomes_zero():
    w = torch.tensor([[float("nan"), -1.0, float("inf"), -0.0]])
    zero_pruned_(w, torch.tensor([[False, True, False, False]]))
    assert w.view(torch.int32).tolist() == [[0, torch.tensor(-1.0).view(torch.int32).item(), 0, 0]]
