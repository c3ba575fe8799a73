"""`reference.random_bits` in JAX, so that a seed may be an array of a compiled program: the same words.

A seed is an integer, or an array: an integer (a step number, say), the data of a JAX key, or a key, of any implementation.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reference.formats.rounding import MASK, MULTIPLIER, ROUNDS, WEYL

#: Elements that 32 bits of a counter reach, four words each.
MOST = 1 << 34
#: Shapes of the data of one key.
KEYS = ((2,), (4,))


def seed_words(seed: Any) -> jax.Array:
    """A seed as uint32 (2,), its high word and its low one, as a key of JAX's threefry has them.

    seed: an integer from 0 to 2**64 - 1; an array of any integer dtype and shape (), whose low 32 bits are the low word (a
    negative one wraps); a key, or its data, of JAX or NumPy. Of threefry, JAX's default, the two words are the seed: so
    `jax.random.PRNGKey(n)`, `jax.random.key(n)` and n are one. Keys of more words (rbg, unsafe_rbg: four) are hashed: the first
    two are the seed of Philox, the next two its counter, and two words of what it draws the seed, or that of the next ones.
    TypeError or ValueError for anything else.
    """
    if isinstance(seed, np.ndarray) and seed.dtype == np.uint32 and seed.ndim:
        seed = jnp.asarray(seed)
    if isinstance(seed, jax.Array):
        return _of_array(seed)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(
            f"seed is an integer, a JAX array of one or a JAX key, got {type(seed).__name__}: {seed!r:.60}"
        )
    number = seed.__index__()
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed is an integer from 0 to 2**64 - 1, got {number}")
    return jnp.asarray([number >> 32, number & MASK], jnp.uint32)


def _of_array(seed: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        return jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
    if seed.shape not in KEYS or seed.dtype != jnp.uint32:
        raise TypeError(
            f"a seed in an array is one integer, a key, or the two or four uint32 words of one; got {seed.dtype} of shape "
            f"{seed.shape}"
        )
    words = seed[:2]
    for at in range(2, seed.shape[0], 2):
        zero = jnp.zeros((), jnp.uint32)
        words = jnp.stack(_philox(words, (seed[at], seed[at + 1], zero, zero))[:2])
    return words


def random_words(shape: tuple[int, ...], seed: jax.Array, stream: int) -> jax.Array:
    """`reference.random_bits(shape, seed=seed, stream=stream)` for a seed as `seed_words` gives it."""
    count = prod(shape)
    if count > MOST:
        raise ValueError(f"random words are for arrays of at most 2**34 elements, got shape {shape}")
    index = jnp.arange(-(-count // 4), dtype=jnp.uint32)
    zero = jnp.zeros_like(index)
    words = _philox(seed, (index, zero, zero + jnp.uint32(stream), zero))
    return jnp.stack(words, axis=-1).reshape(-1)[:count].reshape(shape)


def _philox(seed: jax.Array, counter: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Philox 4x32-10; uint32 wraps."""
    c0, c1, c2, c3 = counter
    k1, k0 = seed[0], seed[1]
    for _ in range(ROUNDS):
        (high, low), (high_2, low_2) = _wide(MULTIPLIER[0], c0), _wide(MULTIPLIER[1], c2)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high ^ c3 ^ k1, low
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def _wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of a * b: without x64 JAX has no 64-bit integers, so by halves of 16 bits."""
    low_a, high_a = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    low_b, high_b = b & 0xFFFF, b >> 16
    middle = high_a * low_b + (low_a * low_b >> 16)
    other = low_a * high_b + (middle & 0xFFFF)
    return high_a * high_b + (middle >> 16) + (other >> 16), jnp.uint32(a) * b
