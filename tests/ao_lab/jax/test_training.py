"""`dot_general`: any axes, transformations, seeds, what is kept, what is refused; two layers trained, with all operands."""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from reference import Quantized, dequantize, matmul, matmul_error_bound, random_bits
from reference.matmul.linear import transposed
from reference.training.linear import operands, training_linear, training_linear_vjp
from reference.training.recipe import PRODUCTS, RECIPES, saving_codes, stochastic

jax = pytest.importorskip("jax")
from ao_lab.jax import training  # noqa: E402  JAX is optional
from ao_lab.jax.training import (  # noqa: E402  JAX is optional  # noqa: E402  JAX is optional
    DotGeneral,
    dot_general,
    einsum,
    random_words,
    seed_words,
)

jnp, lax = jax.numpy, jax.lax

LAST = (((1,), (1,)), ((), ()))
MX = RECIPES["mxfp8"]
G = replace(MX.input_grad.a, scheme=stochastic(MX.input_grad.a.scheme))
DRAWN = replace(MX, name="mxfp8_drawn", input_grad=replace(MX.input_grad, a=G))


def normals(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def with_gradients(function):
    """(y, dx, dw) of a function for an output gradient of its own shape."""

    def run(x, w):
        y, gradients = jax.vjp(function, x, w)
        g = normals(*y.shape, seed=7, dtype=y.dtype)
        return y, *gradients(g)

    return run


def by_the_reference(x, w, numbers, recipe):
    """(y, dx, dw) of each element of the batch axes by the reference, back in the axes of x and w."""
    (contracting, batch), arrays, moved, shapes = numbers, (np.asarray(x), np.asarray(w)), [], []
    for array, c, b in zip(arrays, contracting, batch, strict=True):
        free = [axis for axis in range(array.ndim) if axis not in (*c, *b)]
        order = (*b, *free, *c)
        lengths = [int(np.prod([array.shape[axis] for axis in axes])) for axes in (b, free, c)]
        moved.append(array.transpose(order).reshape(lengths))
        shapes.append((order, [array.shape[axis] for axis in order]))
    like = lax.dot_general(x, w, numbers)
    g = np.asarray(normals(*like.shape, seed=7)).reshape(len(moved[0]), moved[0].shape[1], moved[1].shape[1])
    y = np.stack([training_linear(a, b, recipe) for a, b in zip(*moved, strict=True)])
    both = [training_linear_vjp(h, a, b, recipe)[:2] for h, a, b in zip(g, *moved, strict=True)]
    back = [
        np.stack(parts).reshape(shape).transpose(np.argsort(order))
        for parts, (order, shape) in zip(zip(*both, strict=True), shapes, strict=True)
    ]
    return y.reshape(like.shape), *back


@pytest.mark.parametrize(
    ("recipe", "x", "w", "numbers"),
    [
        pytest.param(
            "mxfp8", (4, 8, 64), (64, 32), (((2,), (0,)), ((), ())), marks=pytest.mark.nightly
        ),  # a dense layer, which the steps below train by day
        ("mxfp8", (32, 4, 8), (8, 32, 4), (((1, 2), (2, 0)), ((), ()))),  # two axes, in another order
        ("mxfp8", (2, 32, 32), (64, 32, 2), (((1,), (1,)), ((0,), (2,)))),  # a batch
        pytest.param(
            "tensorwise", (2, 32, 32), (32, 32, 2), (((1,), (1,)), ((0,), (2,))), marks=pytest.mark.nightly
        ),  # a scale for each of a batch
    ],
)
def test_any_axes(recipe, x, w, numbers):
    """Float32 sums of the same operands: an error of a unit or two, where other axes would change hundredths."""
    x, w = normals(*x), normals(*w, seed=1)
    made = with_gradients(partial(dot_general, dimension_numbers=numbers, recipe=recipe))(x, w)
    for got, wanted in zip(made, by_the_reference(x, w, numbers, recipe), strict=True):
        assert got.shape == wanted.shape
        assert np.abs(np.asarray(got) - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.nightly
def test_without_quantization_it_is_laxs():
    for dtype in (jnp.float32, jnp.bfloat16):
        x, w = normals(8, 24, dtype=dtype), normals(5, 24, seed=1, dtype=dtype)
        ours = with_gradients(lambda x, w: dot_general(x, w, LAST, recipe="bf16"))(x, w)
        theirs = with_gradients(lambda x, w: lax.dot_general(x, w, LAST))(x, w)
        for got, wanted in zip(ours, theirs, strict=True):
            assert got.dtype == wanted.dtype
            assert np.abs(np.asarray(got - wanted, np.float32)).max() <= float(jnp.finfo(dtype).eps) * 32


@pytest.mark.nightly
def test_transformations():
    """jit, vmap, scan and remat give what the plain call gives."""
    x, w = normals(2, 32, 32), normals(32, 32, seed=1) / 6
    layer = partial(dot_general, dimension_numbers=LAST, recipe="mxfp8")

    def loss(w, x, layer=layer):
        return (layer(jnp.tanh(layer(x, w)), w) ** 2).sum()

    def scanned(w, x):
        return (lax.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2).sum()

    wanted = [jax.grad(loss)(w, one) for one in x]
    many = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x)
    again = jax.jit(jax.grad(partial(loss, layer=jax.checkpoint(layer))))(w, x[0])
    for got, one in ((many[0], wanted[0]), (many[1], wanted[1]), (again, wanted[0])):
        assert np.abs(np.asarray(got - one)).max() <= 1e-3 * np.abs(np.asarray(one)).max()
    stacked = jnp.stack([w, w.T])
    one_by_one = jax.grad(lambda w: (layer(layer(x[0], w[0]), w[1]) ** 2).sum())(stacked)
    got = jax.jit(jax.grad(jax.checkpoint(scanned)))(stacked, x[0])
    assert np.abs(np.asarray(got - one_by_one)).max() <= 1e-3 * np.abs(np.asarray(one_by_one)).max()


def test_zeros_and_what_is_not_finite():
    """A zero gradient gives zeros; NaN and infinities reach their row of dx and of dw, and nothing else."""
    x, w, g = (normals(32, 32, seed=seed) for seed in range(3))
    gradients = jax.vjp(partial(dot_general, dimension_numbers=LAST, recipe="mxfp8"), x, w)[1]
    for value in gradients(0 * g):
        assert not np.asarray(value).any()
    for value in (jnp.nan, jnp.inf):
        dx, dw = (np.isfinite(np.asarray(made)) for made in gradients(g.at[5, 9].set(value)))
        assert not dx[5].any()
        assert not dw[9].any()
        assert np.delete(dx, 5, 0).all()
        assert np.delete(dw, 9, 0).all()


def test_batches_are_vmap():
    x, w = normals(3, 32, 32), normals(3, 32, 32, seed=1)
    batch = dot_general(x, w, (((2,), (2,)), ((0,), (0,))), recipe="mxfp8")
    assert_same_bits(batch, jax.jit(jax.vmap(lambda x, w: dot_general(x, w, LAST, recipe="mxfp8")))(x, w))


def input_grad(recipe, numbers=LAST):
    """From x, w, g and a seed to dx, compiled, the seed an argument."""
    return jax.jit(
        lambda x, w, g, seed: jax.vjp(lambda x: dot_general(x, w, numbers, recipe=recipe, seed=seed), x)[1](
            g
        )[0]
    )


def test_seeds_are_arguments():
    """One program for all seeds; distinct draws for each, in each element of a batch, and the reference's."""
    x, w, g = (normals(32, 32, seed=seed) for seed in range(3))
    run = input_grad(DRAWN)
    made = [run(x, w, g, jnp.int32(seed)) for seed in (0, 1, 2, 1)]
    assert_same_bits(made[1], made[3])
    assert all((made[i] != made[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))
    wanted = training_linear_vjp(*(np.asarray(value) for value in (g, x, w)), DRAWN, seed=2)[0]
    assert np.abs(made[2] - wanted).max() <= 2e-6 * np.abs(wanted).max()
    assert run._cache_size() == 1
    same = [jnp.stack([value, value]) for value in (x, w, g)]
    both = input_grad(DRAWN, (((2,), (2,)), ((0,), (0,))))(*same, jnp.int32(1))
    assert_same_bits(both[0], made[1])
    assert (both[0] != both[1]).any()


@pytest.mark.nightly
def test_seeds_are_mapped_and_have_no_gradient():
    x, w = normals(32, 32), normals(32, 32, seed=1)
    layer = partial(dot_general, dimension_numbers=LAST, recipe=DRAWN)
    keys = jax.random.split(jax.random.key(0), 2)
    grads = jax.jit(jax.vmap(jax.grad(lambda x, key: layer(x, w, seed=key).sum() ** 2), (None, 0)))(x, keys)
    assert (grads[0] != grads[1]).any()
    moved = jax.grad(lambda x, seed: layer(x, w, seed=seed).sum(), argnums=(0, 1), allow_int=True)(
        x, jnp.int32(3)
    )
    assert moved[1].dtype == jax.dtypes.float0


def kept_for_backward(recipe, x, w):
    """dtypes of the matrices that the gradient function holds."""
    _, gradients = jax.vjp(lambda x, w: dot_general(x, w, LAST, recipe=recipe, seed=1), x, w)
    return sorted(str(leaf.dtype) for leaf in jax.tree.leaves(gradients) if leaf.shape == (32, 32))


def test_what_is_kept():
    """The weight, and the input or, where the recipe takes the weight gradient from them, its codes."""
    x, w = normals(32, 32), normals(32, 32, seed=1)
    assert kept_for_backward("mxfp8", x, w) == ["float32", "float32"]
    assert kept_for_backward(saving_codes(MX), x, w) == ["float32", "uint8"]
    assert kept_for_backward("tensorwise", x, w) == ["float32", "uint8"]
    made = with_gradients(partial(dot_general, dimension_numbers=LAST, recipe=saving_codes(MX)))(x, w)
    g = normals(32, 32, seed=7)
    wanted = training_linear_vjp(*(np.asarray(value) for value in (g, x, w)), saving_codes(MX))
    for got, one in zip(made[1:], wanted[:2], strict=True):
        assert np.abs(np.asarray(got) - one).max() <= 2e-6 * np.abs(one).max()


def test_dtypes():
    x, w = normals(32, 32, dtype=jnp.bfloat16), normals(32, 32, seed=1, dtype=jnp.bfloat16)
    for preferred in (None, jnp.float32, jnp.float16):
        y, dx, dw = with_gradients(
            lambda x, w, preferred=preferred: dot_general(x, w, LAST, "highest", preferred, recipe="mxfp8")
        )(x, w)
        assert y.dtype == (preferred or jnp.bfloat16)
        assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16)


class Dense:
    """How flax calls: linen with three arguments and precision, nnx with out_sharding besides."""

    def __init__(self, dot_general=lax.dot_general, dot_general_cls=None):
        self.function = dot_general if dot_general_cls is None else dot_general_cls()

    def __call__(self, x, kernel, **more):
        return self.function(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=None, **more)


def test_what_flax_needs():
    x, kernel = normals(2, 32, 32), normals(32, 64, seed=1)
    wanted = dot_general(x, kernel, (((2,), (0,)), ((), ())), recipe="mxfp8")
    layers = (
        Dense(DotGeneral("mxfp8")),
        Dense(dot_general_cls=partial(DotGeneral, "mxfp8")),
        Dense(partial(dot_general, recipe="mxfp8")),
    )
    for layer in layers:
        assert_same_bits(layer(x, kernel), wanted)
        assert_same_bits(layer(x, kernel, out_sharding=None), wanted)
    assert_same_bits(layers[0](x, kernel, preferred_element_type=jnp.float32), wanted)
    assert_same_bits(jnp.einsum("bmk,kn->bmn", x, kernel, _dot_general=DotGeneral("mxfp8")), wanted)
    assert hash(DotGeneral("mxfp8")) == hash(DotGeneral("mxfp8"))
    assert DotGeneral("mxfp8") == DotGeneral("mxfp8")


X, W = jnp.ones((32, 32)), jnp.ones((32, 32))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dot_general(np.ones((2, 2)), W, LAST, recipe="mxfp8"), TypeError, "dot_general takes JAX arrays, got ndarray"),
        (lambda: dot_general(X.astype(int), W.astype(int), LAST, recipe="mxfp8"), TypeError, "got int32 of shape"),
        (lambda: dot_general(X, W.astype("bfloat16"), LAST, recipe="mxfp8"), TypeError, "one dtype, got float32 and bfloat16"),
        (lambda: dot_general(X, W, LAST, None, jnp.int32, recipe="mxfp8"), TypeError, "preferred_element_type is one of"),
        (lambda: dot_general(X, W, LAST, recipe="mxfp"), ValueError, "unknown recipe 'mxfp'"),
        (lambda: dot_general(X, W, LAST, out_sharding=1, recipe="mxfp8"), ValueError, "with_sharding_constraint"),
        (lambda: dot_general(X, W, LAST, recipe="mxfp8", seed=1.5), TypeError, "seed is an integer"),
        (lambda: dot_general(X, W[:, :5], LAST, recipe="mxfp8"), TypeError, "contracting dimensions"),
        (lambda: dot_general(X[:, :5], W[:, :5], LAST, recipe="mxfp8"), ValueError, r"K \(input features\) is 5, not"),
        (lambda: jax.grad(lambda x: dot_general(x, W, LAST, recipe="mxfp8").sum())(X[:5]), ValueError, r"M \(rows .* is 5"),
        (lambda: jax.grad(lambda x: dot_general(x, W, LAST, recipe="nvfp4").sum())(X), ValueError, "stochastically and needs"),
        (lambda: jax.jvp(lambda x: dot_general(x, W, LAST, recipe="mxfp8"), (X,), (X,)), TypeError, "forward-mode"),
        (lambda: jax.grad(lambda x: jax.grad(
            lambda x: (dot_general(x, W, LAST, recipe="mxfp8") ** 2).sum())(x).sum())(X), TypeError, "first derivatives alone"),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_count_in_gradients_alone():
    """flax initializes with one row."""
    assert dot_general(X[:1], W, LAST, recipe="mxfp8").shape == (1, 32)
    assert dot_general(X[:1], W, LAST, recipe="mxfp4").shape == (1, 32)


# `einsum` knows which operand is the weight; `jnp.einsum` with `DotGeneral` has to be told where it exchanges them.


# Small integers: e4m3 and float32 sums hold them exactly, so that every right product has the same bits.
INPUTS = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (2, 16, 32)), jnp.float32)
WEIGHT = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (2, 32, 16)), jnp.float32)
RECIPE = "rowwise_with_gw_hp"


def halves(function):
    """Output and gradients for a cotangent with many magnitudes, of which only the weight gradient stays in high precision."""
    y, back = jax.vjp(function, INPUTS, WEIGHT)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(y.shape), jnp.float32)
    return y, *back(g)


@pytest.mark.nightly
def test_the_first_operand_is_the_input():
    """Whatever the order of the result: the same output and gradients as with the axes in the product's own order."""
    turned = partial(einsum, "BSD,CDH->CBSH", recipe=RECIPE)
    plain = partial(einsum, "BSD,CDH->BSCH", recipe=RECIPE)
    y, back = jax.vjp(turned, INPUTS, WEIGHT)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(y.shape), jnp.float32)
    same, same_back = jax.vjp(plain, INPUTS, WEIGHT)
    assert_same_bits(y, jnp.einsum("BSCH->CBSH", same))
    for one, two in zip(back(g), same_back(jnp.einsum("CBSH->BSCH", g)), strict=True):
        assert_same_bits(one, two)
    assert_same_bits(y, jnp.einsum("BSD,CDH->CBSH", INPUTS, WEIGHT))


def test_a_weight_on_the_left_is_said_or_refused():
    """What jnp.einsum hands on: without weight= it is an error, with it the gradients are those of `einsum`."""
    wanted = halves(partial(einsum, "BSD,CDH->CBSH", recipe=RECIPE))
    assert_same_bits(wanted[0], jnp.einsum("BSD,CDH->CBSH", INPUTS, WEIGHT))
    given = DotGeneral(RECIPE, weight="lhs")
    made = halves(lambda x, w: jnp.einsum("BSD,CDH->CBSH", x, w, _dot_general=given))
    for one, two in zip(made, wanted, strict=True):
        assert_same_bits(one, two)
    with pytest.raises(ValueError, match='give weight="lhs" if the left one is the weight'):
        jnp.einsum("BSD,CDH->CBSH", INPUTS, WEIGHT, _dot_general=DotGeneral(RECIPE))
    with pytest.raises(ValueError, match="weight is one of lhs, rhs; got 'left'"):
        DotGeneral(RECIPE, weight="left")
    with pytest.raises(ValueError, match="unknown recipe 'mxfp9'"):
        DotGeneral("mxfp9")
    with pytest.raises(TypeError, match="takes no lhs_dilation: convolutions are not covered"):
        DotGeneral("mxfp8")(INPUTS, WEIGHT, (1,), lhs_dilation=(1,))
    # In the order of the product nothing has to be said.
    jnp.einsum("BSD,DH->BSH", INPUTS, WEIGHT[0], _dot_general=DotGeneral(RECIPE))


@pytest.mark.nightly
def test_operands_may_be_named():
    """weight="lhs" is the product with the operands exchanged; the gradient of the weight stays in high precision."""
    x, w = INPUTS[0], WEIGHT[0].T
    g = jnp.asarray(np.random.default_rng(2).standard_normal((16, 16)), jnp.float32)
    last = (((1,), (1,)), ((), ()))
    y, back = jax.vjp(lambda x, w: dot_general(w, x, last, recipe=RECIPE, weight="lhs"), x, w)
    same, same_back = jax.vjp(lambda x, w: dot_general(x, w, last, recipe=RECIPE), x, w)
    assert_same_bits(y, same.T)
    for one, two in zip(back(g.T), same_back(g), strict=True):
        assert_same_bits(one, two)
    with pytest.raises(ValueError, match="weight is one of lhs, rhs"):
        dot_general(x, w, last, recipe=RECIPE, weight="left")


@pytest.mark.parametrize(
    "subscripts", ["BSD,CD->BC", "BSD", "BB,BC->BC", "BSD,DC", "B...,BC->C", "AB,BC->ACD", "A1,1B->AB"]
)
def test_other_subscripts(subscripts):
    with pytest.raises(ValueError, match="'ab,bc->ac': two operands"):
        einsum(subscripts, INPUTS, WEIGHT, recipe=RECIPE)


def test_operands_of_other_ranks():
    with pytest.raises(ValueError, match="x has 3 axes, its subscripts 2"):
        einsum("SD,DH->SH", INPUTS, WEIGHT[0], recipe=RECIPE)


# Random words in JAX are those of the reference; seeds in every form.


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
@pytest.mark.parametrize("stream", [0, 2**32 - 1])
def test_words(seed, stream):
    for shape in ((3, 2, 7), (), (0, 4)):
        words = random_words(shape, seed_words(seed), stream)
        assert_same_bits(words, random_bits(shape, seed=seed, stream=stream))


def test_seeds_in_every_form():
    """An integer, an integer array, the data of a key and a key; also traced."""
    forms = (5, np.int64(5), jnp.int32(5), jnp.uint32(5), jax.random.PRNGKey(5), jax.random.key(5))
    for form in forms:
        assert_same_bits(seed_words(form), np.array([0, 5], np.uint32))
    for form in forms[2:]:
        assert_same_bits(jax.jit(seed_words)(form), np.array([0, 5], np.uint32))
    assert_same_bits(seed_words(3 << 32 | 7), np.array([3, 7], np.uint32))
    assert_same_bits(seed_words(jnp.int32(-1)), np.array([0, 2**32 - 1], np.uint32))
    keys = jax.random.split(jax.random.key(0), 3)
    words = jax.vmap(lambda key: random_words((4,), seed_words(key), 1))(keys)
    for key, row in zip(jax.random.key_data(keys), words, strict=True):
        high, low = (int(word) for word in key)
        assert_same_bits(row, random_bits(4, seed=high << 32 | low, stream=1))


def test_keys_of_every_implementation():
    """Four words are hashed: other keys, other seeds; the same for a typed key, its data, and its data in NumPy."""
    found = set()
    for number in range(4):
        key = jax.random.key(number, impl="rbg")
        data = jax.random.key_data(key)
        for form in (jax.random.key(number, impl="unsafe_rbg"), data, np.asarray(data)):
            assert_same_bits(seed_words(form), seed_words(key))
        assert_same_bits(jax.jit(seed_words)(key), seed_words(key))
        found.add(tuple(seed_words(key).tolist()))
    assert len(found) == 4
    assert_same_bits(seed_words(np.asarray(jax.random.PRNGKey(5))), np.array([0, 5], np.uint32))
    # The words are the seed and the counter of Philox: streams and elements of another generator of this package.
    data = jnp.array([1, 2, 7, 0], jnp.uint32)
    drawn = random_bits(4 * 8, seed=1 << 32 | 2)[28:30]
    assert_same_bits(seed_words(data), drawn)


def test_integers_of_every_width():
    for dtype in ("int8", "int16", "uint8", "uint16"):
        assert_same_bits(seed_words(jnp.asarray(5, dtype)), np.array([0, 5], np.uint32))
    with jax.enable_x64(True):
        for value, low in ((5, 5), (-1, 2**32 - 1), (3 << 32 | 7, 7)):
            assert_same_bits(seed_words(jnp.asarray(value)), np.array([0, low], np.uint32))
        last = jax.lax.fori_loop(0, 4, lambda step, _: seed_words(step), jnp.zeros(2, jnp.uint32))
        assert_same_bits(last, np.array([0, 3], np.uint32))


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "seed is an integer from 0"),
        (2**64, ValueError, "seed is an integer from 0"),
        (1.0, TypeError, "got float"),
        (True, TypeError, "got bool"),
        ("1", TypeError, "got str"),
        (jnp.zeros(3, jnp.uint32), TypeError, r"got uint32 of shape \(3,\)"),
        (jnp.zeros(2, jnp.int32), TypeError, r"got int32 of shape \(2,\)"),
        (jnp.float32(1), TypeError, r"got float32 of shape \(\)"),
        (jax.random.split(jax.random.key(0), 3), TypeError, r"got uint32 of shape \(3, 2\)"),
        (jnp.asarray(True), TypeError, r"got bool of shape \(\)"),
    ],
)
def test_other_seeds(seed, error, message):
    with pytest.raises(error, match=message):
        seed_words(seed)


def test_too_many_elements():
    with pytest.raises(ValueError, match="at most 2\\*\\*34 elements"):
        jax.eval_shape(lambda seed: random_words((2**20, 2**15), seed, 0), jnp.zeros(2, jnp.uint32))


# The same two-layer model trained in torch (by the reference) and in JAX (by `dot_general`): the same quantized operands.


SIZE, STEPS = 32, 3
CONTRACT_LAST = (((1,), (1,)), ((), ()))
# One recipe each of rows, of shifts by e8m0, and of stochastic rounding behind a Hadamard transform.
BY_DAY = ("rowwise", "mxfp8", "mxfp4")
QUANTIZED = [name for name in RECIPES if name != "bf16"]


class Linear(torch.autograd.Function):
    """The reference on torch tensors; what it was given is appended to `dump`."""

    @staticmethod
    def forward(ctx, x, w, recipe, seed, dump):
        ctx.save_for_backward(x, w)
        ctx.settings = recipe, seed, dump
        return training_linear(x.detach(), w.detach(), recipe)

    @staticmethod
    def backward(ctx, g):
        (x, w), (recipe, seed, dump) = ctx.saved_tensors, ctx.settings
        g = g.contiguous()
        dump.append({"x": x.detach().clone(), "w": w.detach().clone(), "g": g.clone(), "seed": seed})
        dx, dw, _ = training_linear_vjp(g, x, w, recipe, seed=seed)
        dump[-1] |= {"dx": dx.clone(), "dw": dw.clone()}
        return dx, dw, None, None, None


def start(dtype):
    """(inputs, targets, two weights) in NumPy."""
    rng = np.random.default_rng(1)
    x, target, first, second = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(4))
    return [value.astype(dtype) for value in (x, target, first / 4, second / 4)]


def seed_of(step, layer):
    return 2 * step + layer + (1 << 40)


def train_in_torch(recipe, dtype):
    """What both layers were given in each step, and the weights at the end."""
    x, target, *weights = (as_torch(value) for value in start(dtype))
    weights = [w.requires_grad_() for w in weights]
    dumps = []
    for step in range(STEPS):
        dump = []
        hidden = torch.relu(Linear.apply(x, weights[0], recipe, seed_of(step, 0), dump))
        y = Linear.apply(hidden, weights[1], recipe, seed_of(step, 1), dump)
        y.backward((y.detach() - target) * 2.0**-6)
        with torch.no_grad():
            for w in weights:
                w -= w.grad * 2.0**-3
                w.grad = None
        dumps += dump[::-1]
    return dumps, [w.detach() for w in weights]


def as_torch(x):
    x = np.ascontiguousarray(x)
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype != np.float32
        else torch.from_numpy(x)
    )


def as_jax(tensor):
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.asarray(tensor.numpy())


@pytest.fixture
def quantized(monkeypatch):
    """Every `Quantized` that `dot_general` makes, in order."""
    made, plain = [], training.quantize

    def recording(*args, **kwargs):
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(training, "quantize", recording)
    return made


def same_operands(made, recipe, given):
    """JAX's operands are those of the reference on torch's tensors; codes of x that serve both ways are not made twice."""
    wanted = [q for which in PRODUCTS for q in operands(which, recipe, **given) if isinstance(q, Quantized)]
    if RECIPES[recipe].output.a.serves_transposed(RECIPES[recipe].weight_grad.b):
        assert_same_bits(made[0].codes.T, wanted.pop().codes)
    assert len(made) == len(wanted)
    for got, one in zip(made, wanted, strict=True):
        assert got.scheme == one.scheme
        for part in ("codes", "scale", "outer"):
            if getattr(one, part) is not None:
                assert_same_bits(getattr(got, part), getattr(one, part))


def within_bound(got, which, recipe, given, dtype):
    """Float32 sums in any order, from the exact product of these operands."""
    a, b = operands(which, recipe, **{key: as_numpy(value) for key, value in given.items()})
    values = [dequantize(q) if isinstance(q, Quantized) else q.astype(np.float32) for q in (a, b)]
    exact = matmul(values[0], values[1].T)
    b = transposed(b) if isinstance(b, Quantized) else b.T
    bound = matmul_error_bound(a, b, accumulation="blocked", out_dtype=dtype) + np.abs(exact) * 2.0**-24
    assert np.all(np.abs(np.asarray(got, np.float32).astype(np.float64) - exact) <= bound)


def as_numpy(value):
    return np.asarray(as_jax(value)) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "recipe", [one if one in BY_DAY else pytest.param(one, marks=pytest.mark.nightly) for one in QUANTIZED]
)
def test_operands_of_every_step(recipe, quantized):
    dumps, _ = train_in_torch(recipe, ml_dtypes.bfloat16)
    assert len(dumps) == 2 * STEPS
    for dump in dumps:
        given = {key: dump[key] for key in ("x", "w", "g", "seed")}
        x, w, g = (as_jax(dump[key]) for key in "xwg")
        quantized.clear()
        y, gradients = jax.vjp(
            lambda x, w, seed=dump["seed"]: dot_general(x, w, CONTRACT_LAST, recipe=recipe, seed=seed), x, w
        )
        dx, dw = gradients(g)
        same_operands(quantized, recipe, given)
        for which, got in (("output", y), ("input_grad", dx), ("weight_grad", dw)):
            within_bound(got, which, recipe, given, "bfloat16")


def exactly_summable(a, b):
    """Whether all sums of products of two operands are exact in float32, in any order."""
    a, b = (np.asarray(dequantize(q), np.float64) for q in (a, b))
    return bool(np.all(np.abs(a) @ np.abs(b).T < 2.0**24 * least_bits(a)[:, None] * least_bits(b)[None, :]))


def least_bits(x):
    """The least bit that is set in any value of each row."""
    fraction, exponent = np.frexp(x)
    integer = (fraction * 2.0**24).astype(np.int64)
    least = np.ldexp((integer & -integer).astype(np.float64), exponent - 24)
    return np.where(x == 0, np.inf, least).min(1, initial=2.0**100)


def test_whole_training_in_both_libraries(quantized):
    """MXFP4 in float32: stochastic rounding and Hadamard transforms, sums of few bits, one rounding in all other steps."""
    dumps, weights = train_in_torch("mxfp4", np.float32)
    for dump in dumps:
        given = {key: dump[key] for key in ("x", "w", "g", "seed")}
        assert all(exactly_summable(*operands(which, "mxfp4", **given)) for which in PRODUCTS)
    x, target, *mine = (jnp.asarray(value) for value in start(np.float32))
    for step in range(STEPS):

        def model(first, second, step=step):
            hidden = dot_general(x, first, CONTRACT_LAST, recipe="mxfp4", seed=seed_of(step, 0))
            hidden = jax.nn.relu(hidden)  # whose gradient at 0 is 0, as in torch
            return dot_general(hidden, second, CONTRACT_LAST, recipe="mxfp4", seed=seed_of(step, 1))

        quantized.clear()
        y, gradients = jax.vjp(model, *mine)
        changes = gradients((y - target) * 2.0**-6)
        first, second = dumps[2 * step : 2 * step + 2]
        made = quantized[:2] + quantized[8:], quantized[2:8]  # backward runs through the second layer first
        for got, dump in zip(made, (first, second), strict=True):
            same_operands(got, "mxfp4", {key: dump[key] for key in ("x", "w", "g", "seed")})
        for w, dump in zip(mine, (first, second), strict=True):
            assert_same_bits(w, dump["w"])
        for change, dump in zip(changes, (first, second), strict=True):
            assert_same_bits(change, dump["dw"])
        mine = [w - change * 2.0**-3 for w, change in zip(mine, changes, strict=True)]
    for w, wanted in zip(mine, weights, strict=True):
        assert_same_bits(w, wanted)
    assert not np.array_equal(np.asarray(mine[0]), start(np.float32)[2])
