"""`times_power_of_two`: the bits of the reference wherever they are exact."""

import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits, fill
from fast.formats import times_power_of_two
from reference.formats import storage as specified
from reference.formats.storage import SCALED


def every_code(storage):
    """All codes of a narrow storage, and numbers of every kind in float32 with the one NaN that scales have."""
    if storage != "float32":
        return (
            np.arange(256).astype(np.uint8)
            if storage == "float8_e8m0fnu"
            else np.arange(65536).astype(np.uint16)
        )
    x = np.concatenate([fill(kind, (64,)) for kind in ("bits", "subnormals", "largest", "zeros", "specials")])
    return np.where(np.isnan(x), np.float32(np.nan), x)


@pytest.mark.parametrize("exponent", [-1000, -140, -7, -1, 0, 1, 6, 130, 260])
@pytest.mark.parametrize("storage", SCALED)
def test_products_are_those_of_the_reference(storage, exponent):
    stored = every_code(storage)
    wanted, exact = specified.times_power_of_two(stored, storage, exponent)
    made, where = (part.numpy() for part in times_power_of_two(torch.from_numpy(stored), storage, exponent))
    assert_same_bits(where, exact)
    numbers = specified.load(specified.namespace_of(stored), stored, storage).view(np.float32)
    kept = exact & ~np.isnan(numbers)
    assert_same_bits(made[kept], wanted[kept])
    assert made.dtype == stored.dtype
    assert np.isnan(
        specified.load(specified.namespace_of(made), made, storage).view(np.float32)[np.isnan(numbers)]
    ).all()


def test_storages_that_are_not_exact():
    with pytest.raises(ValueError, match="int8 times a power of two are not exact"):
        times_power_of_two(torch.zeros(1, dtype=torch.int8), "int8", 1)
    with pytest.raises(TypeError, match="takes torch tensors"):
        times_power_of_two(np.ones(1, np.float32), "float32", 1)
