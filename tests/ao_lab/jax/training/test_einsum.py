"""`einsum` knows which operand is the weight; `jnp.einsum` with `DotGeneral` has to be told where it exchanges them."""

from functools import partial

import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ao_lab.jax.training import DotGeneral, dot_general, einsum  # noqa: E402  JAX is optional

# Small integers: e4m3 and float32 sums hold them exactly, so that every right product has the same bits.
X = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (2, 16, 32)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (2, 32, 16)), jnp.float32)
RECIPE = "rowwise_with_gw_hp"


def halves(function):
    """Output and gradients for a cotangent with many magnitudes, of which only the weight gradient stays in high precision."""
    y, back = jax.vjp(function, X, W)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(y.shape), jnp.float32)
    return y, *back(g)


@pytest.mark.nightly
def test_the_first_operand_is_the_input():
    """Whatever the order of the result: the same output and gradients as with the axes in the product's own order."""
    turned = partial(einsum, "BSD,CDH->CBSH", recipe=RECIPE)
    plain = partial(einsum, "BSD,CDH->BSCH", recipe=RECIPE)
    y, back = jax.vjp(turned, X, W)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(y.shape), jnp.float32)
    same, same_back = jax.vjp(plain, X, W)
    assert_same_bits(y, jnp.einsum("BSCH->CBSH", same))
    for one, two in zip(back(g), same_back(jnp.einsum("CBSH->BSCH", g)), strict=True):
        assert_same_bits(one, two)
    assert_same_bits(y, jnp.einsum("BSD,CDH->CBSH", X, W))


def test_a_weight_on_the_left_is_said_or_refused():
    """What jnp.einsum hands on: without weight= it is an error, with it the gradients are those of `einsum`."""
    wanted = halves(partial(einsum, "BSD,CDH->CBSH", recipe=RECIPE))
    assert_same_bits(wanted[0], jnp.einsum("BSD,CDH->CBSH", X, W))
    given = DotGeneral(RECIPE, weight="lhs")
    made = halves(lambda x, w: jnp.einsum("BSD,CDH->CBSH", x, w, _dot_general=given))
    for one, two in zip(made, wanted, strict=True):
        assert_same_bits(one, two)
    with pytest.raises(ValueError, match='give weight="lhs" if the left one is the weight'):
        jnp.einsum("BSD,CDH->CBSH", X, W, _dot_general=DotGeneral(RECIPE))
    # In the order of the product nothing has to be said.
    jnp.einsum("BSD,DH->BSH", X, W[0], _dot_general=DotGeneral(RECIPE))


@pytest.mark.nightly
def test_operands_may_be_named():
    """weight="lhs" is the product with the operands exchanged; the gradient of the weight stays in high precision."""
    x, w = X[0], W[0].T
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
        einsum(subscripts, X, W, recipe=RECIPE)


def test_operands_of_other_ranks():
    with pytest.raises(ValueError, match="x has 3 axes, its subscripts 2"):
        einsum("SD,DH->SH", X, W[0], recipe=RECIPE)
