"""Weights of models of flax: the reference's bits of the transposed kernel, layers that take them as they are, the report."""

import pickle

import numpy as np
import pytest

import ao_lab
import reference
from ao_lab.testing.strategies import assert_same_bits

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

from flax import nnx, serialization  # noqa: E402  flax is optional

from ao_lab.jax import (  # noqa: E402
    Axes,
    dequantize_params,
    fake_quantize_params,
    quantize_,
    quantize_params,
)
from ao_lab.jax.selection import guessed_axes  # noqa: E402

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 64)), jnp.float32)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tree_of(**arrays):
    """A tree of layers with kernels."""
    return {name: {"kernel": one} for name, one in arrays.items()}


class Model(nn.Module):
    """A convolution that groups of 32 do not divide, a table, attention, a norm with statistics, a head."""

    @nn.compact
    def __call__(self, tokens, image):
        x = nn.Embed(10, 64)(tokens) + nn.Conv(64, (3, 3), use_bias=False)(image).mean((1, 2))[:, None]
        x = x + nn.MultiHeadDotProductAttention(4)(x, x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(32, dtype="bfloat16")(x)


@pytest.fixture(scope="module")
def linen():
    """The model, its inputs, its variables."""
    model, inputs = Model(), (jnp.arange(6).reshape(2, 3), jnp.asarray(array(2, 4, 4, 3)))
    return model, inputs, jax.jit(model.init)(jax.random.key(0), *inputs)


@pytest.mark.parametrize("name", ["int4_g32_asymmetric", "nf4"])
def test_codes_are_those_of_the_transposed_kernel(name):
    """Of a matrix, a convolution, heads and what joins them, and a stack, each layer for itself."""
    kernels = {
        "dense": array(64, 3),
        "conv": array(3, 3, 32, 3),
        "stack": array(2, 64, 3),
        "heads": array(64, 2, 3),
    }
    axes = {"conv.kernel": Axes(3, 1), "heads.kernel": Axes(1, 2)}
    made, _ = quantize_params(tree_of(**kernels), name, lambda _, name: axes.get(name, True))
    for layer in ("dense", "conv", "heads"):
        matrix = kernels[layer].reshape(-1, 3) if layer == "conv" else kernels[layer].reshape(64, -1)
        q = reference.quantize(np.ascontiguousarray(matrix.T), name, packed=True)
        assert_same_bits(made[layer]["kernel"].quantized, q)
        dense = reference.dequantize(q).T.reshape(kernels[layer].shape)
        assert_same_bits(made[layer]["kernel"].dequantize(), dense)
    stack = made["stack"]["kernel"]
    second = jax.tree.map(lambda leaf: leaf[1], stack)
    assert_same_bits(second.quantized, reference.quantize(kernels["stack"][1].T.copy(), name, packed=True))
    assert_same_bits(stack[1], second.dequantize())
    assert (second.shape, stack.shape) == ((64, 3), (2, 64, 3))


def test_a_table_has_blocks_along_features():
    table = array(6, 64)
    made, report = quantize_params({"embedding": table}, "int4_g32", lambda *_: True)
    assert_same_bits(made["embedding"].quantized, reference.quantize(table, "int4_g32", packed=True))
    assert report.layers[0].read == "6 rows of 64"


def test_linen_takes_the_tree(linen):
    """As it takes the arrays that it stands for, eagerly and in a program, with statistics that are written."""
    model, inputs, variables = linen
    small, report = quantize_params(variables, "int4_g32")
    dense = dequantize_params(small)
    apply = jax.jit(lambda v, *x: model.apply(v, *x, mutable=["batch_stats"]))
    y, written = apply(small, *inputs)
    want, _ = apply(dense, *inputs)
    assert y.dtype == jnp.bfloat16
    assert jnp.allclose(y, want, atol=1e-2)
    assert set(written) == {"batch_stats"}
    slope = jax.grad(lambda image: model.apply(small, inputs[0], image, mutable=True)[0].sum())(inputs[1])
    assert jnp.isfinite(slope).all()
    assert slope.any()
    left = {one.name: one.reason for one in report.left}
    assert "use one scale per row" in left.pop("params.Conv_0.kernel")
    assert left == {"params.Embed_0.embedding": "an embedding, left without a filter_fn that selects it"}
    assert "left (10 x 64): an embedding" in str(report)
    read = {
        one.name.removeprefix("params.MultiHeadDotProductAttention_0."): one.read for one in report.changed
    }
    assert (read["query.kernel"], read["out.kernel"]) == ("64 -> 4 x 16", "4 x 16 -> 64")


def test_bytes_of_a_report_are_those_of_the_tree(linen):
    _, _, variables = linen
    small, report = quantize_params(variables, "int8_rowwise")
    wide = [leaf for leaf in jax.tree.leaves(variables) if leaf.ndim > 1]
    biases = sum(leaf.nbytes for leaf in wide if leaf.shape == (4, 16))
    assert report.dense_bytes == sum(leaf.nbytes for leaf in wide) - biases
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(variables)) - sum(
        leaf.nbytes for leaf in jax.tree.leaves(small)
    )
    assert report.dense_bytes - report.bytes == saved > 0


class Block(nn.Module):
    """A layer that `nn.scan` stacks."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64)(nn.tanh(x)), None


def test_stacked_layers_dequantize_their_own():
    """nvfp4 has a scale of the whole tensor: each layer has one, in `nn.scan` and under vmap."""
    model = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    params = model.init(jax.random.key(0), X, None)
    small, report = quantize_params(params, "nvfp4")
    assert small["params"]["Dense_0"]["kernel"].quantized.outer.shape == (3,)
    assert "3 of 64 -> 64" in str(report)
    y, _ = jax.jit(model.apply)(small, X, None)
    assert_same_bits(y, jax.jit(model.apply)(dequantize_params(small), X, None)[0])
    rows = jax.jit(jax.vmap(lambda row: model.apply(small, row, None)[0]))(X)
    assert jnp.allclose(rows, y, atol=1e-5)


def test_boxes_of_linen_stay():
    """A kernel with names of its axes is quantized inside of its box."""
    layer = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("in", "out")))
    params = layer.init(jax.random.key(0), X)
    small, report = quantize_params(params, "int8_rowwise")
    assert [one.name for one in report.changed] == ["params.kernel"]
    assert isinstance(small["params"]["kernel"], nn.Partitioned)
    assert jnp.allclose(layer.apply(small, X), layer.apply(params, X), atol=1e-5)


def test_files_keep_it():
    """flax's bytes into a target without values, and pickle."""
    params = tree_of(layer=array(64, 8))
    small, _ = quantize_params(params, ao_lab.Int4WeightOnlyConfig(group_size=32))
    target = jax.eval_shape(
        lambda p: quantize_params(p, ao_lab.Int4WeightOnlyConfig(group_size=32))[0], params
    )
    read = serialization.from_bytes(target, serialization.to_bytes(small))
    assert_same_bits(read["layer"]["kernel"].dequantize(), small["layer"]["kernel"].dequantize())
    again = pickle.loads(pickle.dumps(small))["layer"]["kernel"]
    assert_same_bits(again.dequantize("bfloat16"), small["layer"]["kernel"].dequantize("bfloat16"))
    other = jax.eval_shape(lambda p: quantize_params(p, "int4_g64")[0], params)
    with pytest.raises(ValueError, match="quantized in the same way"):
        serialization.from_bytes(other, serialization.to_bytes(small))


def test_training_rounds_to_what_is_stored():
    """`fake_quantize_params` has the values of `quantize_params`, and gradients straight through."""
    params = {"layer": {"kernel": jnp.asarray(array(64, 8)), "bias": jnp.ones(8)}}
    small, _ = quantize_params(params, "int4_g32")
    fake = fake_quantize_params(params, "int4_g32")
    assert_same_bits(fake["layer"]["kernel"], small["layer"]["kernel"].dequantize())
    assert fake["layer"]["bias"] is params["layer"]["bias"]
    slope = jax.grad(lambda p: (3 * fake_quantize_params(p, "int4_g32")["layer"]["kernel"]).sum())(params)
    assert (slope["layer"]["kernel"] == 3).all()


SHAPES = {
    "q.query.kernel": (64, 4, 16), "q.query.bias": (4, 16), "q.out.kernel": (4, 16, 64), "q.out.bias": (64,),
    "p.query.kernel": (64, 4, 16), "p.out.kernel": (4, 16, 64),
    "s.query.kernel": (3, 64, 32), "s.query.bias": (3, 32), "t.query.kernel": (3, 64, 32), "t.out.kernel": (3, 32, 64),
    "Conv_0.kernel": (3, 3, 8, 16), "own.kernel": (3, 3, 8, 16), "own.bias": (16,), "scan.kernel": (2, 3, 3, 8, 16),
    "scan.bias": (2, 16), "bare.kernel": (2, 8, 16), "embedding": (9, 8),
    "same.query.kernel": (4, 4, 16), "same.query.bias": (4, 16), "same.dense.kernel": (4, 4, 16), "same.dense.bias": (4, 16),
}  # fmt: skip
READ = {
    "q.query.kernel": Axes(1, 2), "q.out.kernel": Axes(2, 1), "p.query.kernel": Axes(1, 2), "p.out.kernel": Axes(2, 1),
    "s.query.kernel": Axes(1, 1), "t.query.kernel": Axes(1, 1), "t.out.kernel": Axes(1, 1), "Conv_0.kernel": Axes(3, 1),
    "own.kernel": Axes(3, 1), "scan.kernel": Axes(3, 1), "bare.kernel": Axes(1, 1), "embedding": Axes(0, 2),
    "same.query.kernel": Axes(1, 2), "same.dense.kernel": Axes(1, 1),
}  # fmt: skip


def test_inputs_are_found_by_bias_and_name():
    """Heads, convolutions, stacks of each, with a bias and without; "query" is no name of heads where shapes say otherwise."""
    assert {name: guessed_axes(name, SHAPES) for name in READ} == READ


@pytest.mark.parametrize(
    ("config", "filter_fn", "message"),
    [
        ("int8_rowise", None, "the nearest are int8_rowwise"),
        (ao_lab.Int8WeightOnlyConfig, None, r"call it: Int8WeightOnlyConfig\(\)"),
        (ao_lab.Int8DynamicActivationInt8WeightConfig(), None, "quantizes inputs too .* or DotGeneral"),
        (ao_lab.QATConfig(ao_lab.Int8WeightOnlyConfig()), None, "fake_quantize_params trains"),
        (ao_lab.FqnToConfig({}), None, "call it for each"),
        (ao_lab.Int8WeightOnlyConfig(kernel="int8"), None, "leave these out"),
        ("int4_g64", None, "groups of 64 divide the inputs of no layer .32.; use group_size=32"),
        ("int8_rowwise", lambda *_: False, "a.kernel  refused by filter_fn"),
        ("int8_rowwise", 3, "filter_fn is a function"),
        ("int8_rowwise", lambda *_: Axes(2, 1), r"3 axes, a.kernel has shape \(32, 8\)"),
    ],
)
def test_wrong_input_is_refused(config, filter_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_params(tree_of(a=array(32, 8)), config, filter_fn)


def test_what_is_told_of_few_divided_kernels_and_of_filters():
    with pytest.warns(UserWarning, match="2 of 3 layers stay unquantized: groups of 64"):
        quantize_params(tree_of(a=array(32, 8), b=array(96, 8), c=array(64, 8)), "int4_g64")
    with pytest.raises(TypeError) as error:
        quantize_params(tree_of(a=array(32, 8)), "int8_rowwise", lambda name: True)
    assert "filter_fn(array, name)" in error.value.__notes__[0]
    with pytest.raises(ValueError, match=r"a table \(rows, features\) Axes\(0, 2\)"):
        Axes(1, 0)
    with pytest.raises(TypeError, match="models of torch to ao_lab"):
        quantize_({"a": X}, "int8_rowwise")


class Net(nnx.Module):
    """Of each kind one module; two layers share a kernel."""

    def __init__(self, rngs):
        self.table = nnx.Embed(10, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.layers[1].kernel = self.layers[0].kernel
        self.convolution = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        self.back = nnx.ConvTranspose(64, 3, (3, 3), transpose_kernel=True, rngs=rngs)

    def __call__(self, tokens, image):
        x = self.attention(self.table(tokens)) + self.convolution(image).mean((1, 2))[:, None]
        for layer in self.layers:
            x = layer(x)
        return x


def test_nnx_in_place():
    """Modules run as before, eagerly and compiled; gradients are those of what stayed; what is shared stays shared."""
    net = Net(nnx.Rngs(0))
    inputs = jnp.arange(6).reshape(2, 3), jnp.asarray(array(2, 4, 4, 3))
    kernel, before = np.asarray(net.layers[0].kernel[...]), net(*inputs)
    report = quantize_(net, "int4_g32")
    q = reference.quantize(np.ascontiguousarray(kernel.T), "int4_g32", packed=True)
    assert_same_bits(net.layers[0].kernel.get_value().quantized, q)
    assert net.layers[1].kernel is net.layers[0].kernel
    y = nnx.jit(lambda net, *x: net(*x))(net, *inputs)
    assert jnp.allclose(net(*inputs), y, atol=1e-5)
    assert 0 < jnp.abs(y - before).max() < 0.5
    graph, state = nnx.split(net)
    assert_same_bits(jax.jit(lambda state: nnx.merge(graph, state)(*inputs))(state), y)
    slopes = nnx.grad(lambda net: net(*inputs).sum())(net)
    assert set(slopes["layers"][0]) == {"bias"}
    assert set(slopes["convolution"]) == {"bias", "kernel"}
    assert {one.name for one in report.left} == {"table.embedding", "convolution.kernel", "back.kernel"}
    assert (
        quantize_(net, "int8_rowwise", lambda module, name: name == "table").changed[-1].read
        == "10 rows of 64"
    )
    with pytest.raises(ValueError, match="transpose_kernel"):
        quantize_(net, "int8_rowwise", lambda module, name: name == "back")


def test_nnx_layers_in_a_stack():
    """Made by nnx.vmap, run by nnx.scan."""
    made = nnx.vmap(lambda key: nnx.Linear(64, 64, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    kernels = np.asarray(made.kernel[...])
    assert quantize_(made, "nvfp4").changed[0].read == "3 of 64 -> 64"
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    want = X
    for kernel in kernels:
        want = want @ reference.dequantize(reference.quantize(np.ascontiguousarray(kernel.T), "nvfp4")).T
    assert jnp.allclose(nnx.jit(run)(X, made), want, atol=1e-4)
