"""Every public class of torchao beside the record that `as_torchao` names for it: codes, scales, zero points and values.

Weights of three dtypes: ordinary ones, tiny ones, subnormal ones, the largest finite numbers, and rows of zeros.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torchao.prototype import _nf4tensor_api
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats import inference_workflow as mx_workflow
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8Tensor,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    quant_api,
    quantize_,
)
from torchao.quantization.quantize_.common import _choose_quant_func_and_quantize_tensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
from torchao.quantization.quantize_.workflows import NF4Tensor
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)

import ao_lab
from ao_lab.config.torchao import RECORDS_OF
from tests.support.bits import assert_floats, assert_words

ROWS, COLUMNS = 128, 256
ALL = (torch.float32, torch.bfloat16, torch.float16)
BFLOAT16 = (torch.bfloat16,)
EMULATED = KernelPreference.EMULATED
MAPPINGS = (MappingType.SYMMETRIC, MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR)


def intx(
    bits: int, granularity: object, mapping: MappingType, scale: torch.dtype | None
) -> IntxWeightOnlyConfig:
    return IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity, mapping, scale)


def intx_cases() -> list[tuple[object, tuple[torch.dtype, ...]]]:
    made: list[tuple[object, tuple[torch.dtype, ...]]] = [
        (intx(bits, PerGroup(32), mapping, None), ALL)
        for bits in range(1, 9)
        for mapping in MAPPINGS
        if bits > 1 or mapping is MappingType.ASYMMETRIC
    ]
    made += [(intx(bits, PerAxis(0), mapping, None), ALL) for bits in (2, 4, 8) for mapping in MAPPINGS]
    made += [
        (intx(bits, PerGroup(64), mapping, torch.float32), ALL) for bits in (3, 8) for mapping in MAPPINGS
    ]
    return [*made, (intx(4, PerGroup(32), MappingType.SYMMETRIC, torch.bfloat16), BFLOAT16)]


# torchao's configuration, and the dtypes of weights that it takes on a CPU.
CASES = [
    (Int8WeightOnlyConfig(version=2), ALL),
    (Int8WeightOnlyConfig(granularity=PerTensor(), version=2), ALL),
    (Int8WeightOnlyConfig(granularity=PerGroup(32), version=2), ALL),
    (Int8DynamicActivationInt8WeightConfig(version=2), ALL),
    (Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC, version=2), ALL),
    (Int8DynamicActivationInt8WeightConfig(granularity=PerTensor(), version=2), ALL),
    *intx_cases(),
    (Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)), ALL),
    (Int8DynamicActivationIntxWeightConfig(torch.int3, PerAxis(0), weight_scale_dtype=torch.float32), ALL),
    (Float8WeightOnlyConfig(), ALL),
    (Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2), ALL),
    (Float8WeightOnlyConfig(granularity=PerTensor()), ALL),
    (NVFP4WeightOnlyConfig(), (torch.float32, torch.bfloat16)),
    (NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False), (torch.float32, torch.bfloat16)),
    # In float16 torchao's 256 * (1 / (2 * amax)) loses bits of a subnormal reciprocal where weights are above 1000.
    (_nf4tensor_api.NF4WeightOnlyConfig(), (torch.float32, torch.bfloat16)),
    *[
        (MXDynamicActivationMXWeightConfig(32, element, element, EMULATED, mode), BFLOAT16)
        for element in (
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            "fp6_e2m3",
            "fp6_e3m2",
            torch.float4_e2m1fn_x2,
        )
        for mode in ScaleCalculationMode
    ],
]


def kinds(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights by what is special about them."""
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    limits = torch.finfo(dtype)
    largest = (drawn.sign() * limits.max).to(dtype)
    mixed = (drawn / drawn.abs().max()).double() * limits.max
    zeros = drawn.clone()
    zeros[::3] = 0
    made = {
        "ordinary": drawn / 16,
        "1e-6": drawn * 1e-6,
        "1e-20": drawn * 1e-20,
        "subnormal": (drawn.double() * limits.smallest_normal / 8),
        "one side": drawn.abs() / 8 * limits.max,
        "largest": largest,
        "of all sizes to the largest": mixed,
        "rows of zeros": zeros,
        "zeros": torch.zeros_like(drawn),
    }
    return {name: value.to(dtype) for name, value in made.items()}


def theirs(config: object, weight: torch.Tensor) -> torch.Tensor:
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(layer, config)
    return layer.weight


def compare(stored: torch.Tensor, ours: ao_lab.QuantizedTensor, weight: torch.Tensor) -> None:
    """Values, and where their class keeps them apart, codes, scales and zero points."""
    q = ours.quantized
    if isinstance(stored, NF4Tensor):
        assert_words(ours.codes, nibbles_swapped(stored.quantized_data), "codes", weight)
        # The order in which torch adds scales for their mean is the machine's; tests/reference/schemes/torchao/test_nvfp4.py
        # says more.
        if not torch.equal(q.zero, stored.scaler_mean.float()):
            return
    values = stored.get_original_weight() if isinstance(stored, NF4Tensor) else stored.dequantize()
    made = ours.dequantize()
    if q.scheme.name == "torchao.nvfp4":
        # 0 times an infinite reciprocal is a NaN, which the machine gives a sign, and torchao's cast to 4 bits a number.
        made, values = (torch.where(weight == 0, x.abs(), x) for x in (made, values))
    assert_floats(made, values, f"values in {q.scheme.name}", weight)
    if isinstance(stored, MXTensor) or not hasattr(stored, "scale") or q.scheme.outer is not None:
        return
    if q.scale.dtype == torch.float32:
        assert_floats(q.scale, stored.scale.float(), "scale")
    if q.scheme.format.kind == "float":
        assert_floats(q.codes.view(stored.qdata.dtype), stored.qdata, "codes", weight)
    elif q.scheme.format.bits == 8:
        assert_words(q.codes, stored.qdata, "codes", weight)
    if q.zero is not None and q.scheme.format.bits > 1:
        assert_words(q.zero, stored.zero_point, "zero points")


def nibbles_swapped(packed: torch.Tensor) -> torch.Tensor:
    """torchao keeps the first of two codes of NF4 in the high bits, the default scheme in the low ones."""
    return (packed << 4) | (packed >> 4)


def repeats(config: object) -> bool:
    """Whether only the number of bits of an integer tells a configuration from one of 2, 4 or 8 bits."""
    widths = (torch.int3, torch.int5, torch.int6, torch.int7)
    return (
        isinstance(config, IntxWeightOnlyConfig)
        and config.weight_dtype in widths
        and config.scale_dtype is None
    )


@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        pytest.param(config, dtypes, marks=pytest.mark.nightly if repeats(config) else ())
        for config, dtypes in CASES
    ],
    ids=lambda value: type(value).__name__,
)
def test_weights(config: object, dtypes: tuple[torch.dtype, ...]) -> None:
    wanted = ao_lab.as_torchao(config)
    for dtype in dtypes:
        for weight in kinds(dtype).values():
            ours = ao_lab.quantized(weight, wanted.recipe())
            compare(theirs(config, weight), ours, weight)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), (PerBlock([1, 128]), PerBlock([128, 128]))])
def test_float8_weights_and_inputs(granularity: object) -> None:
    """The configuration wants a GPU to quantize; its tensor class does not."""
    config = Float8DynamicActivationFloat8WeightConfig(granularity=granularity)
    recipe = ao_lab.as_torchao(config).recipe()
    for dtype in ALL:
        for x in kinds(dtype).values():
            for scheme, one in zip((recipe.activation, recipe.weight), config.granularity, strict=True):
                compare(Float8Tensor.from_hp(x, granularity=one), ao_lab.quantized(x, scheme), x)


@pytest.mark.parametrize("mapping", MAPPINGS[:2])
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()])
def test_int8_inputs(mapping: MappingType, granularity: object) -> None:
    config = Int8DynamicActivationInt8WeightConfig(mapping, granularity=granularity, version=2)
    scheme = ao_lab.as_torchao(config).recipe().activation
    for dtype in ALL:
        weight = theirs(config, kinds(dtype)["ordinary"])
        for x in kinds(dtype).values():
            stored = _choose_quant_func_and_quantize_tensor(x, weight.act_quant_kwargs)
            compare(stored, ao_lab.quantized(x, scheme), x)


def test_int8_inputs_of_intx() -> None:
    scheme = (
        ao_lab.as_torchao(Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))).recipe().activation
    )
    for dtype in ALL:
        for x in kinds(dtype).values():
            values = _apply_int8_act_asym_per_token_quant_dequant(x)
            assert_floats(ao_lab.quantized(x, scheme).dequantize(), values, "values", x)


def public_configurations() -> set[str]:
    """The classes of torchao that quantize a weight, by the handlers that it has registered."""
    modules = (quant_api, mx_workflow, _nf4tensor_api)
    found = {name for module in modules for name in vars(module) if name.endswith("Config")}
    return {name for name in found if not name.startswith(("_", "AOBase", "Float8MM"))}


def test_every_class_of_torchao_is_known_or_refused() -> None:
    """What has no record has a reason, said by `as_torchao` too."""
    refused = {
        "Float8DynamicActivationInt4WeightConfig": "its int4 weights are made by GPU kernels of MSLK",
        "FqnToConfig": "configurations by name",
        "ModuleFqnToConfig": "an older name of FqnToConfig",
    }
    assert public_configurations() - set(RECORDS_OF) == set(refused) & public_configurations()
    with pytest.raises(ValueError, match="no record says what Float8DynamicActivationInt4WeightConfig"):
        ao_lab.as_torchao(ao_lab.Float8DynamicActivationInt4WeightConfig())


def test_ours_and_theirs_name_the_same_records() -> None:
    for config, _ in CASES:
        if (
            "FP4" in type(config).__name__
            or "MX" in type(config).__name__
            or not dataclasses.is_dataclass(config)
        ):
            continue  # parameters that ours take only as they are, or no parameters
        fields = {field.name for field in dataclasses.fields(config)}
        ours = getattr(ao_lab, type(config).__name__)(**{name: getattr(config, name) for name in fields})
        assert ao_lab.as_torchao(ours).recipe() == ao_lab.as_torchao(config).recipe()
        assert type(ao_lab.as_torchao(ours)) is type(ours)


def test_kept_parameters_and_names() -> None:
    static = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.5, kernel="reference")
    kept = ao_lab.as_torchao(static)
    assert (kept.act_quant_scale, kept.kernel) == (0.5, "reference")
    assert str(kept.recipe()) == "torchao.int8_rowwise x torchao.int8_tensorwise"
    by_name = ao_lab.as_torchao(FqnToConfig({"a": Int8WeightOnlyConfig(version=2), "b": None}))
    assert by_name.fqn_to_config["a"].recipe().weight.name == "torchao.int8_rowwise"
    assert by_name.fqn_to_config["b"] is None
    assert (
        ao_lab.as_torchao(Int4WeightOnlyConfig(group_size=64)).recipe().weight.name
        == "torchao.int4_g64_tinygemm"
    )


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="one bit are 0 for every weight"):
        ao_lab.as_torchao(intx(1, PerGroup(32), MappingType.SYMMETRIC, None))
    with pytest.raises(TypeError, match="takes a configuration of ao_lab or torchao, got int"):
        ao_lab.as_torchao(3)
    with pytest.raises(ValueError, match="no record says what Int8StaticActivationInt8WeightConfig"):
        ao_lab.as_torchao(Int8StaticActivationInt8WeightConfig(torch.tensor([[0.1]]), version=2))
    with pytest.raises(ValueError, match="activation_value_lb is in no record"):
        ao_lab.as_torchao(Float8DynamicActivationFloat8WeightConfig(activation_value_lb=1e-12))


# Weights that torchao quantizes and ours in torchao's records: the same numbers, bit for bit.


INT4 = {"weight_dtype": torch.int4, "granularity": PerGroup(32), "scale_dtype": torch.float32}
# torchao's configuration, ours, and the record that makes ours theirs.
BITS_CASES = [
    (Int8WeightOnlyConfig(), ao_lab.Int8WeightOnlyConfig, {}, "torchao.int8_rowwise"),
    (Float8WeightOnlyConfig(), ao_lab.Float8WeightOnlyConfig, {}, "torchao.fp8_rowwise_inference"),
    (IntxWeightOnlyConfig(**INT4), ao_lab.IntxWeightOnlyConfig, INT4, "torchao.int4_g32"),
    (
        IntxWeightOnlyConfig(**INT4, mapping_type=MappingType.ASYMMETRIC),
        ao_lab.IntxWeightOnlyConfig,
        {**INT4, "mapping_type": MappingType.ASYMMETRIC},
        "torchao.int4_g32_asymmetric",
    ),
    (
        IntxWeightOnlyConfig(torch.int8, granularity=PerAxis(0), scale_dtype=torch.float32),
        ao_lab.IntxWeightOnlyConfig,
        {"granularity": PerAxis(0)},
        "torchao.int8_rowwise",
    ),
    (NVFP4WeightOnlyConfig(), ao_lab.NVFP4WeightOnlyConfig, {}, "torchao.nvfp4"),
    (
        MXDynamicActivationMXWeightConfig(kernel_preference=EMULATED),
        ao_lab.MXDynamicActivationMXWeightConfig,
        {"kernel_preference": EMULATED},
        "torchao.mxfp8_e4m3_rceil",
    ),
]


def layer():
    torch.manual_seed(0)
    return nn.Linear(256, 128, bias=False).to(torch.bfloat16)


@pytest.mark.parametrize(("theirs", "kind", "given", "scheme"), BITS_CASES)
def test_weights_in_torchaos_records_are_torchaos(theirs, kind, given, scheme):
    one, two = layer(), layer()
    quantize_(one, theirs)
    ao_lab.quantize_(two, kind(**given, scheme=scheme))
    assert torch.equal(two.weight.dequantize(), one.weight.dequantize())


@pytest.mark.parametrize(("theirs", "kind", "given", "scheme"), BITS_CASES[:3])
def test_the_houses_bits_are_others(theirs, kind, given, scheme):
    one, two = layer(), layer()
    quantize_(one, theirs)
    ao_lab.quantize_(two, kind(**given))
    assert not torch.equal(two.weight.dequantize(), one.weight.dequantize())
