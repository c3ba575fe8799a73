"""Patches, means over squares, and sizes that do not fit."""

import pytest
import torch

from experiments.models.vision_transformer import VisionConfig, VisionTransformer, patches

TINY = VisionConfig(
    name="tiny", image=8, patch=2, width=8, layers=1, heads=2, feed_forward=16, classes=3, grid=2
)


def test_patches_are_squares_row_by_row():
    images = torch.arange(2 * 16.0).view(2, 1, 4, 4)
    found = patches(images, 2)
    assert found.shape == (2, 4, 4)
    assert found[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert torch.equal(found[1], found[0] + 16)


def test_each_prediction_is_of_the_tokens_of_its_square():
    torch.manual_seed(0)
    model = VisionTransformer(TINY)
    # The tokens of a square, by their places in a 4 x 4 image of tokens.
    squares = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    x = torch.randn(3, 16, 8)
    expected = torch.stack([x[:, places].mean(1) for places in squares], 1)
    assert torch.allclose(model.means(x), expected, atol=1e-6)
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 4, 3)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="patches of 3 pixels"):
        VisionConfig(name="x", image=8, patch=3, width=8, layers=1, heads=2, feed_forward=8, classes=2)
    with pytest.raises(ValueError, match="3 heads a width of 8"):
        VisionConfig(name="x", image=8, patch=2, width=8, layers=1, heads=3, feed_forward=8, classes=2)
