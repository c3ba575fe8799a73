"""What `dequantize` says of a batch of quantized tensors that is not one; other wrong fields: `test_stored`."""

import jax
import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits, fill
from reference import dequantize, quantize


@pytest.mark.parametrize(
    ("name", "part"), [("nvfp4", "outer"), ("nf4", "scale"), ("fp8_tensorwise", "scale")]
)
def test_tensors_that_were_quantized_apart_are_not_one(name, part):
    """Where a scale is of a whole tensor, or blocks lie over its rows."""
    x = fill("normals", (3, 4, 64))
    each = [quantize(one, name) for one in x]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    with pytest.raises(
        ValueError,
        match=rf"takes {part} = .*; these are the scales of 3 tensors of shape \(4, 64\), as jax.vmap",
    ):
        dequantize(stacked)
    if name == "fp8_tensorwise":
        values = jax.jit(jax.vmap(dequantize))(stacked)
        assert_same_bits(values, np.stack([dequantize(one) for one in each]))
