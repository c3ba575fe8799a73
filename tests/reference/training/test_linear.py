"""The linear layer of every recipe: shapes, operands, products and their bounds, three libraries, edges; the Hadamard
transform."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import FINITE_KINDS, assert_same_bits, float_arrays
from reference import Quantized, dequantize, matmul, matmul_error_bound, quantize, random_bits
from reference.layers.hadamard import SIGNS_16, hadamard, signs
from reference.training.linear import (
    operands,
    product,
    training_linear,
    training_linear_vjp,
    unsupported_reason,
)
from reference.training.recipe import PRODUCTS, RECIPES, Recipe
from tests.support.bits import tensor_of
from tests.support.refusals import refused

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
            refused(ValueError, "divi", operands, which, name, **given)


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


NAMES = list(RECIPES)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
M, N, K = 32, 64, 96
SHAPES = {"x": (M, K), "w": (N, K), "g": (M, N)}
#: The dimension that the sum of each product runs over.
SUMS = {"output": "K", "input_grad": "N", "weight_grad": "M"}


def normals(seed=0, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


@st.composite
def tensors(draw, kinds=FINITE_KINDS):
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return {name: draw(float_arrays(dtype, shape, kinds=kinds)) for name, shape in SHAPES.items()}


def assert_same_operands(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert isinstance(one, Quantized) == isinstance(other, Quantized)
        if isinstance(one, Quantized):
            assert one.shape == other.shape
            assert one.scheme == other.scheme
            for part in ("codes", "scale", "outer"):
                if getattr(other, part) is not None:
                    assert_same_bits(getattr(one, part), getattr(other, part))
        else:
            assert_same_bits(one, other)


@settings(max_examples=40)
@given(tensors(), st.sampled_from([name for name in NAMES if name != "bf16"]), st.integers(0, 2**64 - 1))
def test_operands_are_quantized_along_the_sum(given_tensors, name, seed):
    """Without a transposition: blocks along the axis of x, w or g that the sum runs over."""
    stream = 0
    for which in PRODUCTS:
        record = getattr(RECIPES[name], which)
        made = operands(which, name, **given_tensors, seed=seed)
        sources = {"output": "xw", "input_grad": "gw", "weight_grad": "gx"}[which]
        for source, one, q in zip(sources, (record.a, record.b), made, strict=True):
            x, dims = given_tensors[source], {"x": "MK", "w": "NK", "g": "MN"}[source]
            axis = dims.index(SUMS[which])
            stream, here = stream + 1, stream
            if one.hadamard:
                x = hadamard(np.ascontiguousarray(x.swapaxes(axis, 1)), one.hadamard).swapaxes(axis, 1)
            if one.scheme is None:
                assert_same_bits(q.swapaxes(axis, 1), x)
                continue
            words = None
            if one.scheme.rounding == "stochastic":
                words = random_bits(q.shape, seed=seed, stream=here).swapaxes(axis, 1)
            wanted = quantize(x, one.scheme, axis=axis, random_bits=words)
            assert_same_bits(q.codes.swapaxes(axis, 1), wanted.codes)
            scale = q.scale.swapaxes(axis, 1) if q.scale.ndim == 2 else q.scale
            assert_same_bits(scale.reshape(wanted.scale.shape), wanted.scale)


@settings(max_examples=25)
@given(tensors(), st.sampled_from(NAMES), st.booleans())
def test_results_are_within_the_bound_of_the_exact_product(given_tensors, name, bias):
    x, w, g = (given_tensors[key] for key in "xwg")
    b = x[0, :1].repeat(N) if bias else None
    recipe = RECIPES[name]
    dx, dw, _ = training_linear_vjp(g, x, w, name, seed=7, accumulation="recipe")
    results = {
        "output": training_linear(x, w, name, b, accumulation="recipe"), "input_grad": dx, "weight_grad": dw,
    }  # fmt: skip
    for which, got in results.items():
        a, c = operands(which, name, x=x, w=w, g=g, seed=7)
        values = [dequantize(q) if isinstance(q, Quantized) else q for q in (a, c)]
        extra = {"bias": b if which == "output" else None}
        exact = matmul(values[0], values[1].T, out_dtype="float32", **extra)
        record = getattr(recipe, which)
        if isinstance(a, Quantized):
            tier = {
                "accumulation": "hopper_fp8",
                "promote": {"fast": None, "precise": 128}[record.accumulation],
            }
            pair = a, quantized_columns(c)
        elif x.dtype == np.float32:
            tier, pair = {"accumulation": "blocked"}, (a, c.T)
        else:
            tier = {"accumulation": "hopper_fp8", "k_step": 16, "frac_bits": 25}
            tier["operand_formats"], pair = ("bfloat16", "bfloat16"), (a, c.T)
        bound = matmul_error_bound(*pair, **tier, **extra, out_dtype=str(x.dtype))
        bound = bound + matmul_error_bound(values[0], values[1].T, **extra)
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - exact.astype(np.float64))
        assert np.all((error <= bound) | ~np.isfinite(bound))


def quantized_columns(q):
    """A `Quantized` (N, K) as (K, N)."""
    from reference.matmul.linear import transposed

    return transposed(q)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_results_are_one_rounding_of_the_operands_product(name, dtype):
    t = normals(dtype=dtype)
    dx, dw, db = training_linear_vjp(t["g"], t["x"], t["w"], name, seed=3)
    for which, got in (
        ("output", training_linear(t["x"], t["w"], name)),
        ("input_grad", dx),
        ("weight_grad", dw),
    ):
        a, b = (dequantize(q) if isinstance(q, Quantized) else q for q in operands(which, name, **t, seed=3))
        assert_same_bits(got, matmul(a, b.T, out_dtype=dtype))
    sums = t["g"].astype(np.float64).sum(0)
    assert_same_bits(db, sums.astype(np.float32).astype(db.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_the_results_are_near_those_without_quantization(name):
    """Relative errors of normal tensors, from two to six percent in 8 and 6 bits; dx and dw are those of x w.T."""
    t = normals()
    y, (dx, dw, db) = training_linear(t["x"], t["w"], name), training_linear_vjp(t["g"], t["x"], t["w"], name)
    x, w, g = (t[key].astype(np.float64) for key in "xwg")
    limit = {"bf16": 1e-6, "mxfp4": 0.27, "nvfp4": 0.21}.get(name, 0.07)
    for got, exact in ((y, x @ w.T), (dx, g @ w), (dw, g.T @ x)):
        assert np.linalg.norm(got - exact) <= limit * np.linalg.norm(exact)
    assert np.allclose(db, g.sum(0), rtol=1e-6)


def test_accumulations():
    """Fast: the tensor core's chain over the whole sum; precise: promoted every 128; 16 bits: that of 16 bits."""
    t = normals(dtype="bfloat16", shapes={"x": (256, 256), "w": (16, 256), "g": (256, 16)})
    x, w, g = (t[key] for key in "xwg")
    a, b = operands("output", "tensorwise", x=x, w=w)
    fast, precise = (
        matmul(a, quantized_columns(b), accumulation="hopper_fp8", promote=promote, out_dtype="bfloat16")
        for promote in (None, 128)
    )
    assert (fast != precise).any()
    assert_same_bits(training_linear(x, w, "tensorwise", accumulation="recipe"), fast)
    a, b = operands("weight_grad", "tensorwise", x=x, g=g)
    precise = matmul(a, quantized_columns(b), accumulation="hopper_fp8", promote=128, out_dtype="bfloat16")
    assert_same_bits(training_linear_vjp(g, x, w, "tensorwise", accumulation="recipe")[1], precise)
    core = {"accumulation": "hopper_fp8", "k_step": 16, "frac_bits": 25, "operand_formats": ("bfloat16",) * 2}
    wanted = matmul(g.T, x, out_dtype="bfloat16", **core)
    assert_same_bits(training_linear_vjp(g, x, w, "rowwise_with_gw_hp", accumulation="recipe")[1], wanted)


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4", "mxfp4"])
def test_leading_axes_and_bias(name):
    t = normals()
    x, w, g, bias = t["x"], t["w"], t["g"], t["g"][0]
    flat = training_linear(x, w, name, bias), *training_linear_vjp(g, x, w, name, seed=1)
    x, g = x.reshape(2, 4, M // 8, K), g.reshape(2, 4, M // 8, N)
    deep = training_linear(x, w, name, bias), *training_linear_vjp(g, x, w, name, seed=1)
    for got, wanted in zip(deep, flat, strict=True):
        assert_same_bits(got.reshape(wanted.shape), wanted)
    assert deep[0].shape == (2, 4, M // 8, N)
    assert deep[1].shape == x.shape
    assert_same_bits(training_linear(x[0, 0, 0], w, "rowwise"), training_linear(x, w, "rowwise")[0, 0, 0])


@settings(max_examples=30)
@given(tensors(kinds=("bits", "normals", "specials", "subnormals")), st.sampled_from(NAMES))
def test_torch_tensors(given_tensors, name):
    """Through the public functions."""
    tensor = {key: tensor_of(value) for key, value in given_tensors.items()}
    for which in PRODUCTS:
        mine = operands(which, name, **tensor, seed=11)
        assert_same_operands(mine, operands(which, name, **given_tensors, seed=11))
    ours = training_linear_vjp(tensor["g"], tensor["x"], tensor["w"], name, seed=11)
    theirs = training_linear_vjp(*(given_tensors[key] for key in "gxw"), name, seed=11)
    for got, wanted in zip(ours, theirs, strict=True):
        assert isinstance(got, torch.Tensor)
        assert_same_values(got, wanted)


def assert_same_values(got, wanted):
    """Equal bits, and NaN where the other is NaN."""
    got, wanted = np.asarray(torch.as_tensor(got).float()), wanted.astype(np.float32)
    assert np.array_equal(got.view(np.int32)[~np.isnan(wanted)], wanted.view(np.int32)[~np.isnan(wanted)])
    assert np.array_equal(np.isnan(got), np.isnan(wanted))


SQUARE = {"x": (32, 32), "w": (32, 32), "g": (32, 32)}


@pytest.mark.parametrize("name", ["rowwise", "mxfp4"])
def test_jax_arrays(name):
    """Of one shape, so that programs are compiled once; `tests/ao_lab/jax` has the other recipes, under jit."""
    rng = np.random.default_rng(5)
    for kind in ("normals", "bits"):
        t = normals(3, "bfloat16", SQUARE)
        if kind == "bits":
            t = {k: rng.integers(0, 2**16, v.shape, np.uint16).view(v.dtype) for k, v in t.items()}
        for which in PRODUCTS:
            given_arrays = {key: jnp.asarray(value) for key, value in t.items()}
            mine = operands(which, name, **given_arrays, seed=11)
            assert all(isinstance(getattr(q, "codes", q), jax.Array) for q in mine)
            assert_same_operands(mine, operands(which, name, **t, seed=11))
    dw = training_linear_vjp(*(given_arrays[key] for key in "gxw"), name, seed=11)[1]
    assert_same_values(
        torch.tensor(np.asarray(dw, np.float32)),
        training_linear_vjp(t["g"], t["x"], t["w"], name, seed=11)[1],
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_g_reaches_its_row_and_column(name, value):
    """And where no scale is one for many rows, nothing else."""
    t = normals()
    clean = training_linear_vjp(t["g"], t["x"], t["w"], name, seed=2)
    g = t["g"].copy()
    g[5, 9] = value
    for accumulation in ("exact", "recipe"):
        dx, dw, db = training_linear_vjp(g, t["x"], t["w"], name, seed=2, accumulation=accumulation)
        assert not np.isfinite(dx[5]).any()
        assert not np.isfinite(dw[9]).any()
        assert not np.isfinite(db[9])
    if name != "tensorwise":
        dx, dw, db = training_linear_vjp(g, t["x"], t["w"], name, seed=2)
        for got, before, row in ((dx, clean[0], 5), (dw, clean[1], 9), (db, clean[2], 9)):
            rest = np.arange(len(got)) != row
            if (
                name == "nvfp4" and got is not db
            ):  # the scale of the tensor is of its finite elements, mixed ones too
                assert np.isfinite(got[rest]).all()
            else:
                assert_same_bits(got[rest], before[rest])


@pytest.mark.parametrize("name", NAMES)
def test_zeros(name):
    """Zero codes, finite scales, zero gradients; also no rows at all."""
    t = normals()
    for zero in ("x", "w", "g"):
        given_tensors = {**t, zero: np.zeros_like(t[zero])}
        for which in PRODUCTS:
            for q in operands(which, name, **given_tensors):
                if isinstance(q, Quantized):
                    assert np.isfinite(dequantize(q)).all()
                    assert np.isfinite(
                        dequantize(q.__class__(**{**vars(q), "codes": np.ones_like(q.codes)}))
                    ).all()
        y = training_linear(given_tensors["x"], given_tensors["w"], name)
        dx, dw, db = training_linear_vjp(*(given_tensors[key] for key in "gxw"), name)
        if zero == "g":
            assert_same_bits(dx, np.zeros_like(t["x"]))
            assert_same_bits(dw, np.zeros_like(t["w"]))
            assert_same_bits(db, np.zeros(N, np.float32))
        else:
            assert_same_bits(y, np.zeros((M, N), np.float32))
    empty = np.zeros((0, K), np.float32)
    assert training_linear(empty, t["w"], name).shape == (0, N)
    dx, dw, db = training_linear_vjp(np.zeros((0, N), np.float32), empty, t["w"], name)
    assert dx.shape == (0, K)
    assert_same_bits(dw, np.zeros((N, K), np.float32))
    assert_same_bits(db, np.zeros(N, np.float32))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("tensorwise", "nvfp4", "mxfp4")])
def test_a_row_of_zeros_changes_no_other(name):
    """As padding adds them."""
    t = normals()
    longer = {key: np.concatenate([t[key], np.zeros((32, t[key].shape[1]), np.float32)]) for key in "xg"}
    dx, dw, db = training_linear_vjp(t["g"], t["x"], t["w"], name)
    more = training_linear_vjp(longer["g"], longer["x"], t["w"], name)
    assert_same_bits(more[0][:M], dx)
    assert_same_bits(more[0][M:], np.zeros((32, K), np.float32))
    assert_same_bits(more[1], dw)
    assert_same_bits(more[2], db)


def test_errors():
    t = normals()
    x, w, g = (t[key] for key in "xwg")
    cases = [
        (lambda: training_linear(x, w.T, "mxfp8"), ValueError, r"x \(..., K\) and w \(N, K\), got shapes"),
        (lambda: training_linear(x, w[0], "mxfp8"), ValueError, "got shapes"),
        (lambda: training_linear(x, w.astype(np.float16), "mxfp8"), TypeError, "one dtype, got float32 and float16"),
        (lambda: training_linear(x.astype(np.int32), w, "mxfp8"), TypeError, "training_linear takes float32"),
        (lambda: training_linear(x, w, "fp8"), ValueError, "unknown recipe 'fp8'; the nearest is mxfp8; there are"),
        (lambda: training_linear(x, w, "mxfp8", x[0]), ValueError, r"bias has shape \(96,\), the weight asks for \(64,\)"),
        (lambda: training_linear(x, w, "mxfp8", accumulation="fast"), ValueError, "accumulation is one of exact, recipe"),
        (lambda: training_linear_vjp(g[:, :-1], x, w, "mxfp8"), ValueError, r"shape of the output, \(32, 64\), got"),
        (lambda: training_linear_vjp(g.astype(np.float16), x, w, "mxfp8"), TypeError, "dtype of x, float32, got float16"),
        (lambda: operands("forward", "mxfp8", x=x, w=w), ValueError, "product is one of output, input_grad"),
        (lambda: training_linear_vjp(g, x, w, "mxfp4", seed=-1), ValueError, "seed is an integer from 0"),
    ]  # fmt: skip
    for call, error, message in cases:
        refused(error, message, call)


def test_a_product_of_one_quantized_operand():
    """A record of one's own may quantize one side alone: float32 sums of blocks."""
    t = normals()
    q = quantize(t["x"], "mxfp8_e4m3")
    record = RECIPES["mxfp8"].output
    got = product(q, t["w"], record, "float32", "recipe")
    assert_same_bits(got, matmul(q, t["w"].T, accumulation="blocked"))


def test_sixteen_bit_operands_keep_25_aligned_bits():
    """1 and four terms of 2**-25, then -1 in the next step: with one aligned bit less nothing would be left."""
    x = np.zeros((1, 32), ml_dtypes.bfloat16)
    x[0, 0], x[0, 1:5], x[0, 16] = 1, 2.0**-25, -1
    y = training_linear(x, np.ones_like(x), "bf16", accumulation="recipe")
    assert float(y[0, 0]) == 2.0**-23


# The Hadamard transform: orthogonal, the stated additions in the stated order, the same bits in three libraries.


def sylvester(length):
    """H of +1 and -1."""
    matrix = np.ones((1, 1))
    while len(matrix) < length:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def by_stages(x, length):
    """The butterfly in NumPy's float32: sums and differences at distances 1, 2, 4, ..."""
    blocks = x.astype(np.float32).reshape(-1, length) * np.float32(signs(length))
    distance = 1
    while distance < length:
        mixed = blocks.copy()
        for at in range(length):
            partner = at ^ distance
            left, right = blocks[:, min(at, partner)], blocks[:, max(at, partner)]
            mixed[:, at] = left + right if at < partner else left - right
        blocks, distance = mixed, 2 * distance
    return (blocks * np.float32(1 / np.sqrt(length))).astype(x.dtype).reshape(x.shape)


def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("length", [1, 4, 16, 64, 256])
def test_it_is_sylvesters_matrix_on_integers(length):
    """1 / sqrt(length) is a power of two, so that nothing is rounded."""
    x = integers((3, 2 * length))
    blocks = x.astype(np.float64).reshape(-1, length) * signs(length)
    wanted = (blocks @ sylvester(length) / np.sqrt(length)).reshape(x.shape)
    mixed = hadamard(x, length)
    assert np.array_equal(mixed, wanted)
    back = mixed.reshape(-1, length) @ sylvester(length) / np.sqrt(length) * signs(length)
    assert np.array_equal(back.reshape(x.shape), x)


@pytest.mark.parametrize("length", [4, 16])
def test_it_cancels_in_a_product(length):
    a, b = integers((5, 64)), integers((7, 64), seed=1)
    assert_same_bits(matmul(hadamard(a, length), hadamard(b, length).T), matmul(a, b.T))


@pytest.mark.parametrize("length", [2, 8, 32])
def test_odd_powers_cancel_up_to_rounding(length):
    a, b = integers((5, 64)), integers((7, 64), seed=1)
    product = hadamard(a, length).astype(np.float64) @ hadamard(b, length).astype(np.float64).T
    # Every element of both passes one rounding of 1 / sqrt(length) and one of its product with that.
    bound = 4.5 * 2.0**-24 * np.abs(a).sum(1)[:, None] * np.abs(b).max()
    assert np.all(np.abs(product - a.astype(np.float64) @ b.T) <= bound * np.sqrt(length))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from([2, 8, 16, 32]))
def test_the_order_of_additions(data, dtype, length):
    x = data.draw(float_arrays(dtype, (3, 64), kinds=FINITE_KINDS))
    with np.errstate(all="ignore"):
        wanted, mixed = by_stages(x, length), hadamard(x, length)
    known = ~np.isnan(wanted.astype(np.float32))
    assert np.array_equal(np.isnan(mixed.astype(np.float32)), ~known)
    assert_same_bits(mixed[known], wanted[known])


@settings(max_examples=25)
@given(float_arrays("bfloat16", (4, 64)))
def test_three_libraries(x):
    mixed = hadamard(x, 32)
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    assert_same_bits(hadamard(tensor, 32), mixed)
    assert_same_bits(hadamard.__wrapped__(tensor, 32), mixed)
    assert_same_bits(hadamard(jnp.asarray(x), 32), mixed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block(value):
    x = integers((2, 64))
    clean = hadamard(x, 16)
    x[1, 20] = value
    mixed = hadamard(x, 16)
    hit = np.zeros(x.shape, bool)
    hit[1, 16:32] = True
    assert not np.isfinite(mixed[hit]).any()
    assert_same_bits(mixed[~hit], clean[~hit])


def test_signs():
    """Transformer Engine's sixteen, repeated."""
    assert "".join("+-"[sign < 0] for sign in SIGNS_16) == "+++-+------+-+--"
    assert signs(4) == SIGNS_16[:4]
    assert signs(32) == SIGNS_16 * 2


@pytest.mark.parametrize(
    ("x", "length", "error", "message"),
    [
        (np.zeros((2, 24), np.float32), 16, ValueError, "divides the last axis, got 16 for shape"),
        (np.zeros((2, 24), np.float32), 12, ValueError, "power of two"),
        (np.zeros((2, 24), np.float32), 0, ValueError, "power of two"),
        (np.zeros((), np.float32), 1, ValueError, "pad it"),
        (np.zeros((2, 16), np.int32), 16, TypeError, "hadamard takes float32"),
    ],
)
def test_hadamard_errors(x, length, error, message):
    refused(error, message, hadamard, x, length)
