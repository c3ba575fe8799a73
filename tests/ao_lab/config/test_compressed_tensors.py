"""`for_layout`: weights whose stored numbers survive the readers' own arithmetic, whatever the weights are."""

import dataclasses
import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize

import ao_lab
import fast
from ao_lab import NVFP4WeightOnlyConfig
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.plain_readers import reading
from ao_lab.config.compressed_tensors import (
    activation_as_read,
    changes,
    common_name,
    is_as_read,
    reader_activation,
    recipe_for_readers,
)
from ao_lab.config.recipe import Recipe, named
from ao_lab.tensor.quantized_tensor import quantized
from reference import FORMATS, SCHEMES, Format, Scale, Scales, Scheme

# Inputs as compressed-tensors quantizes them: its own `forward_quantize` against the records, bit for bit.

INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
MX = {
    "type": "float", "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}  # fmt: skip
#: Arguments, the record.
CASES = [
    ({**INT8, "strategy": "token", "dynamic": True}, "int8_token"),
    ({**INT8, "strategy": "tensor", "dynamic": True}, "int8_tensor"),
    ({**INT8, "strategy": "group", "group_size": 128, "dynamic": True}, "int8_group_128"),
    ({**INT8, "strategy": "group", "group_size": 32, "dynamic": True}, "int8_group_32"),
    ({"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}, "int4_token"),
    ({**FP8, "strategy": "token", "dynamic": True}, "fp8_token"),
    ({**FP8, "strategy": "tensor", "dynamic": True}, "fp8_tensor"),
    ({**FP8, "strategy": "group", "group_size": 128, "dynamic": True}, "fp8_group_128"),
    ({"num_bits": 4, **MX}, "mxfp4"),
    ({"num_bits": 6, **MX}, "mxfp6_e2m3"),
    ({"num_bits": 8, **MX}, "mxfp8_e4m3"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layer:
    """What `forward_quantize` asks of a module."""

    quantization_status = QuantizationStatus.FROZEN

    def __init__(self, **parts):
        self.__dict__.update(parts)


def inputs(dtype, least, largest):
    """Tokens of every binade, zeros of both signs, ties, and a token or group of zeros alone."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(least, largest + 1).reshape(-1, 1, 1)
    x = torch.randn(len(exponents), 2, 256, generator=generator, dtype=torch.float64) * 2.0**exponents
    x[3], x[4, :, :128], x[5, 0] = 0, 0, -0.0
    x[6] = torch.arange(256) * 2.0 ** exponents[6] / 2
    x[7, :, ::2] = 2.0 ** exponents[7]
    x[8:24] = (
        torch.arange(16).reshape(16, 1, 1) / 16 + 1
    )  # every mantissa of four bits as the largest magnitude
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def same(a, b):
    """Equal numbers (both zeros are one), NaN where NaN is."""
    assert a.dtype == b.dtype
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("arguments", "name"), CASES, ids=[name for _, name in CASES])
def test_dynamic_inputs_have_the_readers_bits(arguments, name, dtype):
    scheme = reader_activation(arguments)
    assert scheme.name == f"compressed_tensors.{name}"
    power = scheme.scale.power_of_two
    # Deviations: MX blocks whose largest magnitude is 1.75 * 2^127 or more; of float16 below 2^-14.
    ends = (-14, 14) if dtype == torch.float16 else (-140, 122 if power else 127)
    x = inputs(dtype, *ends)
    for part in (x, *x[:8]) if scheme.scale.block == "tensor" else (x,):
        part = part.reshape(-1, 2, 256)
        theirs = forward_quantize(Layer(), part, "input", QuantizationArgs(**arguments))
        assert same(fast.fake_quantize(part, scheme), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [INT8, FP8])
def test_static_inputs_have_the_readers_bits(kind, dtype):
    arguments = {**kind, "strategy": "tensor", "dynamic": False}
    scheme = reader_activation(arguments)
    x = inputs(dtype, -12, 12)
    for scale in (2.0**-6, 0.0517578125):
        given = torch.tensor([scale], dtype=dtype)
        layer = Layer(input_scale=given)
        theirs = forward_quantize(layer, x, "input", QuantizationArgs(**arguments))
        ours = fast.fake_quantize(x, scheme, scales=Scales(given.to(torch.float32).reshape(()), None, None))
        assert same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_spoils_what_it_spoils_there(dtype, value):
    for arguments, _ in CASES:
        scheme = reader_activation(arguments)
        if scheme.scale.power_of_two and value != value:
            continue  # there the scale depends on which NaN it is; here the block is NaN
        x = torch.linspace(-2, 2, 512, dtype=dtype).reshape(1, 2, 256)
        x[0, 1, 9] = value
        theirs = forward_quantize(Layer(), x, "input", QuantizationArgs(**arguments))
        ours = fast.fake_quantize(x, scheme)
        assert torch.equal(ours.isnan(), theirs.isnan()), (scheme, ours, theirs)
        assert same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_inputs_have_the_readers_bits(dtype):
    arguments = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
        "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    scheme = reader_activation(arguments)
    outer = torch.tensor([97.5], dtype=torch.float32)
    x = inputs(dtype, -14, 14)
    theirs = forward_quantize(
        Layer(input_global_scale=outer), x, "input", QuantizationArgs.model_validate(arguments)
    )
    assert same(fast.fake_quantize(x, scheme, scales=Scales(None, outer.reshape(()), None)), theirs)


def test_mx_outside_of_what_a_record_says():
    """The two deviations of the records, as they are there."""
    arguments, _ = CASES[-3]
    large = torch.full((1, 1, 32), 1.75 * 2.0**127)
    assert forward_quantize(Layer(), large, "input", QuantizationArgs(**arguments)).isnan().all()
    tiny = torch.full((1, 1, 32), 2.0**-24, dtype=torch.float16)
    assert (forward_quantize(Layer(), tiny, "input", QuantizationArgs(**arguments)) == 0).all()
    assert all(len(reader_activation(given).deviations) == 2 for given, _ in CASES if "scale_dtype" in given)


def test_tokens_of_a_matrix_share_one_scale_there():
    """Inputs of two axes: the reader's "token" is the whole tensor."""
    arguments = {**INT8, "strategy": "token", "dynamic": True}
    x = inputs(torch.float32, -4, 20)[:, 0]
    theirs = forward_quantize(Layer(), x, "input", QuantizationArgs(**arguments))
    assert same(fast.fake_quantize(x, "compressed_tensors.int8_tensor"), theirs)
    assert not same(fast.fake_quantize(x, "compressed_tensors.int8_token"), theirs)


WRONG = [
    {"symmetric": False}, {"num_bits": 16}, {"num_bits": 5, "type": "float"}, {"strategy": "channel", "dynamic": True},
    {"strategy": "block", "dynamic": True}, {"strategy": "token", "dynamic": False}, {"strategy": "attn_head"},
    {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.bfloat16", "type": "float"},
    {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8", "type": "int"},
    {"strategy": "tensor_group", "group_size": 16, "dynamic": True, "type": "float", "num_bits": 4},
    {"strategy": "tensor_group", "group_size": 32, "dynamic": "local", "type": "float", "num_bits": 4},
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG, ids=json.dumps)
def test_what_no_record_says_is_refused(arguments):
    with pytest.raises(ValueError, match=r"input_activations \("):
        reader_activation({"dynamic": True, **arguments})


def test_arguments_come_as_their_objects_too():
    args = QuantizationArgs(**CASES[0][0])
    assert reader_activation(args.model_dump()).name == "compressed_tensors.int8_token"
    assert reader_activation({"num_bits": 8}).name == "compressed_tensors.int8_tensor"


PAIRS = {
    "int8_rowwise": "int8_token", "int8_tensorwise": "int8_tensor", "fp8_rowwise": "fp8_token",
    "fp8_tensorwise": "fp8_tensor", "fp8_1x128": "fp8_group_128", "mxfp4_rceil": "mxfp4", "mxfp8_e4m3": "mxfp8_e4m3",
    "compressed_tensors.int8_token": "int8_token", "mxfp6_e2m3": "mxfp6_e2m3",
}  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.items())
def test_the_readers_record_for_ours(ours, theirs):
    read = activation_as_read(SCHEMES[ours])
    assert read.name == f"compressed_tensors.{theirs}"
    assert is_as_read(read)
    assert is_as_read(SCHEMES[ours]) == (ours == f"compressed_tensors.{theirs}")


@pytest.mark.parametrize(
    "name", ["nf4", "nvfp4", "fp8_rowwise_e5m2", "fp8_128x128", "int8_rowwise_asymmetric", "mxint8"]
)
def test_inputs_that_readers_do_not_have(name):
    assert not is_as_read(SCHEMES[name])
    with pytest.raises(ValueError, match=r"compressed-tensors|input_activations"):
        activation_as_read(SCHEMES[name])


def weights():
    for seed in range(40):
        torch.manual_seed(seed)
        yield (torch.randn(128, 128) * 10.0 ** (-3 * torch.rand(1))).to(torch.bfloat16)


def is_exact(weight, recipe):
    try:
        return reading(quantized(weight, recipe)).exact
    except ValueError:
        return False


def test_an_outer_scale_of_a_power_of_two_always_survives():
    recipe = NVFP4WeightOnlyConfig().for_layout("compressed-tensors").recipe()
    assert recipe.weight == named("nvfp4_pow2")
    assert all(is_exact(weight, recipe) for weight in weights())
    # The default scheme does for most weights: what is tested here is no accident of one.
    assert not all(is_exact(weight, Recipe(weight=SCHEMES["nvfp4"])) for weight in weights())


def test_the_price_of_the_power_of_two():
    """The outer scale is at most twice as large, so block scales lose at most one of their 17 binades at the lower end."""
    for weight in weights():
        made = {name: quantized(weight, Recipe(weight=named(name))) for name in ("nvfp4", "nvfp4_pow2")}
        ratio = made["nvfp4_pow2"].outer / made["nvfp4"].outer
        assert 1 <= float(ratio) < 2
        assert float(made["nvfp4_pow2"].outer).hex().startswith("0x1.0000000000000p")


# What others call a recipe.


@pytest.mark.parametrize(
    ("weight", "inputs", "name"),
    [
        ("int8_rowwise_cast", "compressed_tensors.int8_token", "W8A8 INT8, per channel, inputs per token"),
        ("int4_g128", None, "W4A16 INT4, group size 128"),
        ("int4_g32_asymmetric", None, "W4A16 INT4, group size 32, zero points"),
        ("int4_g32", "int8_rowwise", "W4A8 INT4, group size 32, INT8 inputs per token"),
        ("fp8_128x128", "fp8_1x128", "W8A8 FP8, per block of 128x128, inputs group size 128"),
        ("fp8_rowwise_e5m2", None, "W8A16 FP8 (E5M2), per channel"),
        ("mxfp4", "mxfp8_e4m3", "W4A8 MXFP4, group size 32, MXFP8 inputs group size 32"),
        ("mxfp6_e2m3", None, "W6A16 MXFP6 (E2M3), group size 32"),
        ("nvfp4", "nvfp4", "W4A4 NVFP4, group size 16, inputs group size 16"),
        ("nf4", None, "W4A16 NF4, blocks of 64"),
        ("int1_g32", None, "W1A16 INT1, group size 32, zero points"),
    ],
)
def test_names(weight, inputs, name):
    assert common_name(Recipe(weight=named(weight), activation=named(inputs))) == name


def test_an_element_that_no_standard_has_bears_no_standards_name(monkeypatch):
    own = Format(name="f134", kind="float", bits=8, exponent_bits=3, mantissa_bits=4)
    monkeypatch.setitem(FORMATS, "f134", own)
    scale = Scale(block=32, rule="rceil", storage="float8_e8m0fnu")
    assert (
        common_name(Recipe(weight=Scheme(name="f134_b32", element=own, scale=scale)))
        == "W8A16 8-bit float (1-3-4), group size 32, e8m0 scales"
    )


@pytest.mark.parametrize(
    ("weight", "inputs", "kernel"),
    [
        ("int8_rowwise", "int8_rowwise", "int8"),
        ("fp8_rowwise", "fp8_rowwise", "scaled_mm"),
        ("int8_g32", "int8_rowwise", "fused"),
        ("mxfp4", "mxfp4", "fused"),
    ],
)
def test_the_faster_kernel_that_is_named_takes_the_recipe(weight, inputs, kernel):
    """What `changes` tells of kernel="dequantize" ends in an option that runs, and that for_layout keeps."""
    config = ao_lab.SchemeConfig(scheme=weight, activation_scheme=inputs)
    told = changes(config.recipe(), recipe_for_readers(config.recipe()))
    assert told[-1].startswith("kernel: dequantize")
    assert f"kernel={kernel} selects" in told[-1]
    layer = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False)).bfloat16()
    ao_lab.quantize_(layer, dataclasses.replace(config, kernel=kernel).for_layout("compressed-tensors"))
    assert layer[0].weight.recipe.kernel == kernel
    assert layer(torch.ones(2, 512, dtype=torch.bfloat16)).shape == (2, 512)


def test_what_is_adapted_is_told_by_the_result():
    """`changes`, in a repr without parameters that given schemes replace, and in the report of what is multiplied slowly."""
    asked = ao_lab.Int8DynamicActivationInt8WeightConfig(act_mapping_type="ASYMMETRIC")
    made = asked.for_layout("compressed-tensors")
    assert asked.changes == asked.for_layout("ao_lab").changes == ()
    assert list(made.changes) == changes(asked.recipe(), made.recipe())
    assert repr(made) == (
        "Int8DynamicActivationInt8WeightConfig(scheme='int8_rowwise_cast', "
        "activation_scheme='compressed_tensors.int8_token', kernel='dequantize')"
    )
    assert "ASYMMETRIC" in repr(asked)
    assert ao_lab.FqnToConfig({"_default": made}).changes[0] == f"_default: {made.changes[0]}"
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    assert 'a configuration with kernel="int8" is faster here' in str(ao_lab.quantize_(layer, made))
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    named = ao_lab.Int8DynamicActivationInt8WeightConfig(kernel="int8").for_layout("compressed-tensors")
    ao_lab.quantize_(layer, ao_lab.QATConfig(named))
    told = str(ao_lab.quantize_(layer, ao_lab.QATConfig(named, step="convert")))
    assert 'kernel="int8": a saved folder holds the same quantized values' in told


def test_scales_in_the_weights_dtype_lie_so_in_files(tmp_path):
    """Of a cast scheme in bfloat16, two bytes each, and what is read has the same bits; float32 scales stay."""
    for scheme, dtype, bits in (("int4_g32_cast", torch.bfloat16, 4.5), ("int4_g32", torch.float32, 5.0)):
        model = torch.nn.Sequential(torch.nn.Linear(64, 512, bias=False)).bfloat16()
        ao_lab.quantize_(model, ao_lab.SchemeConfig(scheme=scheme))
        saved = ao_lab.save_pretrained(model, tmp_path / scheme, layout="compressed-tensors", config={})
        assert look_at(tmp_path / scheme).specs["0.weight_scale"].dtype == dtype
        assert saved.bits == pytest.approx(bits, abs=0.01)  # and 16 bytes of weight_shape
        other = torch.nn.Sequential(torch.nn.Linear(64, 512, bias=False)).bfloat16()
        read = ao_lab.load_pretrained(tmp_path / scheme, other)[0].weight.quantized
        for part in ("codes", "scale"):
            assert torch.equal(getattr(read, part), getattr(model[0].weight.quantized, part))
