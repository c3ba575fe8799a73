"""AutoGPTQ's and GPTQModel's checkpoints: the libraries' weights to the bit, any codes by the layout, one error else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.checkpoint.formats.awq import RECORDS as AWQ_RECORDS
from ao_lab.checkpoint.formats.gptq import RECORDS, zero_points
from ao_lab.checkpoint.formats.group_integers import Integers, regrouped, run_length
from tests.ao_lab.checkpoint.formats.folders.library_weights import (
    case,
    cases,
    folder_of,
    grids,
    random_layer,
    read,
    stored_codes,
)
from tests.ao_lab.checkpoint.formats.folders.published_layouts import awq_layer, gptq_layer

SCATTERED = "gptqmodel_4_scattered"
READ = [name for name in cases("gptq") if name != SCATTERED]
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}


def test_the_libraries_made_them():
    assert len(READ) == 19


@pytest.mark.parametrize("name", READ)
def test_what_the_library_dequantizes(name, tmp_path):
    config, tensors, expected = case("gptq", name)
    weight = read(folder_of(tmp_path / "model", config, tensors))
    assert weight.dtype == expected.dtype == torch.float16
    assert torch.equal(weight.dequantize().view(torch.int16), expected.contiguous().view(torch.int16))
    assert weight.scheme.element == f"int{config['bits']}"
    assert (weight.zero is None) == config["sym"]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    inputs=st.integers(1, 100),
    outputs=st.integers(1, 40),
    group=st.sampled_from([-1, 8, 16, 32]),
    version=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_codes_zero_points_and_scales_stay(tmp_path_factory, bits, inputs, outputs, group, version, seed):
    codes, zeros, scales = random_layer(bits, inputs, outputs, group, seed, lowest=version == 1)
    tensors = gptq_layer(codes, zeros, scales, bits, version=version)
    tensors["g_idx"] = torch.arange(inputs, dtype=torch.int32) // (inputs if group == -1 else group)
    config = {
        **CONFIG,
        "bits": bits,
        "group_size": group,
        "checkpoint_format": "gptq" + "_v2" * (version == 2),
    }
    weight = read(folder_of(tmp_path_factory.mktemp("gptq"), config, tensors))
    middle = 1 << (bits - 1)
    assert np.array_equal(stored_codes(weight), codes)
    assert torch.equal(weight.scale, scales.view(torch.uint16))
    assert np.array_equal(
        0 if weight.zero is None else weight.zero.numpy(), 0 if (zeros == middle).all() else zeros - middle
    )
    spread = np.repeat(np.arange(zeros.shape[1]), inputs if group == -1 else group)[:inputs]
    integers = torch.from_numpy((codes - zeros[:, spread]).astype(np.int16))
    product = scales[:, torch.from_numpy(spread)] * integers
    assert torch.equal(weight.dequantize().nan_to_num(7.0), product.nan_to_num(7.0))


def test_words_of_version_1_are_added_as_a_whole():
    """0 - 1 borrowed from the next field when GPTQModel wrote them; adding to the word gives both back."""
    kept = torch.tensor([[0x80 - 0x11111111]], dtype=torch.int32)
    assert zero_points(kept, 4, 8, True).tolist() == [[0, 8, 0, 0, 0, 0, 0, 0]]
    assert zero_points(torch.tensor([[-1, -1, -1]], dtype=torch.int32), 3, 32, True).tolist() == [[0] * 32]


def test_shapes_tell_where_layers_differ(tmp_path):
    """GPTQModel's `dynamic` gives layers bits and groups of their own."""
    codes, zeros, scales = random_layer(8, 64, 8, 16, 1)
    config = {**CONFIG, "dynamic": {"layer": {"bits": 8, "group_size": 16}}}
    weight = read(folder_of(tmp_path / "model", config, gptq_layer(codes, zeros, scales, 8)))
    assert weight.scheme.name == "gptq.int8_g16_asymmetric"


def test_groups_may_be_missing(tmp_path):
    config, tensors, expected = case("gptq", "gptqmodel_4_v2")
    del tensors["g_idx"]
    assert torch.equal(read(folder_of(tmp_path / "model", config, tensors)).dequantize(), expected)


def test_runs_of_inputs_are_blocks(tmp_path):
    """Groups that lie apart in runs of 16 neighbours: the same bits, scales stored twice."""
    config, tensors, expected = case("gptq", "gptqmodel_4_runs")
    weight = read(folder_of(tmp_path / "model", config, tensors))
    assert weight.scheme.scale.block == 16
    assert torch.equal(weight.dequantize(), expected)


WRONG = {
    "marlin": ({"checkpoint_format": "marlin"}, {}, "checkpoint_format marlin of .* cannot be read"),
    "marlin of AutoGPTQ": ({"is_marlin_format": True}, {}, "checkpoint_format marlin"),
    "unknown format": ({"checkpoint_format": "gptq_v9"}, {}, "gptq_v9 of .* these can: gptq, gptq_v2, gptq_p"),
    "planar words": ({"checkpoint_format": "gptq_p", "bits": 3}, {}, r"bits .* \(2, 4, 8 bits.*: 3"),
    "5 bits": ({"bits": 5}, {}, r"bits of quantization_config .* \(2, 3, 4, 8 bits.*: 5"),
    "bits as text": ({"bits": "4"}, {}, "bits of quantization_config"),
    "true bits": ({"bits": True}, {}, "bits of quantization_config"),
    "no bits": ({"bits": None}, {}, "bits of quantization_config"),
    "group": ({"group_size": 0}, {}, "group_size of quantization_config"),
    "other bits": ({"bits": 8}, {}, r"qweight.* is int32 of shape \(16, 32\).* got int32 of shape \(8, 32\)"),
    "other group": ({"group_size": 16}, {}, r"qzeros.* is int32 of shape \(4, 4\)"),
    "rotated": ({"rotation": "hadamard"}, {}, "rotation hadamard"),
    "no words": ({}, {"qweight": None}, "no tensor named qweight"),
    "no zeros": ({}, {"qzeros": None}, "lacks tensor layer.qzeros"),
    "no scales": ({}, {"scales": None}, "lacks tensor layer.scales"),
    "flat words": ({}, {"qweight": torch.zeros(8, dtype=torch.int32)}, "has 2 axes"),
    "wide words": ({}, {"qweight": torch.zeros(8, 32, dtype=torch.int64)}, r"is int32 of shape \(8, 32\)"),
    "scales in float64": ({}, {"scales": torch.zeros(2, 32, dtype=torch.float64)}, "scales are float16"),
    "short groups": ({}, {"g_idx": torch.zeros(32, dtype=torch.int32)}, r"qweight.* is int32 of shape \(4, 32\)"),
    "groups beyond": ({}, {"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "layer.g_idx of .*: g_idx names groups 0 to 1"),
    "dynamic": ({"dynamic": {"x": {}}}, {"g_idx": None}, "do not follow from qweight"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_error_for_what_cannot_be_read(name, tmp_path):
    config, tensors, _ = case("gptq", "gptqmodel_4_v2")
    changes, others, said = WRONG[name]
    tensors = {key: part for key, part in (tensors | others).items() if part is not None}
    with pytest.raises(ValueError, match=said):
        read(folder_of(tmp_path / "model", config | changes, tensors))


def test_scattered_groups_are_refused(tmp_path):
    """Act-order: a scale for every input would take more than the dense weight."""
    config, tensors, _ = case("gptq", SCATTERED)
    with pytest.raises(ValueError, match=r"layer.g_idx.*desc_act.*runs of 1.*GPTQModel"):
        read(folder_of(tmp_path / "model", config, tensors))


@pytest.mark.parametrize(("bits", "run"), [(2, 2), (3, 2), (4, 3), (8, 4), (2, 1), (3, 1), (4, 2), (8, 3)])
def test_runs_that_take_less_than_the_dense_weight_are_read(bits, run, tmp_path):
    """A code, and 24 bits of a run's scale and zero point: fewer than 16 bits an element; as many are refused."""
    codes, zeros, scales = random_layer(bits, 48, 32, 24, 1)
    tensors = gptq_layer(codes, zeros, scales, bits)
    tensors["g_idx"] = (torch.arange(48, dtype=torch.int32) // run) % 2
    folder = folder_of(tmp_path / "model", {**CONFIG, "bits": bits, "group_size": 24}, tensors)
    if bits * run + 24 < 16 * run:
        assert read(folder).scheme.scale.block == run
    else:
        with pytest.raises(ValueError, match=f"layer.g_idx.*in runs of {run}, .*more than the dense weight"):
            read(folder)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_records_have_the_library_s_grid(asymmetric):
    """Scales (rounded to float16 when they are packed) and zero points of AutoGPTQ's Quantizer.find_params."""
    weight, grid = grids("gptq")["weight"], grids("gptq_" + "a" * asymmetric + "symmetric")
    scheme = Integers(RECORDS, 4, 32, tuple(weight.shape), torch.float16).scheme(asymmetric)
    again = reference.quantize(weight, scheme)
    assert torch.equal(again.scale.reshape(-1, 1).view(torch.float16), grid["scale"].half())
    assert torch.equal(
        (again.zero if asymmetric else torch.zeros(32)).reshape(-1, 1).float() + 8, grid["zero"]
    )


# AutoAWQ's checkpoints: the library's weights to the bit, any codes by the published layout, one error else.


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("name", cases("awq"))
def test_awq_what_the_library_dequantizes(name, tmp_path):
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
def test_awq_codes_zero_points_and_scales_stay(tmp_path_factory, inputs, outputs, group, seed):
    inputs, outputs = inputs * abs(group), outputs * 8
    codes, zeros, scales = random_layer(4, inputs, outputs, group, seed)
    config = {**AWQ_CONFIG, "group_size": group}
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


AWQ_WRONG = {
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


@pytest.mark.parametrize("name", AWQ_WRONG)
def test_awq_one_error_for_what_cannot_be_read(name, tmp_path):
    config, tensors, _ = case("awq", "gemm_32")
    changes, others, said = AWQ_WRONG[name]
    tensors = {key: part for key, part in (tensors | others).items() if part is not None}
    with pytest.raises(ValueError, match=said):
        read(folder_of(tmp_path / "model", config | changes, tensors))


def test_the_record_rounds_as_the_library():
    """Scales, zero points and values of AutoAWQ's pseudo_quantize_tensor, in float16."""
    grid = grids("awq")
    scheme = Integers(AWQ_RECORDS, 4, 32, tuple(grid["weight"].shape), torch.float16).scheme(True)
    again = reference.quantize(grid["weight"], scheme)
    assert torch.equal(again.scale.view(torch.float16), grid["scale"])
    assert torch.equal(again.zero.half() + 8, grid["zero"])
    assert torch.equal(reference.dequantize(again, "float16"), grid["values"])


# Groups of columns that lie apart, as runs of neighbours.


@pytest.mark.parametrize(
    ("g_idx", "groups", "length"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, 4),
        ([1, 1, 1, 1, 0, 0, 0, 0], 2, 4),
        ([0, 0, 1, 1, 0, 0, 1, 1], 2, 2),
        ([0, 1, 1, 0, 0, 1, 0, 1], 2, 1),
        ([0, 0, 0, 1, 1, 1, 0, 0], 2, 1),
        ([0] * 8, 1, 8),
        ([0], 1, 1),
    ],
)
def test_runs_of_one_group(g_idx, groups, length):
    columns = torch.tensor(g_idx)
    assert run_length(columns, groups) == length
    scale = torch.arange(3.0 * groups).reshape(3, groups)
    (made,) = regrouped(columns, length, scale)
    assert torch.equal(made.repeat_interleave(length, -1), scale[:, columns])


@pytest.mark.parametrize("g_idx", [[0, 2], [-1, 0], [], [[0, 1]], [0.0, 1.0]])
def test_what_names_no_groups(g_idx):
    with pytest.raises(ValueError, match="g_idx"):
        run_length(torch.tensor(g_idx), 2)
