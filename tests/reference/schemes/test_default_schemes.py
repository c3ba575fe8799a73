"""What every default scheme promises: finite input stays finite, and a NaN or an infinity stays inside its block.

`Scheme.deviations` against what records do: which finite inputs become infinite or NaN, for every record.

Default records keep every finite input finite; another project's record that does not says so, and one that says so does.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.quantize.quantize import dequantize, quantize
from reference.schemes.conventions import (
    LARGE_16_OVERFLOWS,
    LARGE_OVERFLOWS,
    SMALL_IS_NAN,
    TINY_TENSOR_IS_NAN,
    torchao_integer,
)
from reference.schemes.schemes import SCHEMES, Scheme, scheme_of
from tests.support.bits import words
from tests.support.edge_blocks import NUMPY_DTYPES

DEFAULTS = sorted(name for name in SCHEMES if "." not in name)
DTYPES = tuple(NUMPY_DTYPES)
EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
WORD = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
# Blocks of 128 x 128 are the largest; two of them along each axis.
SHAPES = {"fp8_128x128": (256, 256), "fp8_128x128_e5m2": (256, 256), "nf4": (6, 64)}
SHAPE = (3, 512)


def shape_of(scheme: Scheme) -> tuple[int, int]:
    return SHAPES.get(scheme.name, SHAPE)


def finite_patterns(shape: tuple[int, ...], dtype: str, seed: int, exponents: tuple[int, int]) -> np.ndarray:
    """Uniformly random finite patterns with biased exponents in a range: subnormals to the largest floats, and zeros."""
    rng = np.random.default_rng(seed)
    mask, word = EXPONENTS[dtype], np.iinfo(WORD[dtype])
    sign, step, largest = 1 << (word.bits - 1), mask & -mask, mask // (mask & -mask) - 1
    low, high = (exponent * largest // 255 for exponent in exponents)
    bits = rng.integers(0, word.max + 1, shape) & ~mask | rng.integers(low, high + 1, shape) * step
    extreme = rng.choice([0, sign, 1, mask - 1, mask - 1 | sign], shape)
    return np.where(rng.random(shape) < 0.05, extreme, bits).astype(WORD[dtype]).view(NUMPY_DTYPES[dtype])


exponent_ranges = st.sampled_from([(0, 255), (0, 0), (0, 3), (250, 255), (100, 140), (254, 255), (0, 127)])


@pytest.mark.parametrize("name", DEFAULTS)
# NF4's scale rounds up beyond the largest float32 there.
@example(seed=1, dtype="float32", exponents=(0, 255), out="float32")
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    exponents=exponent_ranges,
    out=st.sampled_from(DTYPES),
)
def test_finite_input_stays_finite(
    name: str, seed: int, dtype: str, exponents: tuple[int, int], out: str
) -> None:
    x = finite_patterns(shape_of(SCHEMES[name]), dtype, seed, exponents)
    y = dequantize(quantize(x, name), out).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(y))
    assert not bad.size, [(int(i), hex(words(x).reshape(-1)[i]), float(y.reshape(-1)[i])) for i in bad[:4]]


def block_mask(scheme: Scheme, place: tuple[int, int]) -> np.ndarray:
    """The elements that share the scale of the element at `place`."""
    rows, columns = np.indices(shape_of(scheme))
    block = scheme.scale.block
    if isinstance(block, str):
        flat = rows * columns.shape[1] + columns
        size = flat.size if block == "tensor" else int(block.removeprefix("flat:"))
        return flat // size == flat[place] // size
    height, width = block if isinstance(block, tuple) else (1, columns.shape[1] if block == -1 else block)
    return (rows // height == place[0] // height) & (columns // width == place[1] // width)


@pytest.mark.parametrize("name", DEFAULTS)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    special=st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]),
)
def test_a_special_stays_in_its_block(name: str, seed: int, dtype: str, special: float) -> None:
    """All of its block becomes NaN, and every other block keeps its bits, as if the element were zero. NF4 quantizes scales
    about their mean, which then passes over the block: there the comparison is with a block of NaNs only."""
    scheme = SCHEMES[name]
    x = finite_patterns(shape_of(scheme), dtype, seed, (0, 250))
    place = tuple(int(i) for i in np.random.default_rng(seed).integers(0, x.shape))
    inside = block_mask(scheme, place)
    without, spoiled = x.copy(), x.copy()
    centered = scheme.outer is not None and scheme.outer.center == "mean"
    without[inside if centered else place] = np.nan if centered else 0
    spoiled[place] = special
    clean, q = quantize(without, scheme), quantize(spoiled, scheme)
    assert np.isnan(dequantize(q)[inside]).all()
    np.testing.assert_array_equal(words(dequantize(clean))[~inside], words(dequantize(q))[~inside])
    assert np.isfinite(dequantize(q)[~inside]).all()
    np.testing.assert_array_equal(
        quantize(x if centered else without, scheme).codes[~inside], q.codes[~inside]
    )


DEVIATION_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
DEVIATION_SHAPE = (128, 256)
# Of the patterns that `torchao_integer` knows, one of each kind.
OTHERS = (
    "intx1_g32_asymmetric",
    "intx7_rowwise_no_clipping",
    "intx4_g64_f32",
    "intx4_g64_bf16",
    "int8_g64",
    "intx4_g64",
)
NAMES = [*SCHEMES, *(f"torchao.{name}" for name in OTHERS)]


def scheme(name: str) -> Scheme:
    return torchao_integer(name) or scheme_of(name)


def large(dtype: str) -> list[npt.NDArray[np.float64]]:
    """Tensors with the largest finite numbers of a dtype: alone, of both signs, among others, of all sizes."""
    most = float(ml_dtypes.finfo(DEVIATION_DTYPES[dtype]).max)
    places = np.arange(DEVIATION_SHAPE[0] * DEVIATION_SHAPE[1]).reshape(DEVIATION_SHAPE)
    signs = np.where(places % 2, 1.0, -1.0)
    sizes = np.random.default_rng(0).uniform(-1, 1, DEVIATION_SHAPE)
    few = np.where(places % 16 == 3, most, 1.0)
    # Scales that are rounded themselves may end above the largest.
    fall = most * (1 - 0.3 * (places // 64 % 97 == 5))
    return [
        np.full(DEVIATION_SHAPE, most), -np.full(DEVIATION_SHAPE, most), most * signs, 0.6 * most * signs, sizes * most, few,
        fall,
    ]  # fmt: skip


def small(dtype: str) -> list[npt.NDArray[np.float64]]:
    """Zeros, tensors around the smallest normal number and of the smallest subnormal one, rows of zeros among others."""
    limits = ml_dtypes.finfo(DEVIATION_DTYPES[dtype])
    sizes = np.random.default_rng(1).uniform(-1, 1, DEVIATION_SHAPE)
    rows = np.where(np.arange(DEVIATION_SHAPE[0])[:, None] % 2, sizes, 0)
    least = float(limits.smallest_subnormal)
    return [
        np.zeros(DEVIATION_SHAPE),
        rows,
        np.full(DEVIATION_SHAPE, least),
        sizes * float(limits.smallest_normal),
        sizes * 1e-6,
    ]


def finite(x: npt.NDArray[np.float64], record: Scheme, dtype: str, output: str) -> bool:
    """Whether all values of a tensor are finite after quantization."""
    values = dequantize(quantize(x.astype(DEVIATION_DTYPES[dtype]), record), output)
    return bool(np.isfinite(np.asarray(values).astype(np.float64)).all())


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs(name: str) -> None:
    record = scheme(name)
    wide = all(finite(x, record, "float32", "float32") for x in large("float32"))
    narrow = all(finite(x, record, dtype, dtype) for dtype in ("bfloat16", "float16") for x in large(dtype))
    assert (LARGE_OVERFLOWS in record.deviations) == (not wide)
    assert (LARGE_16_OVERFLOWS in record.deviations) == (wide and not narrow)


@pytest.mark.parametrize("name", NAMES)
def test_small_inputs(name: str) -> None:
    record = scheme(name)
    good = all(finite(x, record, dtype, "float32") for dtype in DEVIATION_DTYPES for x in small(dtype))
    assert ({SMALL_IS_NAN, TINY_TENSOR_IS_NAN}.isdisjoint(record.deviations)) == good


def test_the_largest_range_of_integers_with_zero_points() -> None:
    """max - min beyond the largest float32 makes the scale infinite: of the seven records in question, each says so."""
    x = np.full(DEVIATION_SHAPE, 2.0e38, np.float32)
    x[:, ::2] *= -1
    asymmetric = [name for name in SCHEMES if name.startswith("torchao.int") and name.endswith("_asymmetric")]
    assert len(asymmetric) >= 7
    for name in asymmetric:
        q = quantize(x, name)
        assert np.isinf(q.scale).all()
        assert not np.isfinite(dequantize(q)).any()
