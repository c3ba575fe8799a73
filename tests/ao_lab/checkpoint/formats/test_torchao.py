"""Folders that torchao wrote: the same dense values, or a clear error."""

import json
import random
import shutil

import pytest
import torch
from torch import nn

from ao_lab import QuantizedTensor, load_pretrained
from tests.ao_lab.checkpoint.corrupted.mutated_files import Case, at, places
from tests.ao_lab.checkpoint.corrupted.mutations import HOSTILE, TEXTS

torchao = pytest.importorskip("torchao")
safetensors_support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, COLUMNS = 48, 128


def asymmetric(bits):
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=PerGroup(32),
        mapping_type=MappingType.ASYMMETRIC,
    )


CONFIGS = {
    "torchao.int8_rowwise": Int8WeightOnlyConfig(version=2),
    "torchao.int8_g32": Int8WeightOnlyConfig(granularity=PerGroup(32), version=2),
    "torchao.int8_tensorwise": Int8WeightOnlyConfig(granularity=PerTensor(), version=2),
    "torchao.int8_rowwise x torchao.int8_rowwise": Int8DynamicActivationInt8WeightConfig(version=2),
    "torchao.int8_tensorwise x torchao.int8_tensorwise": Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.05]]), granularity=[PerTensor(), PerTensor()], version=2
    ),
    "torchao.fp8_rowwise_inference": Float8WeightOnlyConfig(),
    "torchao.fp8_tensorwise_inference": Float8WeightOnlyConfig(granularity=PerTensor()),
    "torchao.fp8_rowwise_inference_e5m2": Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
    "torchao.intx4_g32_bf16": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "torchao.intx4_g32_bf16 x torchao.intx8_rowwise_asymmetric": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
    **{f"torchao.intx{bits}_g32_asymmetric_bf16": asymmetric(bits) for bits in range(2, 9)},
}


def dense(seed=0):
    """Numbers of all sizes; a row of zeros would be NaN in torchao's float8."""
    made = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    return (made * torch.logspace(-4, 2, ROWS)[:, None]).to(torch.bfloat16)


def float8_dynamic(w):
    kwargs = QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerRow())
    return Float8Tensor.from_hp(w, granularity=PerRow(), act_quant_kwargs=kwargs)


def mx(element, mode, tiled=False):
    def made(w):
        kwargs = mx_tensor.QuantizeTensorToMXKwargs(
            elem_dtype=element, scaling_mode=mode, is_swizzled_scales=tiled
        )
        return mx_tensor.MXTensor.to_mx(
            w, element, scaling_mode=mode, act_quant_kwargs=kwargs, is_swizzled_scales=tiled
        )

    return made


def nvfp4(levels, tiled, dynamic=False):
    def made(w):
        outer = nvfp4_tensor.per_tensor_amax_to_scale(w.abs().max()) if levels == 2 else None
        kwargs = (
            nvfp4_tensor.QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True) if dynamic else None
        )
        return nvfp4_tensor.NVFP4Tensor.to_nvfp4(
            w, per_tensor_scale=outer, is_swizzled_scales=tiled, act_quant_kwargs=kwargs
        )

    return made


MODES = mx_tensor.ScaleCalculationMode
TENSORS = {
    "torchao.fp8_rowwise_inference x torchao.fp8_rowwise_inference": float8_dynamic,
    "torchao.mxfp8_e4m3_floor x torchao.mxfp8_e4m3_floor": mx(torch.float8_e4m3fn, MODES.FLOOR),
    "torchao.mxfp8_e5m2_rceil x torchao.mxfp8_e5m2_rceil": mx(torch.float8_e5m2, MODES.RCEIL, True),
    "torchao.mxfp6_e2m3_even x torchao.mxfp6_e2m3_even": mx("fp6_e2m3", MODES.EVEN),
    "torchao.mxfp6_e3m2_ceil x torchao.mxfp6_e3m2_ceil": mx("fp6_e3m2", MODES.CEIL, True),
    "torchao.mxfp4_rceil x torchao.mxfp4_rceil": mx(torch.float4_e2m1fn_x2, MODES.RCEIL, True),
    "torchao.nvfp4": nvfp4(2, True),
    "torchao.nvfp4_single_level": nvfp4(1, False),
    "torchao.nvfp4 x torchao.nvfp4": nvfp4(2, False, dynamic=True),
}


def layer(weight):
    made = nn.Sequential(nn.Linear(COLUMNS, ROWS)).to(torch.bfloat16)
    made[0].weight = nn.Parameter(weight, requires_grad=False)
    return made


def write(folder, model):
    """torchao's own way to a file."""
    from safetensors.torch import save_file

    tensors, metadata = safetensors_support.flatten_tensor_state_dict(model.state_dict())
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)


def check(folder, theirs, name):
    ours = load_pretrained(folder, layer(dense(1)))
    assert isinstance(ours[0].weight, QuantizedTensor)
    assert str(ours[0].weight.recipe) == name
    assert torch.equal(ours[0].weight.dequantize(), theirs[0].weight.dequantize())
    assert torch.equal(ours[0].bias, theirs[0].bias)
    assert ours(dense(2)).isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_torchao(tmp_path, name):
    theirs = layer(dense())
    quantize_(theirs, CONFIGS[name])
    write(tmp_path, theirs)
    check(tmp_path, theirs, name)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_its_configurations_make_on_gpus(tmp_path, name):
    theirs = layer(TENSORS[name](dense()))
    write(tmp_path, theirs)
    check(tmp_path, theirs, name)


def test_static_scales_come_along(tmp_path):
    theirs = layer(dense())
    quantize_(theirs, CONFIGS["torchao.int8_tensorwise x torchao.int8_tensorwise"])
    write(tmp_path, theirs)
    assert load_pretrained(tmp_path, layer(dense(1)))[0].weight.input_scale == torch.tensor(0.05)


def test_a_folder_of_transformers_with_tied_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    )
    quantized.save_pretrained(tmp_path / "int8")
    ours = load_pretrained(tmp_path / "int8")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for name, parameter in quantized.named_parameters():
        mine = ours.get_parameter(name)
        value = mine.dequantize() if isinstance(mine, QuantizedTensor) else mine
        theirs = parameter.dequantize() if hasattr(parameter, "qdata") else parameter
        assert torch.equal(value, theirs), name


def described(case):
    return json.loads(case.header("model.safetensors")[0]["__metadata__"]["0.weight"])


def change(case, entry):
    header, data = case.header("model.safetensors")
    header["__metadata__"]["0.weight"] = entry if isinstance(entry, str) else json.dumps(entry)
    case.put_header("model.safetensors", header, data)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        (
            "torchao.int8_rowwise",
            "_type",
            "Int4TilePackedTo4dTensor",
            "cannot be read, these can: Int8Tensor",
        ),
        ("torchao.int8_rowwise", "_type", "os.system", "cannot be read"),
        ("torchao.int8_rowwise", "reduce_range", True, "reduce_range is in no scheme"),
        ("torchao.int8_rowwise", "block_size", [1, 10**18], "not divisible"),
        ("torchao.int8_rowwise", "block_size", [0, 0], "positive length"),
        ("torchao.int8_rowwise", "dtype", "int8", "dtype is one of"),
        ("torchao.intx4_g32_bf16", "target_dtype", "int1", "int2 to int8"),
        ("torchao.intx4_g32_bf16", "activation_quantization", "float8", "is not known"),
    ],
)
def test_what_no_scheme_says(tmp_path, name, field, value, message):
    theirs = layer(dense())
    quantize_(theirs, CONFIGS[name])
    write(tmp_path / "valid", theirs)
    case = Case(
        {"model.safetensors": (tmp_path / "valid" / "model.safetensors").read_bytes()}, tmp_path / "other"
    )
    entry = described(case)
    (entry if field == "_type" else entry["_data"])[field] = value
    change(case, entry)
    case.write()
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(case.folder, layer(dense(1)))
    assert str(case.folder) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["torchao.int8_rowwise x torchao.int8_rowwise", "torchao.nvfp4", "torchao.intx4_g32_bf16"]
)
def test_descriptions_that_were_changed(tmp_path, name):
    """Any value of a description by any other: an error, or the same numbers."""
    theirs = layer(dense())
    if name in CONFIGS:
        quantize_(theirs, CONFIGS[name])
    else:
        theirs = layer(TENSORS[name](dense()))
    write(tmp_path / "valid", theirs)
    files = {"model.safetensors": (tmp_path / "valid" / "model.safetensors").read_bytes()}
    wanted = load_pretrained(tmp_path / "valid", layer(dense(1)))[0].weight.dequantize(torch.float32)
    counts = {"error": 0, "loaded": 0}
    for seed in range(150):
        rng = random.Random(seed)
        case = Case(files, tmp_path / "case")
        entry = described(case)
        path = rng.choice(places(entry))
        if seed % 10:
            at(entry, path[:-1])[path[-1]] = rng.choice(HOSTILE)
        change(case, rng.choice(TEXTS) if seed % 10 == 0 else entry)
        case.write()
        try:
            ours = load_pretrained(case.folder, layer(dense(1)))
        except ValueError as error:
            counts["error"] += str(case.folder) in str(error)
        else:
            assert torch.equal(ours[0].weight.dequantize(torch.float32), wanted), seed
            counts["loaded"] += 1
        shutil.rmtree(case.folder)
    assert counts["error"] > 60
    assert sum(counts.values()) == 150
