"""Hadamard matrices of orders m that are no power of two, constructed: entries 1 and -1, and H H^T = m I.

Paley's two constructions, from the squares of a finite field of q elements (Paley, "On orthogonal matrices", J. Math. Phys. 12,
1933): order q + 1 where q = 3 modulo 4, order 2 (q + 1) where q = 1 modulo 4. With Q_ab = chi(a - b), 1 for squares and -1 for
others (0 for 0), and C = [[0, 1], [+-1, Q]], they are I + C and C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]. Times 2^k by
Sylvester's doubling they give every length that language models use, among them 12, 20, 28, 36, 76, 140, 148 and 344 times
powers of two.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import isqrt

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.int8]
#: A field of more elements takes seconds and megabytes, and no model needs it.
LARGEST_ORDER = 1024


def split_length(length: int) -> tuple[int, int]:
    """(m, 2^k) with m 2^k = length and the smallest m that has a matrix here; ValueError where there is none."""
    base = length & -length
    if base == length:
        return 1, length
    order = length // base
    while base > 1 and order <= LARGEST_ORDER:
        order, base = 2 * order, base // 2
        if construction(order) is not None:
            return order, base
    raise ValueError(
        f"no Hadamard matrix of order {length} is known here: it is not 2^k times an order of Paley's constructions; "
        f"rotate by blocks, for example of {length & -length}"
    )


def construction(order: int) -> tuple[int, int] | None:
    """The prime power q that gives a matrix of this order, and which of the two constructions, or None."""
    if order % 4 or order > LARGEST_ORDER:
        return None
    if (order - 1) % 4 == 3 and prime_of(order - 1):
        return order - 1, 1
    if order // 2 % 4 == 2 and prime_of(order // 2 - 1):
        return order // 2 - 1, 2
    return None


def prime_of(q: int) -> int:
    """The prime whose first, second or third power q is; 0 where there is none."""
    for power in (1, 2, 3):
        prime = int(float(q) ** (1 / power) + 0.5)
        if pow(prime, power) == q and prime > 1 and all(prime % d for d in range(2, isqrt(prime) + 1)):
            return prime
    return 0


@lru_cache
def hadamard_matrix(order: int) -> Signs:
    """(order, order) int8 of 1 and -1, read-only, for an order of `split_length`; 1 and powers of two are Sylvester's."""
    prime_power = construction(order)
    if order & (order - 1) == 0:
        matrix = np.ones((1, 1), np.int8)
        while len(matrix) < order:
            matrix = np.kron(np.asarray([[1, 1], [1, -1]], np.int8), matrix)
    elif prime_power is None:
        raise ValueError(f"Paley's constructions give no Hadamard matrix of order {order}; see split_length")
    else:
        matrix = _paley(*prime_power)
    matrix.flags.writeable = False
    return matrix


def _paley(q: int, kind: int) -> Signs:
    core = _characters(q)
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:] = 1
    conference[1:, 0] = -1 if kind == 1 else 1
    conference[1:, 1:] = core
    one = np.eye(q + 1, dtype=np.int8)
    if kind == 1:
        return conference + one
    plus, minus = np.asarray([[1, 1], [1, -1]], np.int8), np.asarray([[1, -1], [-1, -1]], np.int8)
    return np.kron(conference, plus) + np.kron(one, minus)


def _characters(q: int) -> Signs:
    """chi(a - b) for all elements of the field of q elements, in the order of their digits."""
    prime = prime_of(q)
    elements = list(product(range(prime), repeat=1 if prime == q else 2 if prime**2 == q else 3))
    modulus = _irreducible(prime, len(elements[0]))
    squares = {_square(a, modulus, prime) for a in elements if any(a)}
    chi = {a: 0 if not any(a) else 1 if a in squares else -1 for a in elements}
    table = np.asarray([chi[a] for a in elements], np.int8).reshape((prime,) * len(elements[0]))
    digits = np.asarray(elements)
    difference = (digits[:, None] - digits[None]) % prime
    symbols: Signs = table[tuple(np.moveaxis(difference, -1, 0))]
    return symbols


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """The lower coefficients (constant first) of the first monic polynomial without a root, irreducible to degree 3."""
    if degree == 1:
        return (0,)
    for lower in product(range(prime), repeat=degree):
        values = (x**degree + sum(c * x**i for i, c in enumerate(lower)) for x in range(prime))
        if all(value % prime for value in values):
            return lower
    raise ValueError(f"no irreducible polynomial of degree {degree} modulo {prime}")


def _square(a: tuple[int, ...], modulus: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """The square of an element, its coefficients (constant first), modulo the field's polynomial."""
    degree = len(a)
    coefficients = [0] * (2 * degree - 1)
    for i, left in enumerate(a):
        for j, right in enumerate(a):
            coefficients[i + j] += left * right
    for top in range(2 * degree - 2, degree - 1, -1):
        for i, c in enumerate(modulus):
            coefficients[top - degree + i] -= coefficients[top] * c
    return tuple(c % prime for c in coefficients[:degree])


__all__ = ["hadamard_matrix", "split_length"]
