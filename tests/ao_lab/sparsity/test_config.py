"""What a `SparsityConfig` refuses, and what it says of itself."""

import pytest

from ao_lab import SparsityConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"score": "norm"}, r"score is one of magnitude, wanda, ria, sparsegpt; got 'norm'"),
        ({"pattern": "4:2"}, r"1 <= N <= M.*got '4:2'"),
        ({"pattern": "4:4"}, r"'4:4' keeps every weight"),
        ({"transposable": True, "pattern": "1:4"}, r"transposable masks are 2:4.*got '1:4' by 'magnitude'"),
        ({"transposable": True, "score": "sparsegpt"}, r"transposable masks are 2:4.*by 'sparsegpt'"),
        ({"damping": -0.1}, r"damping is a share.*got -0.1"),
        ({"damping": float("nan")}, r"damping is a share.*got nan"),
        ({"damping": "a"}, "damping is a share of the mean diagonal, 0 to 1, got 'a'"),
        ({"damping": None}, "damping is a share of the mean diagonal, 0 to 1, got None"),
        ({"block": 6}, r"block is a positive multiple of the 4 of '2:4', got 6"),
        ({"block": 0}, r"block is a positive multiple.*got 0"),
        ({"block": True}, r"block is a positive multiple.*got True"),
    ],
)
def test_values_outside_of_the_rules(given, said):
    with pytest.raises(ValueError, match=said):
        SparsityConfig(**given)


def test_types():
    with pytest.raises(TypeError, match="got tuple"):
        SparsityConfig((2, 4))
    with pytest.raises(TypeError, match="transposable is True or False, got 1"):
        SparsityConfig(transposable=1)


def test_columns_of_sparsegpt_are_a_multiple_of_the_group():
    assert SparsityConfig().columns == 128
    assert SparsityConfig("3:5").columns == 130
    assert SparsityConfig(block=8).columns == 8


def test_text():
    assert str(SparsityConfig(score="wanda", transposable=True)) == "2:4 by wanda, transposable"
