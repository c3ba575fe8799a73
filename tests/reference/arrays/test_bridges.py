"""`Quantized` and `Scales` in JAX and flax: leaves and static parts, registered in time, state dictionaries; a mesh. CPU
tensors of torch share memory with NumPy on the way in and out; others keep to torch's namespace.

A mesh has explicit axes, the default of `jax.make_mesh`, also one of one device; several are in tests/ao_lab/jax/test_modes.py.
"""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import ao_lab.jax
import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import SCHEMES, Scales, choose_scales, decode, dequantize, encode, quantize, register_jax
from reference.arrays.bridges import bridged, explicit_mesh, is_cpu_tensor, to_numpy, to_torch

X = fill("normals", (4, 64))
WIDE = np.random.default_rng(0).standard_normal((4, 128), np.float32)
NAMES = ["mxfp4", "nvfp4", "int8_rowwise_asymmetric"]
DTYPES = ["float32", "float16", "float64", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


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
    stacked = jax.jit(jax.vmap(lambda row: quantize(row, "mxfp4")))(x)
    assert stacked.codes.shape == stacked.shape == (3, 4, 64)
    assert repr(stacked) == repr(quantize(x, "mxfp4"))
    assert_same_bits(jax.jit(jax.vmap(dequantize))(stacked), dequantize(quantize(x, "mxfp4")))
    assert_same_bits(dequantize(stacked), dequantize(quantize(x, "mxfp4")))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("int4_g32_asymmetric", {"packed": True}),
        pytest.param("mxfp4", {"axis": 1}, marks=pytest.mark.nightly),
        pytest.param("int3_g32", {"packed": True}, marks=pytest.mark.nightly),
    ],
)
def test_layers_of_a_stack_are_quantized_tensors(name, settings):
    """Of a whole stack: by scan, by vmap, by number, and back."""
    q = quantize(fill("normals", (3, 32, 96)), name, **settings)
    values = dequantize(q)
    scan = jax.jit(lambda q: jax.lax.scan(lambda carry, one: (carry, dequantize(one)), 0, q)[1])
    assert_same_bits(scan(q), values)
    assert_same_bits(jax.jit(jax.vmap(dequantize))(q), values)
    layer = jax.tree.map(lambda leaf: leaf[1], q)
    assert (layer.shape, layer.axis) == (values[1].shape, q.axis - 1)
    assert_same_bits(dequantize(layer), values[1])
    again = jax.tree.map(lambda *leaves: np.stack(leaves), *[layer] * 3)
    assert jax.tree.structure(again) == jax.tree.structure(q) == jax.tree.structure(layer)
    assert again.shape == q.shape


def test_leaves_that_are_no_arrays():
    """Trees of axes, shardings and placeholders have the shape of what they are made of."""
    q = quantize(np.ones((3, 32, 64), np.float32), "mxfp4", axis=1)
    leaves, structure = jax.tree.flatten(q)
    empty = jax.tree.unflatten(structure, [object()] * len(leaves))
    assert (empty.shape, empty.axis) == (q.shape, 1)
    assert jax.tree.structure(empty) == structure
    axes = jax.tree.map(lambda leaf: 2, q)
    assert jax.vmap(lambda one: one.codes, in_axes=(axes,), out_axes=2)(q).shape == q.shape
    # An axis that was taken off is no other one.
    with pytest.raises(ValueError, match=r"axis -2 is outside a tensor of shape \(64,\)"):
        dequantize(jax.tree.map(lambda leaf: leaf[0, 0], q))


def test_layers_that_flax_scans_have_quantized_weights():
    """Each is dequantized where it runs, and gradients of the inputs are those of the dequantized model."""
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + x @ self.param("w", nn.initializers.normal(), (64, 64)), None

    def values(params):
        return jax.tree.map(dequantize, params, is_leaf=lambda leaf: isinstance(leaf, reference.Quantized))

    scanned = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    layers = nn.scan(nn.map_variables(Layer, "params", trans_in_fn=values), **scanned)()
    weights = {"params": {"w": quantize(fill("normals", (3, 64, 64)), "mxfp4", axis=-2)}}

    def loss(x, model, params):
        return model.apply(params, x, None)[0].sum()

    made, wanted = (
        jax.jit(jax.value_and_grad(lambda x, model=model, params=params: loss(x, model, params)))(X)
        for model, params in ((layers, weights), (nn.scan(Layer, **scanned)(), values(weights)))
    )
    assert_same_bits(made[0], np.asarray(wanted[0]))
    assert_same_bits(made[1], np.asarray(wanted[1]))


def test_exported_programs_are_written_and_read():
    """With quantized arguments and results, of a record that no other process has."""
    mine = replace(SCHEMES["int4_g32"], name="of this test")
    q = quantize(jnp.asarray(X), mine, packed=True)
    exported = jax.export.export(jax.jit(lambda q: (dequantize(q), q, q.scales)))(q)
    values, same, scales = jax.export.deserialize(exported.serialize()).call(q)
    assert_same_bits(values, dequantize(q))
    assert_same_quantized(same, q)
    assert_same_bits(scales.scale, q.scale)


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
    function = jax.jit(lambda x, scheme: quantize(x, scheme).codes, static_argnums=1)
    assert_same_bits(function(X, SCHEMES["mxfp4"]), np.asarray(quantize(X, "mxfp4").codes))


@pytest.fixture
def serialization():
    return pytest.importorskip("flax").serialization


@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "nvfp4", "nf4", "int4_g32_asymmetric"])
def test_a_round_trip_through_flax(serialization, scheme):
    q, target = (
        reference.quantize(WIDE, scheme, packed=True),
        reference.quantize(0 * WIDE, scheme, packed=True),
    )
    tree = {"layer": {"kernel": q, "scales": q.scales}}
    back = serialization.from_bytes(
        {"layer": {"kernel": target, "scales": target.scales}}, serialization.to_bytes(tree)
    )
    assert_same_bits(reference.dequantize(back["layer"]["kernel"]), reference.dequantize(q))
    assert_same_bits(back["layer"]["scales"].scale, q.scale)
    state = serialization.to_state_dict(q)
    assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state))
    assert_same_bits(serialization.from_state_dict(target, state).codes, q.codes)


@pytest.mark.nightly
def test_flax_may_be_imported_after_quantizing():
    """In a process of its own: what was quantized before is known to flax."""
    lines = (
        "import ao_lab.jax, jax.numpy as jnp; q = ao_lab.jax.quantize(jnp.ones((4, 64)), 'mxfp8_e4m3')",
        "from flax import serialization",
        "back = serialization.from_bytes(q, serialization.to_bytes(q)); assert (back.codes == q.codes).all()",
    )
    pytest.importorskip("flax")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)


def test_jax_arrays_through_flax(serialization):
    q = ao_lab.jax.quantize(jax.numpy.asarray(WIDE), "mxfp8_e4m3")
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
def test_another_target_of_flax_is_refused(serialization, other, message):
    state = serialization.to_bytes(reference.quantize(WIDE[:, :4].repeat(32, 1).repeat(8, 0), "mxfp8_e4m3"))
    with pytest.raises(ValueError, match=message):
        serialization.from_bytes(reference.quantize(np.ones((32, 128), np.float32), **other), state)


def test_a_state_of_flax_without_its_scales_is_refused(serialization):
    q = reference.quantize(WIDE, "nvfp4")
    state = serialization.to_state_dict(q)
    with pytest.raises(
        ValueError, match="like the target has codes, outer, record, scale, got codes, record, scale"
    ):
        serialization.from_state_dict(q, {name: part for name, part in state.items() if name != "outer"})


@pytest.fixture
def split():
    if not hasattr(jax.sharding, "auto_axes"):
        pytest.skip("this JAX has no explicit axes by default")
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


@pytest.mark.parametrize("name", [*DTYPES, *FLOAT8])
def test_memory_is_shared(name):
    tensor = torch.arange(2, 8).reshape(2, 3).to(getattr(torch, name))
    array = to_numpy(tensor)
    assert array.dtype == np.dtype(getattr(ml_dtypes, name, name))
    assert array.ctypes.data == tensor.data_ptr()
    if name not in FLOAT8:
        back = to_torch(array)
        assert back.dtype == tensor.dtype
        assert back.data_ptr() == tensor.data_ptr()


def test_public_functions_give_tensors():
    tensor = torch.from_numpy(X.copy())
    q = quantize(tensor, "nvfp4")
    assert all(isinstance(part, torch.Tensor) for part in (q.codes, q.scale, q.outer))
    assert q.zero is None
    assert_same_quantized(q, quantize(X, "nvfp4"))
    assert isinstance(dequantize(q, "bfloat16"), torch.Tensor)
    assert dequantize(q, "bfloat16").dtype == torch.bfloat16
    assert_same_bits(
        decode(encode(tensor, "float8_e5m2"), "float8_e5m2"), decode(encode(X, "float8_e5m2"), "float8_e5m2")
    )


def test_scales_cross_the_bridge():
    tensor = torch.from_numpy(X.copy())
    scales = choose_scales(tensor, "int8_rowwise_asymmetric")
    assert isinstance(scales, Scales)
    assert isinstance(scales.zero, torch.Tensor)
    assert_same_quantized(
        quantize(tensor, "int8_rowwise_asymmetric", scales=scales), quantize(X, "int8_rowwise_asymmetric")
    )
    outer = choose_scales(tensor, "nvfp4").outer
    assert_same_quantized(quantize(tensor, "nvfp4", scales=Scales(outer=outer)), quantize(X, "nvfp4"))


def test_views_parameters_and_gradients():
    tensor = torch.from_numpy(X.copy())
    for view, array in ((tensor.T, X.T), (tensor[::2, ::2], X[::2, ::2]), (tensor[1, 3], X[1, 3])):
        assert_same_bits(encode(view, "float8_e4m3fn"), np.asarray(encode(array, "float8_e4m3fn")))
    parameter = torch.nn.Parameter(tensor)
    codes = encode(parameter, "float8_e4m3fn")
    assert_same_bits(codes, encode(X, "float8_e4m3fn"))
    assert not dequantize(quantize(parameter, "mxfp4")).requires_grad
    negative = torch.complex(tensor, tensor).conj().imag  # a view with the negative bit set
    assert negative.is_neg()
    assert_same_bits(encode(negative, "float8_e4m3fn"), encode(-X, "float8_e4m3fn"))


def test_read_only_results_are_copied():
    array = np.zeros(3, np.float32)
    array.setflags(write=False)
    to_torch(array)[0] = 1
    assert array[0] == 0


def test_other_values_pass_through():
    assert to_numpy("mxfp4") == "mxfp4"
    assert to_torch(3) == 3
    meta = torch.ones(3, device="meta")
    assert to_numpy(meta) is meta
    assert not is_cpu_tensor(meta)
    assert not is_cpu_tensor(X)


def test_tuples_are_converted():
    @bridged
    def pair(x):
        assert isinstance(x, np.ndarray)
        return x, (x + 1, None)

    one, (two, nothing) = pair(torch.ones(2))
    assert isinstance(one, torch.Tensor)
    assert two.tolist() == [2, 2]
    assert nothing is None


def test_wrapped_is_the_function_itself():
    """Other devices take this path; it must give tensors and the same bits without NumPy."""
    tensor = torch.from_numpy(X.copy())
    q = quantize.__wrapped__(tensor, "mxfp4")
    assert isinstance(q.codes, torch.Tensor)
    assert_same_quantized(q, quantize(tensor, "mxfp4"))
    assert quantize.__wrapped__(torch.empty((4, 64), device="meta"), "mxfp4").codes.shape == (4, 64)
