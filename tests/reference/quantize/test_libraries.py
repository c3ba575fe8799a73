"""Every scheme has the same bits in NumPy, torch and JAX: eager, jit and vmap.

NumPy is the yardstick; that its bits are right is the business of the other tests. torch is asked twice: through the public
function, where CPU tensors share NumPy's path, and through `__wrapped__`, the torch namespace, the path of CUDA tensors. In JAX
schemes run under jit (float32) and under vmap (bfloat16). Public functions on concrete arrays compile the same programs
(`reference.arrays.bridges`), and `__wrapped__` runs them step by step: these are asked for schemes of every kind of block.
`tests.support.record_samples` says which records stand for the others, which `make nightly` adds.
Inputs are random bit patterns, normals, subnormals, the largest floats and arrays where a few elements are NaN or infinite,
so that most blocks stay finite. XLA's hazards (flushed subnormals, reciprocal division, contracted products) depend on the
compiler's default settings, so nothing is switched off here.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import SCHEMES
from tests.support.bits import tensor_of
from tests.support.record_samples import (
    FIELDS,
    KINDS,
    NAMES,
    STRUCTURES,
    covering,
    kinds_of,
    sampled,
    values_of,
)

SHAPE = (16, 256)  # divided by every block; torchao's NF4 asks for 16384 elements
LARGE = (64, 256)
# Compiling is what takes time here: a program that dequantizes once takes three quarters of one that does so twice.
BOTH, WIDE, NARROW = ("float32", "bfloat16"), ("float32",), ("bfloat16",)
AXIS_SHAPES = {0: (256, 2, 32), 1: (2, 256, 32), -1: (2, 32, 256)}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def shape_for(name):
    return LARGE if name == "torchao.nf4" else SHAPE


def sparse(x, seed):
    """A few elements replaced by NaN or infinity."""
    rng = np.random.default_rng(seed)
    specials = fill("specials", x.shape, dtype=str(x.dtype), seed=seed)
    return np.where(rng.random(x.shape) < 0.003, specials, x)


def rows_mixed(shape, dtype, seed):
    """Finite rows of every magnitude: zeros, subnormals, ties, tiny, the largest floats."""
    kinds = ("zeros", "subnormals", "near_ties", "normals", "wide", "ties", "largest")
    rows = [fill(kinds[i % 7], shape[1:], dtype=dtype, seed=seed + i) for i in range(shape[0])]
    return np.stack(rows)


def inputs(shape, dtype="float32", seed=0):
    """Named arrays; each separate, because one NaN reaches everything where one scale serves the whole tensor."""
    normals = fill("normals", shape, dtype=dtype, seed=seed)
    scaled = (normals.astype(np.float32) * np.float32(2.0**-9)).astype(normals.dtype)
    return {
        "bits": fill("bits", shape, dtype=dtype, seed=seed),
        "normals": normals,
        "small": scaled,
        "wide": fill("wide", shape, dtype=dtype, seed=seed),
        "subnormals": fill("subnormals", shape, dtype=dtype, seed=seed),
        "mixed": rows_mixed(shape, dtype, seed),
        "sparse": sparse(normals, seed),
        "sparse_wide": sparse(fill("wide", shape, dtype=dtype, seed=seed + 1), seed),
        "zeros": fill("zeros", shape, dtype=dtype, seed=seed),
    }


def both(x, scheme, axis=-1, outputs=BOTH):
    """Codes and scales, and what they stand for."""
    q = reference.quantize(x, scheme, axis=axis)
    return q, *(reference.dequantize(q, output) for output in outputs)


def both_native(x, scheme, axis=-1, outputs=BOTH):
    """The torch namespace, which CUDA tensors use; for JAX, its steps one by one."""
    q = reference.quantize.__wrapped__(x, scheme, axis=axis)
    return q, *(reference.dequantize.__wrapped__(q, output) for output in outputs)


def assert_same(actual, expected, x):
    assert_same_quantized(actual[0], expected[0], inputs=x)
    assert_same_bits(actual[1:], expected[1:], inputs=x)


def check(function, name, dtype, axis=-1, shape=None, convert=jnp.asarray, seed=0, kinds=None, outputs=BOTH):
    arrays = inputs(shape or shape_for(name), dtype, seed)
    for kind, x in ((kind, arrays[kind]) for kind in kinds or arrays):
        expected = both(x, SCHEMES[name], axis, outputs)
        try:
            assert_same(function(convert(x)), expected, x)
        except AssertionError as error:
            raise AssertionError(f"{name}, {dtype}, axis {axis}, {kind}: {error}") from None


def needs_dtype(name):
    """Whether the record reads the input's dtype, so that bfloat16 and float16 are rules of their own."""
    record = SCHEMES[name]
    parts = [record.scale, *([record.outer] if record.outer else [])]
    floors = [part.floor[1] for part in parts if part.floor]
    return record.arithmetic == "input" or "tiny" in floors or any(part.compute == "input" for part in parts)


INPUT_DTYPE_NAMES = [name for name in NAMES if needs_dtype(name)]
# Every block there is, of every size; those of KINDS stand for the others.
BLOCKS = sorted(
    {*KINDS, *covering(lambda name: frozenset({(SCHEMES[name].scale.block, SCHEMES[name].outer is None)}))}
)
GIVEN_NAMES = [name for name in NAMES if SCHEMES[name].codes_from == "stored"]


@pytest.mark.parametrize("name", sampled(STRUCTURES))
def test_torch(name):
    for dtype in DTYPES if needs_dtype(name) else ["float32"]:
        check(lambda x: both_native(x, name), name, dtype, convert=tensor_of)


@pytest.mark.parametrize("name", sampled(STRUCTURES))
def test_torch_on_cpu(name):
    """The public functions: tensors share NumPy's memory and path."""
    for dtype in DTYPES:
        check(lambda x: both(x, name), name, dtype, convert=tensor_of, kinds=("bits", "sparse"))


@pytest.mark.parametrize("name", sampled(STRUCTURES))
def test_torch_on_any_axis(name):
    for axis, shape in AXIS_SHAPES.items():
        native = lambda x, axis=axis: both_native(x, name, axis)  # noqa: E731
        check(native, name, "bfloat16", axis, shape, tensor_of, 1, ("bits", "mixed", "sparse"))


# By day, under vmap, under jit in float16 and under jit: each is compiled whole, and together they have every value of every
# field and every element, but for torchao's NF4, which takes three seconds. With those of the night they are every record, each
# way.
MAPPED = {"compressed_tensors.mxfp4", "torchao.int8_tensorwise_asymmetric"}
IN_FLOAT16 = set(covering(values_of, INPUT_DTYPE_NAMES)) - {"torchao.nf4"}
IN_FLOAT32 = {*FIELDS, *KINDS} - MAPPED - IN_FLOAT16 - {"torchao.nf4"}


def test_every_value_of_every_field_is_compiled_by_day():
    assert set(FIELDS) - {"torchao.nf4"} <= MAPPED | IN_FLOAT32 | IN_FLOAT16


@pytest.mark.parametrize("name", sampled(IN_FLOAT32))
def test_jax_jit(name):
    check(jax.jit(lambda x: both(x, name, outputs=WIDE)), name, "float32", outputs=WIDE)


# Of what public functions compile by day: shifts and zero points. They are the programs of `test_jax_jit`.
CONCRETE = {"compressed_tensors.mxfp4", "torchao.int4_g128_tinygemm"}


@pytest.mark.parametrize("name", sampled(CONCRETE, BLOCKS))
def test_jax_on_concrete_arrays(name):
    """The public functions, which compile the same program; and `choose_scales`."""
    check(lambda x: both(x, name), name, "float32")
    x = inputs(shape_for(name))["sparse"]
    assert_same_bits(reference.choose_scales(jnp.asarray(x), name), reference.choose_scales(x, name))


# Of what runs step by step by day: shifts. Under jit all kinds run by day.
STEPWISE = {"compressed_tensors.mxfp4"}


@pytest.mark.parametrize("name", sampled(STEPWISE, BLOCKS))
def test_jax_eager(name):
    """Step by step, no fusion: of nf4 the longest step, a loop over its scales, is one program here too."""
    check(lambda x: both_native(x, name), name, "float32")


@pytest.mark.parametrize("name", sampled(MAPPED))
def test_jax_vmap(name):
    """A batch in one call equals its members one by one, bit for bit; bfloat16. (torchao's NF4 stands beside nf4 here, and
    in float16 below.)"""
    members = list(inputs(shape_for(name), "bfloat16", seed=2).values())
    batched = jax.jit(jax.vmap(lambda x: both(x, name, outputs=NARROW)))(jnp.stack(members))
    for i, x in enumerate(members):
        one = jax.tree.map(lambda array, i=i: array[i], batched)
        assert_same(one, both(x, SCHEMES[name], outputs=NARROW), x)


@pytest.mark.parametrize("name", sampled(IN_FLOAT16, INPUT_DTYPE_NAMES))
def test_jax_jit_float16(name):
    check(jax.jit(lambda x: both(x, name, outputs=WIDE)), name, "float16", outputs=WIDE)


# Blocks of the whole or the flattened tensor know no axis.
# By day two kinds down the first axis, and one along the one between.
DOWN = [name for name in KINDS if not isinstance(SCHEMES[name].scale.block, str)][:2]


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param(
            name, axis, marks=[pytest.mark.nightly] * (name not in (DOWN if axis == 0 else DOWN[:1]))
        )
        for name in BLOCKS
        for axis in (0, 1)
    ],
)
def test_jax_jit_on_any_axis(name, axis):
    function = jax.jit(lambda x: both(x, name, axis, outputs=WIDE))
    check(function, name, "float32", axis, AXIS_SHAPES[axis], seed=1, outputs=WIDE)


@pytest.mark.parametrize("name", sampled(covering(kinds_of, GIVEN_NAMES), GIVEN_NAMES))
def test_jax_given_scales(name):
    """Scales that were chosen before give the same codes again, through jit's boundary."""
    x = inputs(shape_for(name))["sparse"]
    scales = reference.choose_scales(x, name)
    q = jax.jit(lambda x, scales: reference.quantize(x, name, scales=scales))(x, scales)
    assert_same_quantized(q, reference.quantize(x, name), inputs=x)
