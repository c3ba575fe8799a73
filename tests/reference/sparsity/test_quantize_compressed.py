"""`quantize_compressed` is quantization and compression, whose mask is chosen before anything is rounded."""

import numpy as np
import pytest

import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference.sparsity.quantize_compressed import quantize_compressed


def weights():
    return fill("normals", (8, 64)).copy()


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise_e5m2", "int8_rowwise", "mxfp8_e4m3"])
def test_codes_are_those_of_kept_elements(name):
    w = weights()
    scales = reference.choose_scales(w, name)
    made = quantize_compressed(w, name, scales)
    wanted = np.where(reference.prune(w), reference.quantize(w, name, scales=scales).codes, 0)
    assert_same_bits(reference.decompress(*made), wanted)


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3"])
def test_scales_are_those_of_the_dense_tensor(name):
    """What is pruned is never the largest of its block."""
    w = weights()
    pruned = np.where(reference.prune(w), w, np.float32(0))
    assert_same_bits(reference.choose_scales(w, name).scale, reference.choose_scales(pruned, name).scale)


def test_ties_of_codes_do_not_choose():
    """15 and 15.5 have one code of e4m3; the larger one stays."""
    w = np.array([[15.0, 15.5, 200.0, 0.0]], np.float32)
    made = quantize_compressed(w, "fp8_tensorwise", np.float32(1))
    assert made.metadata.tolist() == [[1 | 2 << 2]]


def test_masks_are_those_of_compress():
    w = weights()
    mask = reference.prune(w, pattern="1:4")
    q = reference.quantize(w, "fp8_rowwise")
    made = quantize_compressed(w, "fp8_rowwise", q.scale, mask)
    assert_same_bits(made.values, reference.compress(q.codes, mask).values)
    assert_same_bits(quantize_compressed(w * mask, "fp8_rowwise", q.scale, None), made)
    with pytest.raises(ValueError, match="are not zero"):
        quantize_compressed(w, "fp8_rowwise", q.scale, None)
    with pytest.raises(ValueError, match="pattern '2:4' only"):
        quantize_compressed(w, "fp8_rowwise", q.scale, "1:4")
