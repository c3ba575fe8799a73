"""Masks as bits: NumPy's order, and back."""

import numpy as np
import pytest
import torch

from fast.kernels.sm90_sparse24_gemm.bits import pack_bits, packed_shape, unpack_bits


@pytest.mark.parametrize("shape", [(16, 32), (3, 5), (2, 4, 12), (9,), (0, 8)], ids=str)
def test_bits_are_those_of_numpy(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(mask)
    assert (bits.dtype, bits.shape) == (torch.uint8, packed_shape(shape))
    assert np.array_equal(bits.numpy(), np.packbits(mask.numpy(), axis=-1))
    back = unpack_bits(bits, shape[-1])
    assert back.dtype == torch.bool
    assert torch.equal(back, mask)
