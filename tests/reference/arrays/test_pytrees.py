"""`Quantized` and `Scales` in JAX: leaves and static parts, through jit, vmap, scan and tree_map, registered in time."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import Scales, dequantize, quantize, register_jax

X = fill("normals", (4, 64))
NAMES = ["mxfp4", "nvfp4", "int8_rowwise_asymmetric"]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_leaves_and_the_rest_is_static(name):
    q = quantize(jnp.asarray(X), name)
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == 2 + (q.outer is not None) + (q.zero is not None)
    back = jax.tree.unflatten(structure, leaves)
    assert_same_quantized(back, q)
    assert back.scheme is q.scheme


@pytest.mark.parametrize("name", NAMES)
def test_through_the_boundary_of_jit(name):
    result = jax.jit(quantize, static_argnames="scheme")(jnp.asarray(X), scheme=name)
    assert_same_quantized(result, quantize(X, name), inputs=X)
    assert_same_bits(jax.jit(dequantize)(result), dequantize(quantize(X, name)))
    # Made by NumPy, read by JAX.
    assert_same_bits(jax.jit(dequantize)(quantize(X, name)), dequantize(quantize(X, name)))


def test_vmap_over_a_quantized():
    x = jnp.asarray(fill("normals", (3, 4, 64)))
    stacked = jax.vmap(lambda row: quantize(row, "mxfp4"))(x)
    assert stacked.codes.shape == (3, 4, 64)
    assert stacked.shape == (4, 64)
    assert_same_bits(jax.vmap(dequantize)(stacked), dequantize(quantize(x, "mxfp4")))


def test_tree_map_and_scan():
    scales = quantize(jnp.asarray(X), "nvfp4").scales
    assert_same_bits(jax.tree.map(lambda leaf: leaf, scales), scales)
    assert isinstance(scales, Scales)
    _, stacked = jax.lax.scan(lambda carry, row: (carry, quantize(row, "fp8_rowwise")), 0, jnp.asarray(X))
    assert_same_bits(stacked.codes, quantize(X, "fp8_rowwise").codes)


def test_other_axes_and_shapes_are_other_structures():
    one, other = (jax.tree.structure(quantize(jnp.ones((32, 32)), "mxfp4", axis=axis)) for axis in (0, 1))
    assert one != other


def test_registering_again_does_nothing():
    register_jax()
    register_jax()


USE = "q = reference.quantize(numpy.ones((1, 32), numpy.float32), 'mxfp4'); jax.jit(reference.dequantize)(q)"


@pytest.mark.parametrize(
    "order",
    [
        "import jax, reference, numpy",
        "import reference, numpy, jax; reference.register_jax()",
        "import reference, numpy, jax; reference.quantize(jax.numpy.ones((1, 32)), 'mxfp4')",
    ],
)
def test_registered_whatever_the_order_of_imports(order):
    subprocess.run([sys.executable, "-c", f"{order}; {USE}"], check=True)


def test_importing_reference_imports_no_jax():
    code = "import sys, reference; assert not {'jax', 'torch', 'hypothesis'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scheme_may_be_a_static_argument():
    """Records hash and compare by value, so that jit caches by them."""
    from reference import SCHEMES

    function = jax.jit(lambda x, scheme: quantize(x, scheme).codes, static_argnums=1)
    assert_same_bits(function(X, SCHEMES["mxfp4"]), np.asarray(quantize(X, "mxfp4").codes))
