"""Configurations: torchao's names and parameters, the schemes that they name, and what they refuse."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from ao_lab.config.granularity import block_of
from ao_lab.config.recipe import integer_scheme
from reference import SCHEMES

STATIC = torch.tensor(0.05)
BLOCKS = [PerBlock((1, 128)), PerBlock((128, 128))]
ASYMMETRIC, ACT_ASYMMETRIC = (
    {"mapping_type": MappingType.ASYMMETRIC},
    {"act_mapping_type": MappingType.ASYMMETRIC},
)
INT4_ROWS = {"weight_dtype": torch.int4, "weight_granularity": PerAxis(0)}
FP4_BY_FP8 = {"weight_dtype": torch.float4_e2m1fn_x2, "activation_dtype": torch.float8_e5m2}
INTX = [
    ("IntxWeightOnlyConfig", {"weight_dtype": getattr(torch, f"int{b}"), "granularity": PerGroup(32)})
    for b in range(1, 9)
]
# (class, parameters, the weight's scheme, the input's)
CASES = [
    ("SchemeConfig", {"scheme": "mxint8", "activation_scheme": "mxfp8_e4m3"}, "mxint8", "mxfp8_e4m3"),
    ("SchemeConfig", {"scheme": "int5_g16_asymmetric_bf16"}, "int5_g16_asymmetric_bf16", None),
    ("SchemeConfig", {"scheme": "int6_rowwise"}, "int6_rowwise", None),
    ("SchemeConfig", {"scheme": "int2_tensorwise"}, "int2_tensorwise", None),
    ("IntxWeightOnlyConfig", {"weight_dtype": "int4", "scale_dtype": torch.bfloat16}, "int4_rowwise_bf16", None),
    ("IntxWeightOnlyConfig", {"weight_dtype": "int4", "scale_dtype": torch.float16}, "int4_rowwise_f16", None),
    ("Int4WeightOnlyConfig", {}, "int4_g128_asymmetric", None),
    ("Int4WeightOnlyConfig", {"group_size": 32}, "int4_g32_asymmetric", None),
    ("Int4WeightOnlyConfig", {"scheme": "torchao.int4_g128_tinygemm"}, "torchao.int4_g128_tinygemm", None),
    ("Int8WeightOnlyConfig", {}, "int8_rowwise", None),
    ("Int8WeightOnlyConfig", {"group_size": 64}, "int8_g64", None),
    ("Int8WeightOnlyConfig", {"granularity": PerTensor()}, "int8_tensorwise", None),
    ("Int8WeightOnlyConfig", {"scheme": "torchao.int8_rowwise"}, "torchao.int8_rowwise", None),
    ("Float8WeightOnlyConfig", {}, "fp8_rowwise", None),
    ("Float8WeightOnlyConfig", {"weight_dtype": torch.float8_e5m2}, "fp8_rowwise_e5m2", None),
    ("Float8WeightOnlyConfig", {"granularity": PerBlock((128, 128))}, "fp8_128x128", None),
    ("IntxWeightOnlyConfig", {}, "int8_rowwise", None),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int3, "granularity": PerGroup(16)}, "int3_g16", None),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4, **ASYMMETRIC}, "int4_rowwise_asymmetric", None),
    *((name, given, f"int{bits}_g32", None) for bits, (name, given) in enumerate(INTX, 1)),
    ("LowBitWeightOnlyConfig", {}, "stretched2_rowwise", None),
    ("LowBitWeightOnlyConfig", {"bits": 1.58, "granularity": PerGroup(32)}, "ternary_g32", None),
    ("LowBitWeightOnlyConfig", {"bits": 2, "granularity": PerGroup(16)}, "stretched2_g16", None),
    ("LowBitWeightOnlyConfig", {"bits": 3}, "int3_rowwise", None),
    ("LowBitWeightOnlyConfig", {"bits": 4, "granularity": PerGroup(32)}, "int4_g32", None),
    ("SchemeConfig", {"scheme": "ternary_tensorwise"}, "ternary_tensorwise", None),
    ("Int8DynamicActivationInt8WeightConfig", {}, "int8_rowwise", "int8_rowwise"),
    ("Int8DynamicActivationInt8WeightConfig", ACT_ASYMMETRIC, "int8_rowwise", "int8_rowwise_asymmetric"),
    ("Int8DynamicActivationInt8WeightConfig", {"granularity": [PerTensor(), PerRow()]}, "int8_rowwise", "int8_tensorwise"),
    ("Int8StaticActivationInt8WeightConfig", {"act_quant_scale": STATIC}, "int8_rowwise", "int8_tensorwise"),
    (
        "Int8StaticActivationInt8WeightConfig",
        {"act_quant_scale": STATIC, "act_quant_zero_point": torch.tensor([3]), "act_mapping_type": "ASYMMETRIC"},
        "int8_rowwise",
        "int8_tensorwise_asymmetric",
    ),
    ("Int8DynamicActivationIntxWeightConfig", {}, "int8_g32", "int8_rowwise_asymmetric"),
    ("Int8DynamicActivationIntxWeightConfig", INT4_ROWS, "int4_rowwise", "int8_rowwise_asymmetric"),
    ("Float8DynamicActivationFloat8WeightConfig", {}, "fp8_tensorwise", "fp8_tensorwise"),
    ("Float8DynamicActivationFloat8WeightConfig", {"granularity": PerRow()}, "fp8_rowwise", "fp8_rowwise"),
    ("Float8DynamicActivationFloat8WeightConfig", {"granularity": BLOCKS}, "fp8_128x128", "fp8_1x128"),
    ("Float8StaticActivationFloat8WeightConfig", {"act_quant_scale": STATIC}, "fp8_tensorwise", "fp8_tensorwise"),
    ("Float8DynamicActivationInt4WeightConfig", {}, "int4_g128", "fp8_rowwise"),
    ("MXWeightOnlyConfig", {}, "mxfp8_e4m3_rceil", None),
    ("MXWeightOnlyConfig", {"weight_dtype": "float6_e3m2fn", "scaling_mode": "floor"}, "mxfp6_e3m2", None),
    ("MXWeightOnlyConfig", {"weight_dtype": "mxint8"}, "mxint8", None),
    ("MXDynamicActivationMXWeightConfig", {}, "mxfp8_e4m3_rceil", "mxfp8_e4m3_rceil"),
    ("MXDynamicActivationMXWeightConfig", FP4_BY_FP8, "mxfp4_rceil", "mxfp8_e5m2_rceil"),
    ("NVFP4WeightOnlyConfig", {}, "nvfp4", None),
    ("NVFP4DynamicActivationNVFP4WeightConfig", {}, "nvfp4", "nvfp4"),
    ("NF4WeightOnlyConfig", {}, "nf4", None),
]  # fmt: skip
CLASSES = sorted(
    name
    for name in ao_lab.__all__
    if name.endswith("Config")
    and name not in ("FqnToConfig", "HfConfig", "SchemeConfig")
    and not ao_lab.HOMES[name].startswith(("ao_lab.qat.", "ao_lab.sparsity.", "ao_lab.training."))
)


@pytest.mark.parametrize(("name", "given", "weight", "activation"), CASES)
def test_schemes_and_weights(name, given, weight, activation):
    """The recipe, and through quantize_ a weight with the bits of the reference."""
    config = getattr(ao_lab, name)(**given)
    recipe = config.recipe()
    assert (recipe.weight.name, recipe.activation and recipe.activation.name) == (weight, activation)
    layer = nn.Linear(256, 128).to(torch.bfloat16)
    dense = layer.weight.detach().clone()
    ao_lab.quantize_(layer, config)
    q = reference.quantize(dense, recipe.weight)
    assert torch.equal(layer.weight.dequantize(), reference.dequantize(q, "bfloat16"))
    assert layer(torch.ones(3, 256, dtype=torch.bfloat16)).isfinite().all()
    static = "act_quant_scale" in given
    assert (layer.weight.input_scale is not None) == static
    if static:
        assert layer.weight.input_scale == STATIC


def test_every_class_has_a_case():
    assert {name for name, *_ in CASES} >= set(CLASSES)


def test_records_of_the_house_are_themselves():
    for name, scheme in SCHEMES.items():
        if name.startswith("int") and "_g" in name:
            bits, group = name.removeprefix("int").removesuffix("_asymmetric").split("_g")
            assert integer_scheme(int(bits), int(group), name.endswith("asymmetric")) is scheme


@pytest.mark.parametrize("bits", [1, 2, 3, 7])
def test_made_records_hold_zero_and_the_largest(bits):
    """Records without a name obey the rules of the default schemes: no clipping, finite stays finite, zeros stay zeros."""
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    for asymmetric in (False, True):
        scheme = integer_scheme(bits, 48, asymmetric)
        y = reference.dequantize(reference.quantize(x, scheme))
        assert torch.equal(reference.dequantize(reference.quantize(x * 0, scheme)), x * 0)
        if bits == 1:
            # Two levels: the ends of the range.
            ends = torch.stack([x.amin(1), x.amax(1)], 1)
            assert (
                (y[:, :, None] - ends[:, None]).abs().amin(2) <= ends.abs().amax(1)[:, None] * 2**-22
            ).all()
        else:
            step = reference.quantize(x, scheme).scale
            assert ((x - y).abs() <= step * (0.5001 if not asymmetric else 1.0001)).all()


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_are_those_of_torchao(name):
    """Same names, in the same order, so that positional arguments mean the same; ours follow as keywords."""
    torchao = pytest.importorskip("torchao.quantization")
    mx = pytest.importorskip("torchao.prototype.mx_formats")
    theirs = getattr(torchao, name, getattr(mx, name, None))
    if theirs is None:
        assert name in ("MXWeightOnlyConfig", "NF4WeightOnlyConfig", "LowBitWeightOnlyConfig")
        return
    ours = inspect.signature(getattr(ao_lab, name)).parameters
    wanted = list(inspect.signature(theirs).parameters)
    assert list(ours)[: len(wanted)] == wanted
    static = {"Int8Stati": ["statistic", "step"], "Float8Stati": ["statistic"]}.get(
        name.partition("cActivation")[0], []
    )
    keywords = [p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords == ["scheme", "activation_scheme", "kernel", "axis", "sparsity", *static]


def test_granularities_and_mappings_of_torchao_are_understood():
    torchao = pytest.importorskip("torchao.quantization")
    for kind, given in (
        ("PerRow", ()),
        ("PerTensor", ()),
        ("PerGroup", (64,)),
        ("PerAxis", (0,)),
        ("PerToken", ()),
    ):
        theirs = getattr(torchao, kind)(*given)
        assert block_of(theirs) == block_of(getattr(ao_lab, kind)(*given))
    config = ao_lab.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=torchao.quant_primitives.MappingType.ASYMMETRIC
    )
    assert config == ao_lab.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=torchao.quant_primitives.MappingType.ASYMMETRIC
    )
    assert config.recipe().activation.zero is not None


def test_blocks():
    assert [block_of(g) for g in (PerTensor(), PerRow(), PerToken(), PerAxis(0), PerGroup(8), *BLOCKS)] == [
        "tensor", -1, -1, -1, 8, 128, (128, 128),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("SchemeConfig", {}, "give scheme="),
        ("SchemeConfig", {"scheme": "int9_g32"}, "unknown scheme"),
        ("SchemeConfig", {"scheme": "int4_g0"}, "unknown scheme"),
        ("Int8WeightOnlyConfig", {"granularity": PerRow(0)}, "per row"),
        ("Int8WeightOnlyConfig", {"granularity": PerAxis(1)}, "per row"),
        ("Int8WeightOnlyConfig", {"granularity": 3}, "granularity is one of .*; got 3$"),
        ("Int8WeightOnlyConfig", {"granularity": "row"}, "got 'row'; the nearest is PerRow"),
        ("Int8WeightOnlyConfig", {"granularity": PerRow}, "PerRow.*; the nearest is PerRow"),
        ("Int8WeightOnlyConfig", {"kernel": "fast"}, "kernel is one of"),
        ("Int4WeightOnlyConfig", {"int4_packing_format": "tile_packed_to_4d"}, "int4_packing_format is 'plain'"),
        ("Int4WeightOnlyConfig", {"int4_choose_qparams_algorithm": "hqq"}, "is 'tinygemm'"),
        ("IntxWeightOnlyConfig", {"weight_dtype": torch.int16}, "weight_dtype is one of"),
        ("IntxWeightOnlyConfig", {"mapping_type": "OTHER"}, "mapping type is one of"),
        ("IntxWeightOnlyConfig", {"scale_dtype": torch.float64}, "scales' dtype is one of"),
        ("Float8WeightOnlyConfig", {"weight_dtype": torch.int8}, "float8 dtype"),
        ("Float8WeightOnlyConfig", {"granularity": PerGroup(64)}, "block of float8"),
        ("Float8WeightOnlyConfig", {"granularity": PerBlock((1, 2, 3))}, "two numbers"),
        ("Float8DynamicActivationFloat8WeightConfig", {"activation_value_lb": 1e-3}, "activation_value_lb"),
        ("Float8DynamicActivationFloat8WeightConfig", {"granularity": [PerRow()]}, "a pair"),
        ("Int8DynamicActivationInt8WeightConfig", {"weight_only_decode": True}, "weight_only_decode is False"),
        ("Int8StaticActivationInt8WeightConfig", {"granularity": [PerRow(), PerRow()]}, "use PerTensor"),
        ("Int8StaticActivationInt8WeightConfig", {"activation_scheme": "int8_rowwise"}, "not int8_rowwise"),
        ("Int8StaticActivationInt8WeightConfig", {"act_quant_scale": STATIC, "act_quant_zero_point": 3}, "ASYMMETRIC"),
        ("Int8StaticActivationInt8WeightConfig", {"statistic": "median"}, "statistic is one of"),
        ("Int8StaticActivationInt8WeightConfig", {"statistic": 3}, "a function that makes"),
        ("Int8StaticActivationInt8WeightConfig", {"step": "prepare_for_loading"}, "step is one of"),
        ("Int8StaticActivationInt8WeightConfig", {"act_quant_scale": torch.ones(2)}, "one number"),
        ("Int8StaticActivationInt8WeightConfig", {"act_quant_scale": STATIC, "act_mapping_type": "ASYMMETRIC"}, "zero_point"),
        ("Float8StaticActivationFloat8WeightConfig", {"activation_scheme": "mxfp8_e4m3"}, "not mxfp8_e4m3"),
        ("Float8StaticActivationFloat8WeightConfig", {"activation_scheme": "nvfp4"}, "not nvfp4"),
        ("Float8StaticActivationFloat8WeightConfig", {"granularity": BLOCKS}, "not fp8_1x128"),
        ("Float8StaticActivationFloat8WeightConfig", {"act_quant_scale": STATIC, "step": "prepare"}, "one of the two"),
        ("MXWeightOnlyConfig", {"weight_dtype": torch.int8}, "an MX element"),
        ("MXDynamicActivationMXWeightConfig", {"block_size": 16}, "block_size is 32"),
        ("MXDynamicActivationMXWeightConfig", {"scaling_mode": "even"}, "scaling_mode is one of"),
        ("NVFP4WeightOnlyConfig", {"use_dynamic_per_tensor_scale": False}, "is True"),
        ("NF4WeightOnlyConfig", {"block_size": 32}, "block_size is 64"),
        ("Int4WeightOnlyConfig", {"group_size": "32"}, "group_size is 1 or more .* got .32."),
        ("Int8WeightOnlyConfig", {"group_size": 0}, "group_size is 1 or more .* got 0"),
        ("LowBitWeightOnlyConfig", {"bits": 1}, "bits is 1.58 .three levels., 2, 3 or 4; got 1"),
        ("LowBitWeightOnlyConfig", {"bits": 5}, "got 5"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_refused(name, given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(ao_lab, name)(**given)


def test_configurations_are_frozen_data():
    config = ao_lab.Int8WeightOnlyConfig()
    assert config == ao_lab.Int8WeightOnlyConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.group_size = 3


def test_a_configuration_is_no_quantization_config_of_transformers():
    """transformers asks for the field, and shows the answer."""
    with pytest.raises(AttributeError, match=r"quantization_config=ao_lab.HfConfig\(config\)"):
        ao_lab.Int8WeightOnlyConfig().quant_method  # noqa: B018
    assert not hasattr(ao_lab.Int8WeightOnlyConfig(), "quant_method")
