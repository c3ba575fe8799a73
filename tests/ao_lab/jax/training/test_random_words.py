"""Random words in JAX are those of the reference; seeds in every form."""

import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits
from reference import random_bits

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ao_lab.jax.training.random_words import random_words, seed_words  # noqa: E402  JAX is optional


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
