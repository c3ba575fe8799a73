"""AutoAWQ's checkpoints: the library's weights to the bit, any codes by the published layout, one error else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.checkpoint.formats.awq import RECORDS
from ao_lab.checkpoint.formats.group_integers import Integers
from tests.ao_lab.checkpoint.formats.folders.integer_layers import random_layer, stored_codes
from tests.ao_lab.checkpoint.formats.folders.library_weights import case, cases, folder_of, grids, read
from tests.ao_lab.checkpoint.formats.folders.published_layouts import awq_layer

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("name", cases("awq"))
def test_what_the_library_dequantizes(name, tmp_path):
    config, tensors, expected = case("awq", name)
    weight = read(folder_of(tmp_path / "model", config, tensors))
    assert weight.dtype == expected.dtype == torch.float16
    assert torch.equal(weight.dequantize().view(torch.int16), expected.contiguous().view(torch.int16))
    assert weight.scheme.name == f"awq.int4_{'rowwise' if 'whole' in name else 'g32'}_asymmetric"


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 8),
    outputs=st.integers(1, 4),
    group=st.sampled_from([-1, 1, 5, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_zero_points_and_scales_stay(tmp_path_factory, inputs, outputs, group, seed):
    inputs, outputs = inputs * abs(group), outputs * 8
    codes, zeros, scales = random_layer(4, inputs, outputs, group, seed)
    config = {**CONFIG, "group_size": group}
    weight = read(folder_of(tmp_path_factory.mktemp("awq"), config, awq_layer(codes, zeros, scales)))
    assert np.array_equal(stored_codes(weight), codes)
    assert torch.equal(weight.scale, scales.view(torch.uint16))
    assert np.array_equal(
        0 if weight.zero is None else weight.zero.numpy(), 0 if (zeros == 8).all() else zeros - 8
    )


def test_other_names_of_the_fields(tmp_path):
    """AutoAWQ's own names, and a version in capitals."""
    _, tensors, expected = case("awq", "gemm_32")
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    assert torch.equal(read(folder_of(tmp_path / "model", config, tensors)).dequantize(), expected)


WRONG = {
    "marlin": ({"version": "marlin"}, {}, "version marlin of .* cannot be read, these can: gemm, gemv"),
    "fast": ({"version": "gemv_fast"}, {}, "version gemv_fast .* AutoAWQ or GPTQModel"),
    "3 bits": ({"bits": 3}, {}, "bits of quantization_config .*4 bits.*: 3"),
    "group": ({"group_size": -2}, {}, "group_size of quantization_config .*: -2"),
    "no group": ({"group_size": None}, {}, "group_size of quantization_config"),
    "odd group": ({"group_size": 48}, {}, "64 inputs, which groups of 48 do not divide"),
    "other group": ({"group_size": 16}, {}, r"qzeros.* is int32 of shape \(4, 4\).* got int32 of shape \(2, 4\)"),
    "other version": ({"version": "gemv"}, {}, r"qzeros.* is int32 of shape \(64, 4\).* got int32 of shape \(2, 4\)"),
    "no words": ({}, {"qweight": None}, "no tensor named qweight"),
    "no zeros": ({}, {"qzeros": None}, "lacks tensor layer.qzeros"),
    "no scales": ({}, {"scales": None}, "lacks tensor layer.scales"),
    "wide words": ({}, {"qweight": torch.zeros(64, 4, dtype=torch.int64)}, r"is int32 of shape \(64, 4\)"),
    "empty": ({}, {"qweight": torch.zeros(0, 4, dtype=torch.int32)}, "none of length 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_error_for_what_cannot_be_read(name, tmp_path):
    config, tensors, _ = case("awq", "gemm_32")
    changes, others, said = WRONG[name]
    tensors = {key: part for key, part in (tensors | others).items() if part is not None}
    with pytest.raises(ValueError, match=said):
        read(folder_of(tmp_path / "model", config | changes, tensors))


def test_the_record_rounds_as_the_library():
    """Scales, zero points and values of AutoAWQ's pseudo_quantize_tensor, in float16."""
    grid = grids("awq")
    scheme = Integers(RECORDS, 4, 32, tuple(grid["weight"].shape), torch.float16).scheme(True)
    again = reference.quantize(grid["weight"], scheme)
    assert torch.equal(again.scale.view(torch.float16), grid["scale"])
    assert torch.equal(again.zero.half() + 8, grid["zero"])
    assert torch.equal(reference.dequantize(again, "float16"), grid["values"])
