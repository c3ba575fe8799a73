"""The same two-layer model trained in torch (by the reference) and in JAX (by `dot_general`): the same quantized operands.

Each torch step's x, w and g are given to JAX: every operand of every product has the same codes and scales, for every
recipe. Where the sums are exact in float32 nothing is handed over but the start, and the two trainings are the same bits.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from reference import Quantized, dequantize, matmul, matmul_error_bound
from reference.matmul.linear import transposed
from reference.training import RECIPES, training_linear, training_linear_vjp
from reference.training.linear import operands
from reference.training.recipe import PRODUCTS

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ao_lab.jax import training  # noqa: E402  JAX is optional
from ao_lab.jax.training import dot_general  # noqa: E402

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
    "recipe",
    [one if one in BY_DAY else pytest.param(one, marks=pytest.mark.nightly) for one in QUANTIZED],
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
