"""Blocks of a tensor: `split` and `join` are inverse, scales have the documented shapes, the wrong shapes are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks, normalize_axis
from tests.support.refusals import refused

NS = namespace_of(np.zeros(1))
BLOCKS = [1, 3, 32, -1, (2, 3), (1, 4), "tensor", "flat:5"]


def record(block, partial=True):
    return SimpleNamespace(block=block, partial=partial)


@st.composite
def cases(draw):
    block = draw(st.sampled_from(BLOCKS))
    shape = tuple(
        draw(st.lists(st.integers(0, 7), min_size=2 if isinstance(block, tuple) else 0, max_size=4))
    )
    axis = draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    return shape, block, axis


@settings(max_examples=300)
@given(cases())
def test_join_undoes_split(case):
    shape, block, axis = case
    cut = Blocks.of(shape, record(block), axis)
    x = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    split = cut.split(NS, x)
    np.testing.assert_array_equal(cut.join(NS, split), x)
    scale = np.arange(np.prod(split.shape[:-1], dtype=int)).reshape((*split.shape[:-1], 1))
    exposed = cut.expose(scale, NS)
    assert exposed.shape == cut.scale_shape
    np.testing.assert_array_equal(cut.accept(exposed, NS).reshape(-1), scale.reshape(-1))


@settings(max_examples=300)
@given(cases())
def test_elements_of_a_block_share_a_scale(case):
    """Against indices: the element at i belongs to the scale at i // block along the blocked axes."""
    shape, block, axis = case
    cut = Blocks.of(shape, record(block), axis)
    blocks = cut.split(NS, np.zeros(shape, np.int32))
    numbers = np.arange(np.prod(cut.scale_shape, dtype=int)).reshape(cut.scale_shape)
    spread = np.broadcast_to(cut.accept(numbers, NS), blocks.shape).astype(np.int32)
    got = cut.join(NS, spread)
    for index in np.ndindex(*shape):
        assert got[index] == numbers[scale_index(index, shape, block, axis)]


def scale_index(index, shape, block, axis):
    if block == "tensor":
        return ()
    if isinstance(block, str):
        return (int(np.ravel_multi_index(index, shape)) // int(block[5:]) if shape else 0,)
    if not shape:
        return () if block == -1 else (0,)
    index, axis = list(index), axis % len(shape)
    sizes = {axis: block[1] if isinstance(block, tuple) else block}
    if isinstance(block, tuple):
        sizes[max(i for i in range(len(shape)) if i != axis)] = block[0]
    for position, size in sizes.items():
        index[position] = 0 if size == -1 else index[position] // size
    return tuple(index)


@pytest.mark.parametrize(
    ("shape", "block", "axis", "expected"),
    [
        ((4, 64), 32, -1, (4, 2)),
        ((64, 4), 32, 0, (2, 4)),
        ((2, 64, 3), 32, 1, (2, 2, 3)),
        ((2, 65, 3), 32, 1, (2, 3, 3)),
        ((4, 6), -1, -1, (4, 1)),
        ((4, 6), -1, 0, (1, 6)),
        ((4, 0), -1, -1, (4, 1)),
        ((0, 6), -1, -1, (0, 1)),
        ((4, 0), 32, -1, (4, 0)),
        ((5, 130, 257), (128, 128), -1, (5, 2, 3)),
        ((5, 130, 257), (16, 128), 1, (5, 2, 17)),
        ((130, 5, 257), (16, 128), 0, (2, 5, 17)),
        ((4, 6), "tensor", -1, ()),
        ((), "tensor", -1, ()),
        ((), -1, -1, ()),
        ((), 32, -1, (1,)),
        ((3, 50), "flat:64", -1, (3,)),
        ((0, 50), "flat:64", -1, (0,)),
    ],
)
def test_shapes_of_scales(shape, block, axis, expected):
    assert Blocks.of(shape, record(block), axis).scale_shape == expected


def test_a_short_block_repeats_its_last_element():
    cut = Blocks.of((5,), record(4), 0)
    assert cut.split(NS, np.arange(5, dtype=np.int32)).tolist() == [[0, 1, 2, 3], [4, 4, 4, 4]]


def test_an_empty_row_holds_one_zero():
    cut = Blocks.of((2, 0), record(-1), -1)
    assert cut.split(NS, np.zeros((2, 0), np.int32)).tolist() == [[[0]], [[0]]]


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        (
            (4, 33),
            32,
            r"shape \(4, 33\): 33 elements are not divisible by the block size 32 along axis 1; pad",
        ),
        ((), 32, r"a single value \(shape \(\)\) has no axis to cut into blocks of 32"),
        ((3, 4), (2, 4), r"shape \(3, 4\): 3 elements are not divisible by the block size 2"),
        ((9,), "flat:4", r"shape \(9,\): 9 elements are not divisible by the block size 4; pad"),
        ((4,), (2, 2), r"blocks of \(2, 2\) need at least two axes, got shape \(4,\)"),
    ],
)
def test_refused_shapes(shape, block, message):
    refused(ValueError, message, Blocks.of, shape, record(block, partial=False), -1)


def test_axes():
    assert [normalize_axis(axis, (2, 3)) for axis in (-2, -1, 0, 1)] == [0, 1, 0, 1]
    assert normalize_axis(-1, (1,)) == 0
    refused(ValueError, r"axis 1 is outside a tensor of shape \(2,\) with 1 axes", normalize_axis, 1, (2,))
    for wrong in (True, 1.0, None, np.float32(0)):
        refused(TypeError, "axis is an integer", normalize_axis, wrong, (2, 3))
