"""The shim: each operation means the same in NumPy, JAX and torch; arrays that mean more than their values are refused by every
function that takes arrays, before anything is computed."""

import inspect
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import ao_lab
import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference.arrays.namespace import (
    as_array,
    check_plain,
    code_input,
    codes_of,
    float_input,
    int32_of,
    namespace_of,
)
from tests.support.refusals import refused

X = np.random.default_rng(0).standard_normal((4, 64), np.float32)
HALF = X.astype(np.float16)
HIDDEN = np.ma.masked_greater(X, 2.5)
VALUES, METADATA = reference.compress(X, "2:4")
TABLE = reference.quantize(X, "fp8_rowwise")
#: Calls with one operand replaced. A function of arrays that is not here is one of `WITHOUT`.
CALLS = {
    "encode": [lambda v: reference.encode(v, "mxint8")],
    "decode": [lambda v: reference.decode(v, "mxint8")],
    "pack": [lambda v: reference.pack(v, "int4")],
    "unpack": [lambda v: reference.unpack(v, "int4", (4, 128))],
    "quantize": [
        lambda v: reference.quantize(v, "mxfp4"),
        lambda v: reference.quantize(X, "fp8_rowwise", scales=v),
        lambda v: reference.quantize(X, "fp8_rowwise", scales=reference.Scales(v)),
    ],
    "choose_scales": [lambda v: reference.choose_scales(v, "fp8_rowwise")],
    "fake_quantize": [lambda v: reference.fake_quantize(v, "int8_rowwise")],
    "fake_quantize_vjp": [
        lambda v: reference.fake_quantize_vjp(v, X, "int8_rowwise"),
        lambda v: reference.fake_quantize_vjp(X, v, "int8_rowwise"),
    ],
    "quantize_both": [lambda v: reference.quantize_both(v, "fp8_rowwise")],
    "matmul": [
        lambda v: reference.matmul(v, X.T),
        lambda v: reference.matmul(X, v.T),
        lambda v: reference.matmul(X, X.T, bias=v),
    ],
    "matmul_error_bound": [lambda v: reference.matmul_error_bound(v, X.T)],
    "linear": [lambda v: reference.linear(v, reference.quantize(X, "int8_rowwise"))],
    "linear_error_bound": [lambda v: reference.linear_error_bound(v, reference.quantize(X, "int8_rowwise"))],
    "prune": [lambda v: reference.prune(v), lambda v: reference.prune(X, scores=v)],
    "prune_transposable": [lambda v: reference.prune_transposable(v)],
    "compress": [lambda v: reference.compress(v, "2:4"), lambda v: reference.compress(X, v)],
    "compress_transposable": [lambda v: reference.compress_transposable(v)],
    "quantize_compressed": [lambda v: reference.quantize_compressed(v, "fp8_rowwise", "2:4")],
    "decompress": [lambda v: reference.decompress(v, METADATA), lambda v: reference.decompress(VALUES, v)],
    "linear_sparse": [lambda v: reference.linear_sparse(v, VALUES, METADATA)],
    "linear_sparse_error_bound": [lambda v: reference.linear_sparse_error_bound(v, VALUES, METADATA)],
    "linear_sparse_int4": [lambda v: reference.linear_sparse_int4(v, VALUES, METADATA, X)],
    "squared_relu_24": [lambda v: reference.squared_relu_24(v)],
    "sr_ste_gradient": [
        lambda v: reference.sr_ste_gradient(v, X, X > 0),
        lambda v: reference.sr_ste_gradient(X, v, X > 0),
    ],
    "magnitude_scores": [lambda v: reference.magnitude_scores(v)],
    "square_sums": [lambda v: reference.square_sums(v)],
    "wanda_scores": [
        lambda v: reference.wanda_scores(v, X[0]),
        lambda v: reference.wanda_scores(X, v[0] if v.ndim == 2 else v),
    ],
    "ria_scores": [lambda v: reference.ria_scores(v, X[0])],
    "sparsegpt": [
        lambda v: reference.sparsegpt(v, np.eye(64)),
        lambda v: reference.sparsegpt(X, np.ma.array(np.eye(64))),
    ],
    "tile_scales": [lambda v: reference.tile_scales(v)],
    "untile_scales": [lambda v: reference.untile_scales(v, (4, 4))],
    "arrange_metadata": [lambda v: reference.arrange_metadata(v, "cutlass_sm80_8bit")],
    "restore_metadata": [lambda v: reference.restore_metadata(v, "cutlass_sm80_8bit", (4, 8))],
    "rms_norm": [
        lambda v: reference.rms_norm(v, X[0], eps=1e-6),
        lambda v: reference.rms_norm(X, v, eps=1e-6),
    ],
    "rms_norm_quantize": [lambda v: reference.rms_norm_quantize(v, X[0], "fp8_rowwise", eps=1e-6)],
    "swiglu": [lambda v: reference.swiglu(v, X), lambda v: reference.swiglu(HALF, v)],
    "swiglu_quantize": [lambda v: reference.swiglu_quantize(v, X, "fp8_rowwise")],
    "training_linear": [
        lambda v: reference.training_linear(v, X, "rowwise"),
        lambda v: reference.training_linear(X, v, "rowwise"),
        lambda v: reference.training_linear(X, X, "rowwise", v[0, :4]),
    ],
    "training_linear_vjp": [lambda v: reference.training_linear_vjp(v, X, X, "rowwise")],
    "grouped_linear": [
        lambda v: reference.grouped_linear(v, X[None], [4], "rowwise"),
        lambda v: reference.grouped_linear(X, v[None], [4], "rowwise"),
        lambda v: reference.grouped_linear(X, X[None], np.ma.array([4]), "rowwise"),
    ],
    "grouped_linear_vjp": [lambda v: reference.grouped_linear_vjp(v, X, X[None], [4], "rowwise")],
    "block_norm": [
        lambda v: reference.block_norm(v, X[0], block=64),
        lambda v: reference.block_norm(X, v[0], block=64),
    ],
    "layer_norm_quantize": [
        lambda v: reference.layer_norm_quantize(v, X[0], "fp8_rowwise"),
        lambda v: reference.layer_norm_quantize(X, v[0], "fp8_rowwise"),
        lambda v: reference.layer_norm_quantize(X, X[0], "fp8_rowwise", bias=v[0]),
    ],
    "linear_block_norm": [lambda v: reference.linear_block_norm(TABLE, TABLE, v[0, :4], block=4)],
    "embedding_bag": [
        lambda v: reference.embedding_bag(TABLE, np.arange(4), np.array([0]), v[0, :4]),
        lambda v: reference.embedding_bag(TABLE, np.ma.array(np.arange(4)), np.array([0])),
    ],
}
#: Functions without arrays; and `dequantize`, whose argument is a container.
WITHOUT = {"random_bits", "packed_shape", "register_jax", "dequantize", "register"}


def test_every_function_is_here():
    functions = {name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))}
    # Those of calibration take NumPy arrays of floats alone: tests/reference/calibration.
    functions -= {n for n in functions if "calibration" in inspect.getmodule(getattr(reference, n)).__name__}
    assert functions == CALLS.keys() | (WITHOUT & functions)


@pytest.mark.parametrize("name", CALLS)
def test_masked_arrays_are_refused(name):
    for call in CALLS[name]:
        refused(TypeError, r"masked array .* use x\.filled", call, HIDDEN)


def test_codes_and_scales_of_a_quantized_may_not_be_masked():
    q = reference.quantize(X, "fp8_rowwise")
    hidden = {name: np.ma.array(getattr(q, name)) for name in ("codes", "scale")}
    for name, part in hidden.items():
        refused(TypeError, "masked", reference.dequantize, reference.Quantized(**{**vars(q), name: part}))


@pytest.mark.parametrize("function", [ao_lab.quantize, reference.quantize])
@pytest.mark.parametrize(
    "x",
    [X.view(np.matrix), [HIDDEN, HIDDEN], [1.0, np.ma.masked], X.astype(object)],
    ids=["matrix", "list of masked", "masked in a list", "object"],
)
def test_others_are_refused(function, x):
    refused(TypeError, r"np\.asarray|masked|got object", function, x, "fp8_rowwise")


def test_ordinary_arrays_pass(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    for x in (X, mapped, X[::2], X.T, np.float32(1), 1.0, [[1.0, 2.0]]):
        check_plain(x)
    for x in (mapped, X.view(np.recarray)):
        q = reference.quantize(x, "mxfp4")
        assert type(q.codes) is np.ndarray
        np.testing.assert_array_equal(q.codes, reference.quantize(X, "mxfp4").codes)


TENSORS = {
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "sparse_coo": lambda x: x.to_sparse(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("library", [reference, fast, ao_lab])
def test_tensors_that_are_not_dense_are_refused(library, kind):
    x = TENSORS[kind](torch.from_numpy(X))
    for call in (library.encode, library.quantize, library.fake_quantize):
        refused(TypeError, kind, call, x, "float8_e4m3fn" if call is library.encode else "fp8_rowwise")


MAKE = {"numpy": np.asarray, "jax": jnp.asarray, "torch": lambda x: torch.from_numpy(np.array(x))}
INTEGERS = np.array([[5, -7, 0], [2**31 - 1, -(2**31), 3]], np.int32)


@pytest.fixture(params=MAKE)
def library(request):
    return request.param


def same(got, want, library):
    assert namespace_of(got).name == library
    assert_same_bits(got, want)


def test_namespaces(library):
    x = MAKE[library](INTEGERS)
    ns = namespace_of(x)
    assert ns.name == library
    assert namespace_of(x) is ns
    assert ns.ieee == (library != "jax")
    assert (ns.dtype_name(x), ns.shape(x)) == ("int32", (2, 3))


def test_operations(library):
    make = MAKE[library]
    x, ns = make(INTEGERS), namespace_of(make(INTEGERS))
    same(ns.where(x < 0, 1, 2), np.where(INTEGERS < 0, 1, 2).astype(np.int32), library)
    same(ns.where(x < 0, x, 2), np.where(INTEGERS < 0, INTEGERS, 2).astype(np.int32), library)
    same(ns.minimum(x, 1), np.minimum(INTEGERS, 1), library)
    same(ns.maximum(x, x + 1), np.maximum(INTEGERS, INTEGERS + 1), library)
    same(ns.reduce_max(x, -1), INTEGERS.max(-1, keepdims=True), library)
    same(ns.reduce_min(x, 0), INTEGERS.min(0, keepdims=True), library)
    same(ns.concatenate([x, x], 1), np.concatenate([INTEGERS, INTEGERS], 1), library)
    same(ns.stack([x, x], 0), np.stack([INTEGERS, INTEGERS]), library)
    same(ns.moveaxis(x, 0, 1), INTEGERS.T, library)
    same(ns.broadcast_to(x[:1], (2, 3)), np.broadcast_to(INTEGERS[:1], (2, 3)), library)
    same(ns.full((2,), 7, "int32", x), np.full(2, 7, np.int32), library)
    same(ns.arange(4, x), np.arange(4, dtype=np.int32), library)
    same(x >> 3, INTEGERS >> 3, library)
    same(x << 3, INTEGERS << 3, library)


def test_tables(library):
    make = MAKE[library]
    index = np.array([[2, 0], [1, 2]], np.int32)
    ns = namespace_of(make(index))
    table = np.array([10, 20, 30], np.int32)
    table.setflags(write=False)
    same(ns.take(ns.constant(table, make(index)), make(index)), table[index], library)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_combine_pairs(library, count):
    """Adjacent pairs, in order: the operation need not commute."""
    values = np.arange(1, count + 1, dtype=np.int32)
    want = values
    while len(want) > 1:
        want = want[0::2] * 3 - want[1::2]
    x = MAKE[library](values)
    same(namespace_of(x).combine_pairs(x, lambda a, b: a * 3 - b), want, library)


def test_bitcasts_and_casts(library):
    bits = fill("bits", (4, 6)).view(np.int32)
    x = MAKE[library](bits)
    ns = namespace_of(x)
    same(ns.bitcast(x, "float32"), bits.view(np.float32), library)
    same(ns.bitcast(ns.bitcast(x, "float32"), "int32"), bits, library)
    same(ns.astype(MAKE[library](INTEGERS), "uint8"), INTEGERS.astype(np.uint8), library)
    same(
        ns.astype(MAKE[library](INTEGERS & 0xFFFFFF), "float32"),
        (INTEGERS & 0xFFFFFF).astype(np.float32),
        library,
    )


@pytest.mark.parametrize(("bits", "dtype"), [(4, np.uint8), (8, np.uint8), (16, np.uint16)])
def test_codes(library, bits, dtype):
    codes = np.arange(1 << bits, dtype=np.int32)
    x = MAKE[library](codes)
    kept = codes_of(namespace_of(x), x, bits)
    same(kept, codes.astype(dtype), library)
    same(int32_of(namespace_of(kept), kept), codes, library)
    assert code_input(kept, "decode")[0].name == library


def test_strides_do_not_matter_to_a_bitcast():
    x = fill("bits", (6, 8))[::-2, ::3]
    assert_same_bits(namespace_of(x).bitcast(x, "int32"), np.ascontiguousarray(x).view(np.int32))
    zero_d = np.asarray(np.float32(1))
    assert namespace_of(zero_d).bitcast(zero_d, "int32").shape == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_float_input(library, dtype):
    if library == "jax" and dtype == "float64":
        pytest.skip("JAX without x64 has no float64")
    x = np.ones(3, getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    result = torch.ones(3, dtype=getattr(torch, dtype)) if library == "torch" else MAKE[library](x)
    ns, same_array, name = float_input(result, "test")
    assert (ns.name, name) == (library, dtype)
    assert same_array is result


@pytest.mark.parametrize("wrong", [1, True, [1, 2], np.int8(3), 1j, np.uint8([1])])
def test_float_input_refuses(wrong):
    with pytest.raises(
        TypeError, match=r"rotate takes float32, bfloat16, float16 or float64, got .* of shape"
    ):
        float_input(wrong, "rotate")


def test_numbers_and_lists_are_numpy():
    assert float_input(1.5, "test")[2] == "float64"
    assert as_array([[1.0, 2.0]]).shape == (1, 2)
    with pytest.raises(TypeError, match=r"decode takes codes as uint8 or uint16, got int64 of shape \(1,\)"):
        code_input([1], "decode")


def test_numpy_alone_imports_neither_library():
    code = (
        "import sys, numpy, reference; reference.dequantize(reference.quantize(numpy.ones((2, 32), 'float32'), 'mxfp4'));"
        "assert not {'jax', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["mxfp4", "nf4", "torchao.mxfp8_e4m3_rceil"])
def test_tables_are_kept_once(name):
    """Two calls as torch operations leave as many tables behind as one."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    ns = namespace_of(x)
    counts = []
    for _ in range(3):
        inspect.unwrap(reference.dequantize)(inspect.unwrap(reference.quantize)(x, name), "float32")
        counts.append(len(ns.tables))
    assert counts[0] > 0
    assert counts == counts[:1] * 3


def test_tables_of_transformed_programs_are_not_kept():
    """What stands for a tensor while a function is transformed or traced must not come back afterwards."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    wanted = reference.quantize(x, "mxfp4").codes
    namespace_of(x).tables.clear()
    plain = inspect.unwrap(reference.quantize)
    torch.func.functionalize(lambda t: plain(t, "mxfp4").codes)(x)
    with torch._subclasses.FakeTensorMode() as mode:
        plain(mode.from_tensor(x), "mxfp4")
    assert torch.equal(plain(x, "mxfp4").codes, wanted)
    assert all(type(table) is torch.Tensor for _, table in namespace_of(x).tables.values())
    with torch._subclasses.FakeTensorMode() as mode:
        assert plain(mode.from_tensor(x), "mxfp4").codes.shape == wanted.shape
