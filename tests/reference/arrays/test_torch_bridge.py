"""CPU tensors share memory with NumPy on the way in and out; others keep to torch's namespace."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import Scales, choose_scales, decode, dequantize, encode, quantize
from reference.arrays.torch_bridge import bridged, is_cpu_tensor, to_numpy, to_torch

X = fill("normals", (4, 64))
DTYPES = ["float32", "float16", "float64", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


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
