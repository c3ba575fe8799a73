"""Addresses, sizes, storages and arrays of quantized weights, as other libraries ask for them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ao_lab import QuantizedTensor, quantized
from tests.support.quantized_weights import pair, same, weight


def weights():
    return quantized(weight(32, 64), "int4_g32_asymmetric"), pair("int8_rowwise", 32, 64)[0]


def test_addresses_tell_weights_apart():
    """accelerate takes weights of one address for tied ones."""
    t, other = weights()
    assert 0 not in {t.data_ptr(), other.data_ptr()}
    assert t.data_ptr() not in {other.data_ptr(), t.clone().data_ptr(), copy.deepcopy(t).data_ptr()}
    assert t.data_ptr() == t.detach().data_ptr() == t.t().data_ptr() == nn.Parameter(t, False).data_ptr()
    assert t.to("meta").data_ptr() == 0


def test_bytes_are_those_stored():
    for t in weights():
        assert (
            t.nbytes
            == sum(part.nbytes for part in t.parts.values() if part is not None)
            < 32 * 64 * t.element_size()
        )


def test_there_is_no_storage_and_no_array():
    from safetensors.torch import save

    for t in weights():
        for ask in (t.storage, lambda t=t: save({"weight": t})):
            with pytest.raises(ValueError, match=r"several tensors, .* safe_serialization=False"):
                ask()
        for ask in (t.numpy, lambda t=t: np.asarray(t), lambda t=t: t.bfloat16().view(torch.int16)):
            with pytest.raises(TypeError, match=r"is no NumPy array, .* dequantize\(\) gives its values"):
                ask()


def test_reshape_copies_where_there_is_no_view():
    for t in weights():
        dense = t.dequantize()
        made = t.reshape(8, 4, 16, 4)
        assert type(made) is torch.Tensor
        assert same(made, dense.reshape(8, 4, 16, 4))
        assert isinstance(t.reshape(-1), QuantizedTensor)
        with pytest.raises(ValueError, match="dequantize"):
            t.view(8, 4, 16, 4)


def test_a_class_makes_parameters():
    """As accelerate makes them of the class of a parameter, when it moves one."""
    for t in weights():
        made = type(t)(t.clone(), requires_grad=False)
        assert isinstance(made, nn.Parameter)
        assert type(made) is type(t)
        assert torch.equal(made, t)
        with pytest.raises(TypeError, match="made of parts"):
            type(t)(t.parts)
