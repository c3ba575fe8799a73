"""Collages of real digits: where they lie, what is held out, what depends on the seed alone."""

import pytest
import torch

from experiments.sparsity import subjects as vision
from experiments.sparsity.subjects import Collages, load


def test_the_file_holds_the_digits_that_scikit_learn_has():
    train, held_out = load()
    assert (len(train.labels), len(held_out.labels)) == (1347, 450)
    # The first line of the file is a zero: its second row of pixels, in sixteenths.
    assert train.labels[:10].tolist() == list(range(10))
    assert (16 * train.images[0, 1]).tolist() == [0, 0, 13, 15, 10, 15, 5, 0]
    assert train.images.min() == 0
    assert train.images.max() == 1


def test_each_cell_holds_the_digit_of_its_label():
    train, _ = load()
    plain = Collages(cell=11, noise=0.0, faintest=1.0)
    images, labels = plain.draw(train, 5, torch.Generator().manual_seed(1))
    assert images.shape == (5, 1, 22, 22)
    # Less its mean, an image without noise has the least value where there is no ink.
    ink = images - images.amin((1, 2, 3), keepdim=True)
    for image, four in zip(ink, labels, strict=True):
        for place, label in enumerate(four.tolist()):
            down, right = place // 2 * 11, place % 2 * 11
            cell = image[0, down : down + 11, right : right + 11]
            views = cell.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 64)
            same = train.images[train.labels == label].reshape(-1, 64)
            # The digit lies in one of 16 places, and is one of those with this label: the mean's rounding is left.
            assert torch.cdist(views, same).min() < 1e-4


def test_a_seed_draws_the_same_collages():
    train, _ = load()
    first, again, other = (
        Collages().draw(train, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_another_file_is_refused(monkeypatch, tmp_path):
    other = tmp_path / "digits.csv.gz"
    other.write_bytes(b"x")
    monkeypatch.setattr(vision, "FILE", other)
    with pytest.raises(ValueError, match="is not the file of 1797 digits"):
        load.__wrapped__()
