"""Arrays that mean more than their values are refused by every function that takes arrays, before anything is computed."""

import inspect

import numpy as np
import pytest
import torch

import ao_lab
import fast
import reference
from reference.arrays.plain import check_plain

X = np.random.default_rng(0).standard_normal((4, 64), np.float32)
HALF = X.astype(np.float16)
HIDDEN = np.ma.masked_greater(X, 2.5)
VALUES, METADATA = reference.compress(X, "2:4")
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
    "decompress": [
        lambda v: reference.decompress(v, METADATA),
        lambda v: reference.decompress(VALUES, v),
    ],
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
}
#: Functions without arrays; and `dequantize`, whose argument is a container.
WITHOUT = {"random_bits", "packed_shape", "register_jax", "dequantize", "register"}


def test_every_function_is_here():
    functions = {name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))}
    assert functions == CALLS.keys() | (WITHOUT & functions)


@pytest.mark.parametrize("name", CALLS)
def test_masked_arrays_are_refused(name):
    for call in CALLS[name]:
        with pytest.raises(TypeError, match=r"masked array .* use x\.filled"):
            call(HIDDEN)


def test_codes_and_scales_of_a_quantized_may_not_be_masked():
    q = reference.quantize(X, "fp8_rowwise")
    hidden = {name: np.ma.array(getattr(q, name)) for name in ("codes", "scale")}
    for name, part in hidden.items():
        with pytest.raises(TypeError, match="masked"):
            reference.dequantize(reference.Quantized(**{**vars(q), name: part}))


@pytest.mark.parametrize("function", [ao_lab.quantize, reference.quantize])
@pytest.mark.parametrize(
    "x",
    [X.view(np.matrix), [HIDDEN, HIDDEN], [1.0, np.ma.masked], X.astype(object)],
    ids=["matrix", "list of masked", "masked in a list", "object"],
)
def test_others_are_refused(function, x):
    with pytest.raises(TypeError, match=r"np\.asarray|masked|got object"):
        function(x, "fp8_rowwise")


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
        with pytest.raises(TypeError, match=kind):
            call(x, "float8_e4m3fn" if call is library.encode else "fp8_rowwise")
