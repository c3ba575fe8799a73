"""A mesh with explicit axes, the default of `jax.make_mesh`: the same bits, and a result that is sharded like the operand.

One device has a mesh too; several are in tests/ao_lab/jax/test_modes.py.
"""

import numpy as np
import pytest

import reference
from reference.arrays.jax_mesh import explicit_mesh

jax = pytest.importorskip("jax")
if not hasattr(jax.sharding, "auto_axes"):
    pytest.skip("this JAX has no explicit axes by default", allow_module_level=True)


@pytest.fixture
def split():
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return lambda values: jax.device_put(values, spec)


def test_explicit_axes_are_seen(split):
    assert explicit_mesh([split(np.ones(4, np.float32))]).axis_names == ("d",)
    assert explicit_mesh([jax.numpy.ones(4)]) is None


def test_a_gather_from_a_table_has_the_bits_of_one_device(split):
    codes = np.arange(256, dtype=np.uint8)
    given = split(codes)
    found = reference.decode(given, "float8_e4m3fn")
    assert np.asarray(found).tobytes() == reference.decode(codes, "float8_e4m3fn").tobytes()
    assert found.sharding.spec == given.sharding.spec
