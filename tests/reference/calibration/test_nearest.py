"""Rounding under fixed scales: the values of the quantizer, for every scheme, as a tensor and column by column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reference import SCHEMES, Scales, choose_scales, dequantize, quantize
from reference.arrays.namespace import namespace_of
from reference.calibration.nearest import Nearest, by_columns
from reference.formats.formats import FORMATS
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scale, Scheme

F = np.float32
NS = namespace_of(np.empty(0))
#: Records beside those of SCHEMES: what their rules lack.
OWN = [
    Scheme(name="uint4_g32", element="uint4", scale=Scale(block=32, target=15.0), rounding="toward_zero"),
    Scheme(
        name="e4m3_nan",
        element="float8_e4m3fn",
        scale=Scale(block=32, target=448.0),
        overflow="nan",
        nan="ieee",
    ),
    Scheme(name="bf16_scales", element="int3", scale=Scale(block=32, target=3.0, storage="bfloat16")),
]
ALL = [*SCHEMES.values(), *OWN]


def elements(scheme, seed=0, rows=256, k=256):
    """Finite elements around the scales of a matrix: codes and their middles, ties, neighbours, tiny and huge ones."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, k)).astype(F)
    scales = choose_scales(w, scheme)
    x = dequantize(quantize(w, scheme, scales=scales))
    steps = rng.integers(-4, 5, x.shape).astype(np.int32)
    near = (x.view(np.int32) + steps).view(F)
    middles = ((x.astype(np.float64) + np.roll(x, 1, axis=1)) / 2).astype(F)
    wild = rng.integers(0, 0x7F7FFFFF, x.shape).astype(np.int32).view(F) * rng.choice([-1, 1], x.shape)
    kinds = rng.integers(0, 5, x.shape)
    x = np.choose(kinds, [w * 3, x, np.where(np.isfinite(near), near, 0), middles, wild]).astype(F)
    return np.where(np.isfinite(x), x, F(0)), scales


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_values_are_those_of_the_quantizer(scheme):
    x, scales = elements(scheme)
    blocks = Blocks.of(x.shape, scheme.scale, -1)
    nearest = Nearest.of(NS, scales, blocks, scheme)
    wanted = dequantize(quantize(x, scheme, scales=scales))
    with np.errstate(all="ignore"):
        split = nearest.values(NS, np.asarray(blocks.split(NS, x)))
        np.testing.assert_array_equal(blocks.join(NS, split), wanted)
        columns, groups = by_columns(nearest, blocks)
        for j in range(0, x.shape[1], 23):
            np.testing.assert_array_equal(
                columns.take(groups[j]).values(NS, np.ascontiguousarray(x[:, j])), wanted[:, j]
            )


def test_which_records_are_plain():
    """The fast arithmetic takes the records that are used most; no other rule was meant by it."""
    plain = set()
    for scheme in ALL:
        w = np.ones((256, 256), F)
        nearest = Nearest.of(NS, choose_scales(w, scheme), Blocks.of(w.shape, scheme.scale, -1), scheme)
        plain |= {scheme.name} if nearest.factor is not None else set()
    assert {
        "int4_g32",
        "int3_g64_asymmetric",
        "int8_rowwise",
        "mxfp4",
        "mxint8",
        "nvfp4",
        "bf16_scales",
    } <= plain
    assert {"nf4", "stretched2_g32", "torchao.int4_g32_tinygemm", "uint4_g32", "e4m3_nan"} & plain == set()
    assert len(plain) > 0.8 * len(ALL)


@pytest.mark.parametrize("name", ["int4_g32", "mxfp4", "nvfp4", "fp8_rowwise", "torchao.mxfp4_floor"])
def test_scales_that_are_not_finite_or_overflow(name):
    """NaN, infinite, zero, negative, huge and tiny scales take the specification's own functions."""
    scheme = SCHEMES[name]
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(F)
    scales = choose_scales(x, scheme)
    stored = scales.scale.copy()
    if stored.dtype == F:
        stored.reshape(-1)[:7] = [np.nan, np.inf, 0, -1, 3e38, 1e-45, -np.inf]
    else:
        stored.reshape(-1)[:4] = [255, 0, 254, 127]
    given = Scales(stored, scales.outer, scales.zero)
    blocks = Blocks.of(x.shape, scheme.scale, -1)
    with np.errstate(all="ignore"):
        made = Nearest.of(NS, given, blocks, scheme).values(NS, np.asarray(blocks.split(NS, x)))
    np.testing.assert_array_equal(blocks.join(NS, made), dequantize(quantize(x, scheme, scales=given)))


@pytest.mark.parametrize("name", ["torchao.intx4_g32", "compressed_tensors.int4_g128", "int4_g32"])
def test_the_dtype_of_elements_counts_where_the_record_says_so(name):
    """Rounding of float16 elements under arithmetic in the input's dtype is that of the quantizer."""
    scheme = SCHEMES[name]
    x = np.random.default_rng(2).standard_normal((32, 256)).astype(np.float16)
    scales, blocks = choose_scales(x, scheme), Blocks.of(x.shape, scheme.scale, -1)
    nearest = Nearest.of(NS, scales, blocks, scheme, "float16")
    made = nearest.values(NS, np.asarray(blocks.split(NS, x.astype(F))))
    q = quantize(x, scheme, scales=scales)
    np.testing.assert_array_equal(blocks.join(NS, made), dequantize(q))


def test_partial_blocks_and_padded_tiles():
    """Columns of a short last block, and rows of a short last tile, have the scale of their block."""
    for name in ("fp8_1x128", "fp8_128x128", "nf4"):
        scheme = SCHEMES[name]
        x = np.random.default_rng(3).standard_normal((130, 192)).astype(F)
        scales, blocks = choose_scales(x, scheme), Blocks.of(x.shape, scheme.scale, -1)
        wanted = dequantize(quantize(x, scheme, scales=scales))
        columns, groups = by_columns(Nearest.of(NS, scales, blocks, scheme), blocks)
        for j in (0, 127, 128, 191):
            column = np.ascontiguousarray(x[:, j])
            np.testing.assert_array_equal(columns.take(groups[j]).values(NS, column), wanted[:, j])


def test_every_pattern_of_the_table():
    """The table has the value of the nearest code, by distances, for each bfloat16 that no tie decides."""
    from reference.calibration.nearest import value_table

    for name in ("float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn"):
        fmt = FORMATS[name]
        patterns = np.arange(0, 1 << 16, 2, dtype=np.uint32)
        x = (patterns << 16).view(F)
        finite = np.isfinite(x)
        values = fmt.values[np.isfinite(fmt.values)].astype(np.float64)
        off = np.abs(x[finite].astype(np.float64)[:, None] - values)
        np.testing.assert_array_equal(
            np.abs(value_table(fmt)[patterns[finite]] - x[finite].astype(np.float64)), off.min(axis=1)
        )


def test_records_of_ones_own():
    scheme = replace(SCHEMES["int4_g32"], name="own", scale=replace(SCHEMES["int4_g32"].scale, block=(2, 8)))
    x, scales = elements(scheme, rows=6, k=24)
    blocks = Blocks.of(x.shape, scheme.scale, -1)
    columns, groups = by_columns(Nearest.of(NS, scales, blocks, scheme), blocks)
    wanted = dequantize(quantize(x, scheme, scales=scales))
    for j in range(24):
        np.testing.assert_array_equal(
            columns.take(groups[j]).values(NS, np.ascontiguousarray(x[:, j])), wanted[:, j]
        )
