"""Constructed Hadamard matrices: orthogonal in integers, for every order that models need."""

from __future__ import annotations

import numpy as np
import pytest

from reference.calibration.hadamard_matrices import construction, hadamard_matrix, prime_of, split_length
from tests.support.refusals import refused

#: Widths of language models, and how each is split.
WIDTHS = {
    576: (36, 16), 640: (20, 32), 896: (28, 32), 1536: (12, 128), 4864: (76, 64), 8960: (140, 64), 9216: (36, 256),
    9728: (76, 128), 11008: (344, 32), 13824: (108, 128), 14336: (28, 512), 17408: (68, 256), 18944: (148, 128),
    25600: (100, 256), 4096: (1, 4096),
}  # fmt: skip


@pytest.mark.parametrize("order", [1, 2, 8, 12, 20, 24, 28, 36, 52, 76, 100, 108, 148, 244, 344])
def test_rows_are_orthogonal(order):
    """Both constructions, over fields of a prime, its square (25, 49, 169, 361) and its cube (27, 343)."""
    matrix = hadamard_matrix(order)
    assert matrix.dtype == np.int8
    assert set(np.unique(matrix)) <= {1, -1}
    assert (matrix.astype(int) @ matrix.T.astype(int) == order * np.eye(order)).all()


@pytest.mark.nightly
def test_rows_are_orthogonal_in_every_order():
    orders = [order for order in range(4, 1025, 4) if construction(order)]
    assert len(orders) == 129
    for order in orders:
        matrix = hadamard_matrix(order).astype(np.float64)
        assert (matrix @ matrix.T == order * np.eye(order)).all(), order


@pytest.mark.parametrize("length", WIDTHS)
def test_lengths_are_split(length):
    assert split_length(length) == WIDTHS[length]


def test_prime_powers():
    assert [q for q in range(60) if prime_of(q)] == [
        2, 3, 4, 5, 7, 8, 9, 11, 13, 17, 19, 23, 25, 27, 29, 31, 37, 41, 43, 47, 49, 53, 59
    ]  # fmt: skip
    assert (prime_of(27), prime_of(49), prime_of(343)) == (3, 7, 7)


def test_refusals():
    for length in (3, 6, 92, 172, 4100):
        refused(ValueError, "no Hadamard matrix", split_length, length)
    refused(ValueError, "order 92", hadamard_matrix, 92)
    assert split_length(368) == (368, 1)
