"""config_groups of any author: which group is a layer's, what is refused, and damaged folders."""

import pytest
import torch

import fast
from ao_lab import (
    Float8DynamicActivationFloat8WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4WeightOnlyConfig,
    QuantizedTensor,
    explain,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from reference import SCHEMES, Scales
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.compressed_folders import FP8, INT4, INT8, NVFP4, group

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
GROUP32 = {**INT4, "strategy": "group", "group_size": 32}
PACKED = {**group(GROUP32), "format": "pack-quantized"}
TOKEN = {**FP8, "strategy": "token", "dynamic": True}
FLOAT = {**group({**FP8, "strategy": "channel"}, TOKEN), "format": "float-quantized"}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed folder, which tests copy, and the weights that it has."""
    path = tmp_path_factory.mktemp("packed")
    return path, made.compress(made.apply(made.tiny_llama(), {"group_0": PACKED}), path)


@pytest.fixture
def folder(packed, tmp_path):
    """A copy of it."""
    for file in packed[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def check(model, wanted):
    state = model.state_dict()
    assert {name for name, value in state.items() if isinstance(value, QuantizedTensor)} == set(wanted)
    for name, dense in wanted.items():
        assert made.same_bits(state[name].dequantize(dense.dtype), dense), name


def test_groups_by_name_by_expression_and_by_class(tmp_path):
    groups = {
        "attention": {**FLOAT, "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"]},
        "one": {**group({**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True}, [UP]),
                "format": "int-quantized"},
        "rest": PACKED,
    }  # fmt: skip
    wanted = made.compress(made.apply(made.tiny_llama(), groups, ("re:.*down_proj", "lm_head")), tmp_path)
    model = load_pretrained(tmp_path)
    check(model, wanted)
    reasons = {layer.name: layer.reason for layer in explain(model).changed}
    assert "float-quantized" in reasons["model.layers.0.self_attn.q_proj.weight"]
    assert "int-quantized" in reasons[f"{UP}.weight"]
    assert "pack-quantized" in reasons["model.layers.0.mlp.gate_proj.weight"]


def test_a_quantized_table_and_quantized_layers(tmp_path):
    groups = {
        "tables": {**PACKED, "targets": ["Embedding"]},
        "layers": {**group({**INT8, "strategy": "channel"}, None), "format": "naive-quantized"},
    }
    wanted = made.compress(made.apply(made.tiny_llama(), groups), tmp_path)
    assert "model.embed_tokens.weight" in wanted
    check(load_pretrained(tmp_path), wanted)


def test_heads_that_are_tied_have_no_tensor_of_their_own(tmp_path):
    wanted = made.compress(made.apply(made.tiny_llama(tied=True), {"group_0": PACKED}), tmp_path)
    model = load_pretrained(tmp_path)
    check(model, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_models_that_the_caller_builds(packed):
    model = made.tiny_llama(seed=3)
    assert load_pretrained(packed[0], model) is model
    check(model, packed[1])


def test_a_key_value_cache_is_left_out_and_said(tmp_path):
    cache = {**FP8, "strategy": "tensor", "dynamic": False}
    model = made.apply(made.tiny_llama(), {"group_0": PACKED}, kv_cache_scheme=cache)
    for layer in model.model.layers:
        # compressed-tensors 0.20 gives attention none whose cache has the name of transformers 5.24.
        for name in ("k_scale", "v_scale"):
            if not hasattr(layer.self_attn, name):
                layer.self_attn.register_parameter(name, torch.nn.Parameter(torch.ones(1)))
    wanted = made.compress(model, tmp_path)
    with pytest.warns(UserWarning, match=r"2 tensors .* were left out .*self_attn\.k_scale.*key-value cache"):
        model = load_pretrained(tmp_path)
    check(model, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_of_another_dtype_than_the_model(tmp_path, dtype):
    model = made.apply(made.tiny_llama(), {"group_0": PACKED})
    wanted = made.compress(model, tmp_path, scales=dtype)
    loaded = load_pretrained(tmp_path)
    check(loaded, wanted)
    with torch.no_grad():
        assert loaded(torch.arange(6).reshape(1, 6)).logits.dtype == torch.bfloat16


def test_a_layer_computes_what_the_library_computes(tmp_path):
    """Inputs and weights of NVFP4, float8 and int8, static and dynamic: the same bits as the library's own forward."""
    cases = {
        "nvfp4": {**group(NVFP4, {**NVFP4, "dynamic": "local"}), "format": "nvfp4-pack-quantized"},
        "fp8 static": {**group({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}), "format": "float-quantized"},
        "fp8 tokens": FLOAT,
        "int8 tokens": {**group({**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True}),
                        "format": "int-quantized"},
    }  # fmt: skip
    for name, description in cases.items():
        path = tmp_path / name
        model = made.apply(made.tiny_llama(), {"group_0": description})
        made.compress(model, path)
        x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        with torch.no_grad():
            model(torch.arange(6).reshape(1, 6))  # decompresses the library's model
            wanted = model.get_submodule(UP)(x)
            got = load_pretrained(path).get_submodule(UP)(x)
        assert made.same_bits(got, wanted), name


def test_static_scales_of_nvfp4_inputs_are_those_of_the_second_level(tmp_path):
    description = {**group(NVFP4, {**NVFP4, "dynamic": "local"}), "format": "nvfp4-pack-quantized"}
    made.compress(made.apply(made.tiny_llama(), {"group_0": description}), tmp_path)
    weight = load_pretrained(tmp_path).get_submodule(UP).weight
    assert weight.input_scales.scale is None
    assert weight.input_scales.outer.item() == 311.0
    x = torch.randn(4, 128).to(torch.bfloat16)
    seen = fast.fake_quantize(
        x, SCHEMES["compressed_tensors.nvfp4"], scales=Scales(None, torch.tensor(311.0))
    )
    with torch.no_grad():
        assert made.same_bits(
            torch.nn.functional.linear(x, weight), torch.nn.functional.linear(seen, weight.dequantize())
        )


@pytest.mark.parametrize(
    "config",
    [
        Int8DynamicActivationInt8WeightConfig(),
        Float8DynamicActivationFloat8WeightConfig(),
        Int4WeightOnlyConfig(group_size=64),
        MXDynamicActivationMXWeightConfig(),
        NVFP4WeightOnlyConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_our_own_folders_without_our_records_are_those_of_any_author(tmp_path, config):
    """Another program that rewrites the files keeps no metadata: tensors and config.json say enough."""
    model = made.tiny_llama()
    quantize_(model, config.for_layout("compressed-tensors"))
    save_pretrained(model, tmp_path, layout="compressed-tensors")
    wanted = {
        name: p.dequantize(torch.bfloat16)
        for name, p in model.named_parameters()
        if isinstance(p, QuantizedTensor)
    }
    made.edit_tensors(tmp_path, lambda tensors: None)
    check(load_pretrained(tmp_path), wanted)


def test_methods_without_a_reader_and_without_their_metadata(folder):
    made.edit_config(folder, whole(quant_method="exl3"))
    with pytest.raises(
        ValueError, match=r"quant_method exl3 is not supported, these are: .*compressed-tensors.*torchao"
    ):
        load_pretrained(folder)
    made.edit_config(folder, whole(quant_method="torchao"))
    with pytest.raises(ValueError, match="says that torchao wrote it, but its files have no tensor_names"):
        load_pretrained(folder)
    made.edit_config(folder, lambda given: [1])
    with pytest.raises(ValueError, match=r"quantization_config of .* is an object"):
        load_pretrained(folder)


def orders():
    """Group indices of 128 columns in groups of 32: none, the plain one, runs of 16, and scattered columns."""
    plain = torch.arange(128) // 32
    runs = plain.reshape(-1, 16)[torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])].flatten()
    return {
        "none": torch.full((128,), -1), "plain": plain, "runs": runs,
        "scattered": plain[torch.randperm(128, generator=torch.Generator().manual_seed(0))],
    }  # fmt: skip


@pytest.mark.parametrize("order", ["none", "plain", "runs"])
def test_groups_in_an_order_of_activations(folder, packed, order):
    """g_idx of earlier versions: column c has the scale of group g_idx[c]."""
    g_idx = orders()[order].to(torch.int32)
    made.edit_tensors(folder, put("weight_g_idx", g_idx))
    weight = load_pretrained(folder).get_submodule(UP).weight
    tensors = {}
    made.edit_tensors(folder, lambda found: tensors.update(found))
    scale = tensors[f"{UP}.weight_scale"]
    groups = (torch.arange(128) // 32 if order == "none" else g_idx).long()
    plain = load_pretrained(packed[0]).get_submodule(UP).weight
    codes = plain.dequantize(torch.float32) / scale.float().repeat_interleave(32, 1)
    assert made.same_bits(weight.dequantize(), codes.round().to(torch.bfloat16) * scale[:, groups])
    assert weight.scheme.scale.block == {"none": 32, "plain": 32, "runs": 16}[order]


def test_scattered_groups_take_more_than_the_dense_weight(folder):
    made.edit_tensors(folder, put("weight_g_idx", orders()["scattered"].to(torch.int32)))
    with pytest.raises(
        ValueError, match=r"up_proj.*runs of 1: scales for these take more than the dense weight"
    ):
        load_pretrained(folder)


def put(name, value):
    return lambda tensors: tensors.update({f"{UP}.{name}": value})


def drop(name):
    def change(tensors):
        del tensors[f"{UP}.{name}"]

    return change


TENSORS = {
    "no scales": (drop("weight_scale"), "has a weight_scale, which the files lack"),
    "no codes": (drop("weight_packed"), "has a weight_packed, which the files lack"),
    "scales of another count": (put("weight_scale", torch.ones(256, 3, dtype=torch.bfloat16)), "weight_scale is"),
    "scales of integers": (put("weight_scale", torch.ones(256, 4, dtype=torch.int32)), "scales are float32"),
    "codes of bytes": (put("weight_packed", torch.zeros(256, 64, dtype=torch.uint8)), "weight_packed|weight_shape"),
    "codes of one axis": (put("weight_packed", torch.zeros(256, dtype=torch.int32)), "weight_packed is a matrix"),
    "another shape": (put("weight_shape", torch.tensor([256, 96])), "weight_shape says"),
    "a negative shape": (put("weight_shape", torch.tensor([256, -128])), "weight_shape says"),
    "a shape of floats": (put("weight_shape", torch.tensor([256.0, 128.0])), "weight_shape"),
    "a shape of many": (put("weight_shape", torch.ones(100, dtype=torch.int64)), "weight_shape"),
    "zero points": (put("weight_zero_point", torch.ones(256, 4, dtype=torch.int8)), "zero points that are not 0"),
    "a global scale": (put("weight_global_scale", torch.ones(1)), "is no tensor of pack-quantized"),
    "static inputs": (put("input_scale", torch.ones(1)), "belongs to static inputs"),
    "an order that names no group": (put("weight_g_idx", torch.full((128,), 9, dtype=torch.int32)), "g_idx names groups"),
    "an order of floats": (put("weight_g_idx", torch.zeros(128)), "g_idx has an integer"),
    "an order of other columns": (put("weight_g_idx", torch.zeros(64, dtype=torch.int32)), "weight_g_idx is"),
    "an unknown tensor": (put("weight_scale_2", torch.ones(1)), "which the model lacks"),
    "a weight beside its codes": (put("weight", torch.ones(256, 128)), "weight is no tensor of pack-quantized"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_damaged_tensors_are_one_error_and_change_nothing(folder, name):
    change, message = TENSORS[name]
    made.edit_tensors(folder, change)
    model = made.tiny_llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(folder, model)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def groups(**change):
    return lambda given: {
        **given,
        "config_groups": {"group_0": {**given["config_groups"]["group_0"], **change}},
    }


def weights(**change):
    def edit(given):
        found = given["config_groups"]["group_0"]
        return {**given, "config_groups": {"group_0": {**found, "weights": {**found["weights"], **change}}}}

    return edit


def whole(**change):
    return lambda given: {**given, **change}


CONFIGS = {
    "transforms": (whole(transform_config={"config_groups": {"u": {}}}), "has a transform_config"),
    "sparse weights": (whole(sparsity_config={"format": "sparse-24-bitmask"}), "has a sparsity_config"),
    "a status before": (whole(quantization_status="frozen"), "not stored quantized"),
    "no groups": (whole(config_groups={}), "describes its weights in config_groups"),
    "groups of a list": (whole(config_groups=[1]), "describes its weights in config_groups"),
    "a preset": (whole(config_groups={"W4A16": ["Linear"]}), "names of presets"),
    "an unknown format": (groups(format="marlin-24"), "format marlin-24 is none of"),
    "a format of numbers": (groups(format=3), "format is the name of one"),
    "another format": (groups(format="nvfp4-pack-quantized"), "weight_packed|scale"),
    "no targets": (groups(targets="Linear"), "targets is a list of names"),
    "targets of numbers": (groups(targets=[1]), "targets is a list of names"),
    "other targets": (groups(targets=["re:nothing.*"]), "no group of quantization_config is for it"),
    "an expression that is none": (groups(targets=["re:("]), "is no regular expression"),
    "an expression of backreferences": (groups(targets=[r"re:(a)\1"]), "not supported"),
    "a layer that is ignored": (whole(ignore=[UP]), "no group of quantization_config is for it"),
    "ignored numbers": (whole(ignore=[1]), "ignore is a list of names"),
    "quantized outputs": (groups(output_activations={"num_bits": 8}), "quantizes outputs"),
    "inputs of text": (groups(input_activations="int8"), "input_activations is an object"),
    "inputs with zero points": (
        groups(input_activations={"num_bits": 8, "symmetric": False, "strategy": "token", "dynamic": True}),
        "zero points of inputs",
    ),
    "inputs in other groups": (
        groups(input_activations={"num_bits": 8, "strategy": "group", "group_size": 96, "dynamic": True}), "not divisible",
    ),
    "static inputs without scales": (groups(input_activations={"num_bits": 8, "strategy": "tensor"}), "static inputs have a"),
    "weights of text": (groups(weights="int4"), "weights is an object"),
    "bits of text": (weights(num_bits="4"), "num_bits is int"),
    "bits of one": (weights(num_bits=1), "no elements|weight_packed"),
    "bits beyond": (weights(num_bits=64), "no elements"),
    "an unknown type": (weights(type="complex"), "type int or float"),
    "a float in words": (weights(type="float"), "no elements"),
    "an unknown strategy": (weights(strategy="attn_head"), "strategy is one of"),
    "groups without a size": (weights(group_size=None), "groups have a group_size"),
    "groups of nothing": (weights(group_size=0), "groups have a group_size"),
    "groups that do not divide": (weights(group_size=48), "weight_|not divisible"),
    "a block of text": (weights(strategy="block", block_structure="128"), "block_structure is"),
    "a block that is huge": (weights(strategy="block", block_structure=[2**40, 1]), "block_structure is"),
    "asymmetric without zero points": (weights(symmetric=False), "weight_zero_point is"),
    "symmetric as text": (weights(symmetric="yes"), "symmetric is bool"),
    "dynamic weights": (weights(dynamic=True), "static"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_descriptions_are_one_error(folder, name):
    change, message = CONFIGS[name]
    made.edit_config(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
