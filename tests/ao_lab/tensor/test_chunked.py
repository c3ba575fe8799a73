"""Weights in pieces of rows: the bits of the whole weight at once, for schemes of every structure."""

import pytest
import torch

from ao_lab import Recipe, quantized
from ao_lab.config.recipe import named
from ao_lab.tensor import chunked
from ao_lab.tensor.metadata import PARTS
from ao_lab.testing.strategies import assert_same_bits
from tests.support.record_samples import STRUCTURES, sampled

MADE = [
    "int8_tensorwise_asymmetric",
    "int4_tensorwise",
    "int3_rowwise_asymmetric",
    "int4_g32_asymmetric_bf16",
    "int1_g32",
]
SHAPES = [
    ((24, 512), -1),
    ((3, 8, 512), -1),
    ((3, 512, 8), -2),
    ((384, 256), -1),
    ((2, 256, 128), -1),
    ((2, 160, 128), -1),
    ((50, 101), -1),
    ((256, 24), 0),
]
#: Blocks in two dimensions below a scale over the whole tensor.
WHOLE = {"te.nvfp4_16x16"}
#: Extremes that whole-tensor scales must see, wherever they are.
SPECIAL = {
    "plain": [],
    "large": [3e38],
    "zeros": [],
    "infinite": [torch.inf, -2.0],
    "nan": [torch.nan, 5.0],
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunked, "PIECE", 2048)


@pytest.mark.parametrize("name", [*sampled(STRUCTURES), *MADE])
def test_pieces_are_the_whole(name):
    scheme, cut = named(name), 0
    recipe = Recipe(weight=scheme)
    cases = [(SHAPES[0], kind) for kind in SPECIAL] + [(case, "large") for case in SHAPES[1:]]
    for (shape, axis), kind in cases:
        torch.manual_seed(0)
        x = torch.randn(shape).to(torch.bfloat16) * (kind != "zeros")
        for i, value in enumerate(SPECIAL[kind]):
            x.view(-1)[(i + 1) * x.numel() // 3] = value
        try:
            expected = quantized(x, recipe, axis=axis)
        except ValueError:  # blocks that do not divide the shape
            continue
        made = chunked.quantized_by_rows(x, recipe, axis=axis)
        assert (made.meta, made.shape, made.dtype) == (expected.meta, expected.shape, expected.dtype)
        for part in PARTS:
            a, b = getattr(made, part), getattr(expected, part)
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a, b)
        cut += chunked.cuts_of(scheme, shape, axis) is not None or chunked.has_scaled_scales(scheme)
    assert (cut == 0) == (name in WHOLE)


def test_pieces_are_small(monkeypatch):
    """No call sees more than a piece, or than the rows of one block."""
    seen, original = [], chunked.fast.quantize
    monkeypatch.setattr(
        chunked.fast, "quantize", lambda x, *a, **k: (seen.append(x.numel()), original(x, *a, **k))[1]
    )
    for name, most in (
        ("nf4", 2048),
        ("int4_g128", 2048),
        ("fp8_128x128", 128 * 256),
        ("nvfp4", 2048),
        ("int8_tensorwise", 2048),
    ):
        seen.clear()
        chunked.quantized_by_rows(torch.randn(3, 256, 256), Recipe(weight=named(name)))
        assert len(seen) > 2
        assert max(seen) <= most
