"""Configurations of sparse training, and the phases that they describe."""

import pytest

from ao_lab import SparseTrainingConfig, SparsityConfig
from ao_lab.sparsity.training.config import finds_masks, phase


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"masks": "renewed"}, "masks"),
        ({"gradient": "ste"}, "gradient"),
        ({"weight_gradient": "sparse"}, "weight_gradient"),
        ({"products": "cutlass"}, "products"),
        ({"pattern": "4:2"}, "keep N of every M"),
        ({"pattern": "4:4"}, "keeps every weight"),
        ({"pattern": "1:4", "transposable": True}, "transposable masks are 2:4"),
        ({"pattern": "1:4", "products": "cusparselt"}, "products='cusparselt' multiplies 2:4"),
        ({"pattern": "1:4", "products": "sparse_wgmma"}, "products='sparse_wgmma' multiplies 2:4"),
        ({"decay": -1e-4}, r"0 to 2\*\*127"),
        ({"decay": float("inf")}, r"0 to 2\*\*127"),
        ({"decay": float("nan")}, r"0 to 2\*\*127"),
        ({"decay": "a"}, r"0 to 2\*\*127, got 'a'"),
        ({"decay": True}, r"0 to 2\*\*127"),
        ({"every": 0}, "every is a number of steps, 1 or more"),
        ({"every": 2}, "fixed masks are found once"),
        ({"warmup": -1}, "warmup is a number of steps"),
        ({"warmup": 1.0}, "warmup is a number of steps"),
        ({"cooldown": 1}, "give steps"),
        ({"steps": 3, "warmup": 2, "cooldown": 2}, "number of all steps"),
        ({"steps": 3.0}, "number of all steps"),
    ],
)
def test_values_that_mean_nothing(values, said):
    with pytest.raises(ValueError, match=said):
        SparseTrainingConfig(**values)


def test_what_is_no_pattern():
    with pytest.raises(TypeError, match="pattern is a string"):
        SparseTrainingConfig(pattern=2)
    with pytest.raises(TypeError, match="transposable is True or False"):
        SparseTrainingConfig(transposable=1)


def test_it_scores_as_one_shot_pruning_by_magnitude():
    assert SparseTrainingConfig(pattern="1:8").scoring() == SparsityConfig("1:8", "magnitude")
    assert SparseTrainingConfig(transposable=True).scoring() == SparsityConfig(transposable=True)


def test_phases():
    config = SparseTrainingConfig(masks="recomputed", every=2, warmup=2, cooldown=2, steps=9)
    assert [phase(config, done) for done in range(11)] == ["warm-up"] * 2 + ["sparse"] * 5 + ["cool-down"] * 4
    assert [done for done in range(11) if finds_masks(config, done)] == [2, 4, 6]


def test_fixed_masks_are_found_once():
    assert [n for n in range(9) if finds_masks(SparseTrainingConfig(warmup=3), n)] == [3]
    assert [n for n in range(9) if finds_masks(SparseTrainingConfig(), n)] == [0]
    every_step = SparseTrainingConfig(masks="recomputed")
    assert [n for n in range(4) if finds_masks(every_step, n)] == [0, 1, 2, 3]


def test_without_steps_it_stays_sparse():
    config = SparseTrainingConfig(warmup=1, steps=5)
    assert [phase(config, n) for n in (0, 1, 4, 5, 99)] == ["warm-up", "sparse", "sparse", "sparse", "sparse"]


def test_text():
    assert str(SparseTrainingConfig()) == "2:4, masks fixed, gradient masked"
    config = SparseTrainingConfig(masks="recomputed", every=40, transposable=True, gradient="sr-ste")
    assert str(config) == "2:4, masks recomputed every 40 steps, transposable, gradient sr-ste"
