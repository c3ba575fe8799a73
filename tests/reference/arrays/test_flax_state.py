"""Quantized tensors in flax's state dictionaries and messages: back bit for bit, and never as another scheme's."""

import numpy as np
import pytest

import ao_lab.jax
import reference
from ao_lab.testing import assert_same_bits

jax = pytest.importorskip("jax")
serialization = pytest.importorskip("flax").serialization
X = np.random.default_rng(0).standard_normal((4, 128), np.float32)


@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "nvfp4", "nf4", "int4_g32_asymmetric"])
def test_round_trip(scheme):
    q, target = reference.quantize(X, scheme, packed=True), reference.quantize(0 * X, scheme, packed=True)
    tree = {"layer": {"kernel": q, "scales": q.scales}}
    back = serialization.from_bytes(
        {"layer": {"kernel": target, "scales": target.scales}}, serialization.to_bytes(tree)
    )
    assert_same_bits(reference.dequantize(back["layer"]["kernel"]), reference.dequantize(q))
    assert_same_bits(back["layer"]["scales"].scale, q.scale)
    state = serialization.to_state_dict(q)
    assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state))
    assert_same_bits(serialization.from_state_dict(target, state).codes, q.codes)


def test_of_jax_arrays():
    q = ao_lab.jax.quantize(jax.numpy.asarray(X), "mxfp8_e4m3")
    back = serialization.from_bytes(q, serialization.to_bytes(q))
    assert_same_bits(reference.dequantize(back), ao_lab.jax.dequantize(q))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"scheme": "mxfp8_e5m2"}, r"scheme 'mxfp8_e4m3' \(target: 'mxfp8_e5m2'\)"),
        ({"scheme": "mxfp8_e4m3", "axis": 0}, r"axis 1 \(target: 0\)"),
        ({"scheme": "nvfp4"}, "another Quantized: .*scheme"),
    ],
)
def test_another_target_is_refused(other, message):
    state = serialization.to_bytes(reference.quantize(X[:, :4].repeat(32, 1).repeat(8, 0), "mxfp8_e4m3"))
    with pytest.raises(ValueError, match=message):
        serialization.from_bytes(reference.quantize(np.ones((32, 128), np.float32), **other), state)


def test_a_state_without_its_scales_is_refused():
    q = reference.quantize(X, "nvfp4")
    state = serialization.to_state_dict(q)
    with pytest.raises(
        ValueError, match="like the target has codes, outer, record, scale, got codes, record, scale"
    ):
        serialization.from_state_dict(q, {name: part for name, part in state.items() if name != "outer"})
