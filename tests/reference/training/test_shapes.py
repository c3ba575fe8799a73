"""Shapes that recipes take: the words, and that they are right."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from reference.training import RECIPES, Recipe, training_linear, training_linear_vjp
from reference.training.linear import operands
from reference.training.recipe import PRODUCTS
from reference.training.shapes import unsupported_reason

NAMED = ("tensorwise", "blockwise", "mxfp8", "mxfp4", "nvfp4", "bf16")


def test_the_words():
    assert unsupported_reason("mxfp8", (2, 16, 64), (96, 64)) is None
    assert (
        unsupported_reason("mxfp8", (3, 16, 64), (40, 72))
        == "recipe mxfp8: N (output features) is 40, not a multiple of 32; K (input features) is 72, not a multiple of 32; "
        "M (rows of the input, all its axes but the last together) is 48, not a multiple of 32"
    )
    assert unsupported_reason("mxfp8", None, (96, 64)) is None


def test_rows_count_in_the_weight_gradient_alone():
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        assert "M (rows" in unsupported_reason(name, (3, 64), (64, 64))
        assert unsupported_reason(name, (3, 64), (64, 64), products=("output", "input_grad")) is None
    assert unsupported_reason("rowwise_with_gw_hp", (3, 64), (64, 64), multiple=16) is None


def test_square_blocks_count_on_both_axes():
    assert "N (output features) is 24" in unsupported_reason("nvfp4", None, (24, 64), products=("output",))


def test_what_a_device_asks_besides():
    assert unsupported_reason("rowwise", (24, 64), (64, 64)) is None
    assert "M (rows" in unsupported_reason("rowwise", (24, 64), (64, 64), multiple=16)
    assert "24, not a multiple of 16" in unsupported_reason("tensorwise", (24, 64), (64, 64), multiple=16)
    assert unsupported_reason("bf16", (3, 5), (7, 5), multiple=16) is None


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product((16, 24, 32), repeat=3)))
def test_it_says_what_the_quantizer_would(name, m, n, k):
    """Each product alone: no reason, and operands exist; a reason, and the quantizer refuses."""
    zeros = {"x": (m, k), "w": (n, k), "g": (m, n)}
    given = {key: np.zeros(shape, np.float32) for key, shape in zeros.items()}
    for which in PRODUCTS:
        reason = unsupported_reason(name, (m, k), (n, k), products=(which,))
        if reason is None:
            operands(which, name, **given)
        else:
            with pytest.raises(ValueError, match="divi"):
                operands(which, name, **given)


def test_the_linear_layer_says_so_first():
    x, w, g = (np.zeros(shape, np.float32) for shape in ((3, 64), (64, 64), (3, 64)))
    assert training_linear(x, w, "mxfp8").shape == (3, 64)
    with pytest.raises(
        ValueError, match=r"recipe mxfp8: M \(rows .* is 3, not a multiple of 32; pad it, or use another"
    ):
        training_linear_vjp(g, x, w, "mxfp8")
    with pytest.raises(ValueError, match=r"recipe mxfp8: K \(input features\) is 48"):
        training_linear(np.zeros((2, 48), np.float32), np.zeros((64, 48), np.float32), "mxfp8")


def test_a_mixed_operand_without_scheme_counts():
    mixed = replace(RECIPES["bf16"].weight_grad.a, hadamard=8)
    own = Recipe(name="own", weight_grad=replace(RECIPES["bf16"].weight_grad, a=mixed, b=mixed))
    assert (
        "M (rows of the input, all its axes but the last together) is 4, not a multiple of 8"
        in unsupported_reason(own, (4, 5), (7, 5))
    )


def test_a_transform_longer_than_the_blocks_counts():
    record = RECIPES["mxfp4"].weight_grad
    longer = replace(record, a=replace(record.a, hadamard=64), b=replace(record.b, hadamard=64))
    own = replace(RECIPES["mxfp4"], name="own", weight_grad=longer)
    assert "is 96, not a multiple of 64" in unsupported_reason(own, (96, 96), (96, 96))
    assert unsupported_reason(own, (128, 96), (96, 96)) is None
