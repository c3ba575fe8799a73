"""How moments are stored: formats of other libraries value for value, their codes bit for bit, what becomes of small ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import FORMATS
from reference.formats.encode import philox
from reference.optim.states import (
    STATES,
    State,
    halves,
    load_state,
    matrix_shape,
    states_of,
    store_state,
)

OURS = ("8bit", "4bit", "lion.8bit")


def moments(seed=0, shape=(6, 512), spread=3.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


def stored(x, state):
    words = np.random.default_rng(1).integers(0, 1 << 32, x.shape, np.uint32) if state.stochastic else None
    return store_state(x, state, words)


def torchao():
    return pytest.importorskip("torchao.optim.quant_utils")


@pytest.mark.parametrize("name", ["torchao.8bit", "torchao.4bit"])
@pytest.mark.parametrize("second", [False, True])
def test_codes_are_torchaos(name, second):
    """Bit for bit but for ties, which random numbers do not meet."""
    x = moments() if not second else moments() ** 2
    state = STATES[name].second if second else STATES[name].first
    scaled, scale = torchao().scale_tensor(torch.from_numpy(x), state.block)
    quantized = torchao().quantize_8bit_with_qmap if "8" in name else torchao().quantize_4bit_with_qmap
    table = torch.tensor(FORMATS[state.scheme.element].table)
    codes = quantized(scaled, table).numpy()
    q = stored(x, state)
    assert np.array_equal(q.scale.reshape(-1), scale.numpy())
    if "4" in name:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    assert np.array_equal(q.codes, codes)


def test_fp8_is_torchaos():
    fp8 = pytest.importorskip("torchao.optim.subclass_fp8")
    x, state = moments(), STATES["torchao.fp8"].first
    codes, scale = fp8.quantize_fp8(torch.from_numpy(x), state.block)
    q = stored(x, state)
    assert np.array_equal(q.codes, codes.view(torch.uint8).numpy())
    assert np.array_equal(q.scale.reshape(-1), scale.numpy())


@pytest.mark.parametrize("name", OURS)
def test_a_second_moment_is_never_stored_as_0(name):
    """Nor is that of a parameter which has not had a gradient: its root is 2**-50 (2**-44)."""
    state = STATES[name].second
    if state.scheme is None:
        return
    assert (load_state(stored(moments(spread=8.0) ** 2, state), state) > 0).all()
    root = 2.0**-50 if "8" in name else 2.0**-44
    assert (load_state(stored(np.zeros((2, 256), np.float32), state), state) == np.float32(root) ** 2).all()


@pytest.mark.parametrize("name", ["torchao.8bit", "torchao.fp8", "flashoptim.8bit"])
def test_other_libraries_store_0(name):
    """What the default states are there for: the deviation is named, and real."""
    assert any("stored as 0" in text for text in STATES[name].deviations)
    v = np.full((1, 256), 1e-12, np.float32)
    v[0, ::32] = 1
    assert (load_state(stored(v, STATES[name].second), STATES[name].second)[v < 1] == 0).all()


@pytest.mark.parametrize("name", ["8bit", "lion.8bit"])
def test_what_was_stored_is_stored_again_as_the_same_values(name):
    """Scales are powers of two: float32 state dicts lose nothing. (A maximum that was rounded down may have half the scale.)"""
    for state, x in ((STATES[name].first, moments()), (STATES[name].second, moments() ** 2)):
        if state.scheme is None:
            continue
        q = stored(x, state)
        again = store_state(
            load_state(q, state), state, np.full(x.shape, 1 << 31, np.uint32) if state.stochastic else None
        )
        assert np.array_equal(load_state(q, state), load_state(again, state))


def test_softsign_is_its_formula():
    """int8 of 2x / (1 + |x|) of elements over their block's absmax (float16), and back: steps are finest at 0."""
    state, x = STATES["flashoptim.8bit"].first, moments(spread=1.0)
    back = load_state(stored(x, state), state)
    scale = np.abs(x).reshape(6, -1, 32).max(-1).astype(np.float16).astype(np.float64).repeat(32, 1)
    y = np.minimum(np.abs(x) / scale, 1)
    # Of t = 2y / (1 + y), at most half a step off (and what four float32 operations add), y = t / (2 - t) is convex: it is off
    # by no more than at t + h. Elements beyond the rounded scale are stored as it; four operations round what is read.
    h = 0.5 / 127 + 4 * 2.0**-24
    bound = scale * h * (1 + y) ** 2 / (2 - h * (1 + y)) + np.maximum(np.abs(x) - scale, 0)
    assert (np.abs(back - x) <= bound + 4 * 2.0**-24 * np.abs(back)).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["8bit", "4bit"]))
def test_errors_stay_below_a_step(seed, name):
    """e4m3: the root between its neighbours, 1/8 of it apart at most; 15 levels: 1/15 of the block's largest."""
    state = STATES[name].second
    v = moments(seed, (2, 256), 1.0) ** 2
    root, back = np.sqrt(v), np.sqrt(load_state(stored(v, state), state))
    largest = np.repeat(root.reshape(-1, state.block).max(-1), state.block).reshape(root.shape)
    step = np.maximum(root / 8, largest * 2.0**-13) if name == "8bit" else largest / 15
    assert (np.abs(back - root) <= step * (1 + 1e-5)).all()


def test_rounding_is_unbiased():
    """The mean of 4000 roundings of a root: within 5 standard errors of a step."""
    state = STATES["8bit"].second
    root = np.linspace(1, 2, 250, dtype=np.float32)[None].repeat(4000, 0)
    root[:, 0] = 2
    back = np.sqrt(load_state(stored(root * root, state), state))
    assert (np.abs(back.mean(0) - root[0]) <= 5 * 0.125 / 2 / 4000**0.5).all()


@pytest.mark.parametrize("swapped", [False, True])
def test_halves_are_those_of_philox(swapped):
    words = halves((3, 300), 256, seed=7 + (5 << 32), step=9, parameter=4, swapped=swapped, first=1)
    for row, column in ((0, 0), (0, 7), (1, 255), (2, 299), (1, 1)):
        index = (row * 2 + column // 256 + 1) * 256 + column % 256
        counter = tuple(np.array([value], np.uint64) for value in (index // 8, 0, 4, 9))
        word = int(philox(7 + (5 << 32), counter)[index % 8 // 2][0])
        half = word >> 16 if index % 2 != swapped else word & 0xFFFF
        assert int(words[row, column]) == half << 16


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4000, 64), (4000, 64)), ((32, 16, 3, 3), (32, 144)), ((8, 512, 512), (4096, 512)), ((512,), (1, 512)), ((), (1, 1)),
     ((4, 8, 64), (4, 512))],
)  # fmt: skip
def test_rows_end_where_the_first_axis_says(shape, expected):
    assert matrix_shape(shape, 256) == expected


def test_refusals():
    with pytest.raises(ValueError, match="unknown states '8bits'"):
        states_of("8bits")
    with pytest.raises(ValueError, match="power of two from 8 to 4096, got 100"):
        STATES["8bit"].with_block(100)
    with pytest.raises(ValueError, match="have one block size, got 256 and 128"):
        replace(STATES["8bit"], second=STATES["4bit"].second)
    with pytest.raises(ValueError, match="there is nothing to quantize"):
        store_state(moments(), STATES["float32"].first)
    with pytest.raises(ValueError, match="transform"):
        State(name="x", scheme=None, transform="log")
