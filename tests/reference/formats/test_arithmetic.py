"""float32 bit patterns become an array of a float dtype with one rounding, against NumPy's and ml_dtypes' casts."""

from __future__ import annotations

import numpy as np
import pytest

from reference.arrays.namespace import namespace_of
from reference.formats.arithmetic import to_dtype_bits
from reference.formats.formats import FORMATS
from tests.support import oracles
from tests.support.oracles import SIXTEEN_BIT

NUMPY = namespace_of(np.zeros(1))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", ["float32", "float64", *SIXTEEN_BIT])
def test_float32_bits_become_a_dtype(name: str, saturate: bool) -> None:
    """`to_dtype_bits` against NumPy's and ml_dtypes' casts; saturated, only what was infinite is."""
    rng = np.random.default_rng(4)
    bits = np.concatenate(
        [rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint32), np.arange(1 << 16, dtype=np.uint32) << 16]
    )
    x = bits.view(np.float32)
    ours = to_dtype_bits(NUMPY, bits.view(np.int32), name, saturate=saturate)
    assert ours.dtype == oracles.dtype_of(name)
    with np.errstate(all="ignore"):
        truth = x.astype(oracles.dtype_of(name)).astype(np.float64)
        wide = ours.astype(np.float64)
    if saturate and name in FORMATS:
        limit = FORMATS[name].max
        truth = np.where(np.isinf(x), truth, np.clip(truth, -limit, limit))
    nan = np.isnan(x)
    assert (wide.view(np.uint64) == truth.view(np.uint64))[~nan].all()
    assert np.isnan(wide[nan]).all()
