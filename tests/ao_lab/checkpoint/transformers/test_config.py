"""`HfConfig`: what `from_pretrained` quantizes while it reads is what `quantize_` makes of the loaded model, bit for bit."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    HfConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    NF4WeightOnlyConfig,
    QATConfig,
    QuantizedTensor,
    SchemeConfig,
    explain,
    quantize_,
    quantize_pretrained,
    save_pretrained,
)
from ao_lab.checkpoint.transformers.config import config_from, config_values
from ao_lab.cli.layout import SkippedLayers
from ao_lab.config import base
from ao_lab.transforms.layers import linear_and_experts

transformers = pytest.importorskip("transformers")
from tests.support.models.hf_models import KINDS, assert_same_weights, dense_model, outputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.utils.logging.disable_progress_bar()
INT8 = Int8WeightOnlyConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small dense Llama in shards, in bfloat16."""
    made = tmp_path_factory.mktemp("llama")
    dense_model("LlamaForCausalLM", torch.bfloat16)[0].save_pretrained(made, max_shard_size="200KB")
    assert len(list(made.glob("*.safetensors"))) > 1
    return made


def load(folder, config, kind="LlamaForCausalLM", **given):
    return getattr(transformers, kind).from_pretrained(folder, quantization_config=config, **given)


def without_routers(module, name):
    """linear_and_experts, and heads that are tied to the embedding."""
    return linear_and_experts(module, name)


without_routers.leaves_routers = True


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_every_architecture(kind, tmp_path):
    """All linear layers and experts, heads and tied weights too where nothing is to stay."""
    model, inputs = dense_model(kind)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    again = getattr(transformers, kind).from_pretrained(tmp_path)
    quantize_(again, NF4WeightOnlyConfig(), without_routers)
    read = load(tmp_path, HfConfig(NF4WeightOnlyConfig(), []), kind)
    assert_same_weights(again, read)
    assert [(one.name, one.scheme) for one in explain(again).layers] == [
        (o.name, o.scheme) for o in explain(read).layers
    ]
    assert torch.equal(outputs(again, inputs), outputs(read, inputs))


CONFIGS = [
    Int4WeightOnlyConfig(group_size=32), Int8DynamicActivationInt8WeightConfig(), NF4WeightOnlyConfig(),
    Float8DynamicActivationFloat8WeightConfig(), SchemeConfig(scheme="mxfp4"), SchemeConfig(scheme="nvfp4"),
    Int8StaticActivationInt8WeightConfig(act_quant_scale=0.05),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{type(c).__name__}-{c.recipe().weight.name}")
def test_every_configuration(config, folder, tmp_path):
    """Without names the layers of `quantize_`; saved and read again nothing changes."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder)
    quantize_(dense, config)
    read = load(folder, HfConfig(config))
    assert_same_weights(dense, read)
    read.save_pretrained(tmp_path)
    assert_same_weights(dense, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("tied", [True, False, "folder"])
def test_every_door_takes_the_same_layers(tied, tmp_path):
    """quantize_, quantize_pretrained, HfConfig and ao-lab quantize: a head of its own, and none that is tied. Whether it is can
    be known from the folder alone."""
    model, _ = dense_model("LlamaForCausalLM", tie_word_embeddings=tied is True)
    model.save_pretrained(tmp_path)
    if tied == "folder":
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize_(model, INT8)
    found = [
        {one.name for one in explain(made).changed}
        for made in (
            model,
            quantize_pretrained(tmp_path, INT8),
            load(tmp_path, HfConfig(INT8)),
            quantize_pretrained(tmp_path, INT8, SkippedLayers(None)),
        )
    ]
    assert found == [found[0]] * 4
    assert ("lm_head.weight" in found[0]) == (model.lm_head.weight is not model.model.embed_tokens.weight)


def test_which_layers(folder):
    """Names as transformers understands them; FqnToConfig names its own."""
    names = [
        name for name, m in dense_model("LlamaForCausalLM")[0].named_modules() if isinstance(m, nn.Linear)
    ]

    def dense(config):
        return [
            n
            for n, m in load(folder, config).named_modules()
            if n in names and type(m.weight) is nn.Parameter
        ]

    assert dense(HfConfig("int8_rowwise", ["lm_head"])) == ["lm_head"]
    assert dense(HfConfig("int8_rowwise")) == dense(HfConfig("int8_rowwise", [])) == []
    assert dense(HfConfig("int8_rowwise", ["q_proj", "mlp"])) == ["model.layers.0.self_attn.q_proj"]
    assert dense(HfConfig("int8_rowwise", ["model.layers.0.mlp"])) == names[4:7]
    fqn = FqnToConfig({"lm_head": INT8, r"re:.*mlp\..*": NF4WeightOnlyConfig()})
    assert dense(HfConfig(fqn)) == names[:4]
    with pytest.raises(ValueError, match="FqnToConfig names the layers itself"):
        HfConfig(fqn, ["lm_head"])
    with pytest.raises(ValueError, match="refused by filter_fn"):
        load(folder, HfConfig("int8_rowwise", [".*"]))


def test_experts(tmp_path):
    """Batched experts are quantized unless they are to stay; routers stay."""
    dense_model("MixtralForCausalLM")[0].save_pretrained(tmp_path)
    for experts in (True, False):
        read = load(tmp_path, HfConfig(INT8, experts=experts), "MixtralForCausalLM")
        block = read.model.layers[0].mlp
        assert isinstance(block.experts.gate_up_proj, QuantizedTensor) == experts
        assert not isinstance(block.gate.weight, QuantizedTensor)
        assert isinstance(read.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)


def test_loading_options(folder):
    """dtype, another head, a description as a dictionary."""
    whole = load(folder, HfConfig(INT8), dtype=torch.float32)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantize_(dense, INT8)
    assert_same_weights(dense, whole)
    trunk = transformers.AutoModel.from_pretrained(folder, quantization_config=HfConfig(INT8))
    assert isinstance(trunk.layers[0].mlp.up_proj.weight, QuantizedTensor)
    made = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, quantization_config=HfConfig(INT8)
    )
    assert_same_weights(trunk, made.model)
    by_dict = transformers.AutoModel.from_pretrained(folder, quantization_config=HfConfig(INT8).to_dict())
    assert_same_weights(trunk, by_dict)


def test_device_maps(folder):
    pytest.importorskip("accelerate", reason="transformers needs it for device_map")
    for device_map in ("cpu", "auto", {"": "cpu"}):
        read = load(folder, HfConfig(INT8), device_map=device_map)
        assert_same_weights(load(folder, HfConfig(INT8)), read)
    with pytest.raises(ValueError, match="without 'disk'"):
        load(folder, HfConfig(INT8), device_map={"": "disk"})


def test_what_is_wrong(folder, tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="takes a configuration of ao_lab or the name of a scheme, got int"):
        HfConfig(3)
    with pytest.raises(TypeError, match="is a list of names"):
        HfConfig(INT8, "lm_head")
    with pytest.raises(ValueError, match="no_such"):
        HfConfig("no_such")
    with pytest.raises(ValueError, match="QATConfig trains"):
        HfConfig(QATConfig(INT8))
    with pytest.raises(ValueError, match="give act_quant_scale"):
        HfConfig(Int8StaticActivationInt8WeightConfig())
    with pytest.raises(ValueError, match="names no configuration"):
        load(folder, HfConfig())
    save_pretrained(load(folder, HfConfig(NF4WeightOnlyConfig())), tmp_path, layout="ao_lab")
    with pytest.warns(UserWarning, match="from the model will be used"):
        again = load(tmp_path, HfConfig(INT8))
    assert again.model.layers[0].mlp.up_proj.weight.recipe.weight.name == "nf4"

    def fails(self, name, dense):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ao_lab.quantization.api.StreamedWeights, "parameter", fails)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        load(folder, HfConfig(INT8))


def public_configs():
    """One of each class, with something else than its defaults where it has any."""
    given = {
        "SchemeConfig": {"scheme": ao_lab.SCHEMES["mxfp4"], "activation_scheme": "mxfp8_e4m3", "kernel": "dequantize"},
        "IntxWeightOnlyConfig": {
            "weight_dtype": torch.int4, "granularity": ao_lab.PerGroup(64), "mapping_type": ao_lab.MappingType.ASYMMETRIC,
        },
        "LowBitWeightOnlyConfig": {},
        "Int8StaticActivationInt8WeightConfig": {"act_quant_scale": torch.tensor(0.1)},
        "Float8StaticActivationFloat8WeightConfig": {"act_quant_scale": 0.1},
        "Float8DynamicActivationFloat8WeightConfig": {"granularity": (ao_lab.PerTensor(), ao_lab.PerTensor())},
    }  # fmt: skip
    names = [name for name in base.CONFIGS if name in ao_lab.__all__ and name != "SchemeConfig"]
    return [getattr(ao_lab, name)(**given.get(name, {})) for name in names]


@pytest.mark.parametrize("config", public_configs(), ids=lambda c: type(c).__name__)
def test_json_round_trip(config):
    values = json.loads(json.dumps(config_values(config)))
    again = config_from(values)
    assert type(again) is type(config)
    assert again.recipe() == config.recipe()
    assert config_values(again) == values
    whole = HfConfig(FqnToConfig({"re:a.*": config, "b": None}))
    assert HfConfig.from_dict(json.loads(whole.to_json_string())) == whole
    one = HfConfig(config, ["lm_head"], experts=False)
    assert HfConfig.from_dict(one.to_dict()) == one
    assert HfConfig.from_dict(dict(one), return_unused_kwargs=True, other=1) == (one, {"other": 1})
    assert hash(one) == hash(copy.deepcopy(one))


def test_the_object(tmp_path):
    config = HfConfig("nf4", ["lm_head"], experts=False)
    assert repr(config) == f"HfConfig({SchemeConfig(scheme='nf4')!r}, ['lm_head'], experts=False)"
    assert repr(HfConfig(INT8)) == f"HfConfig({INT8!r})"
    assert repr(HfConfig(weights="ao_lab.safetensors")) == "HfConfig(weights='ao_lab.safetensors')"
    config.to_json_file(tmp_path / "config.json")
    assert HfConfig.from_dict(json.loads((tmp_path / "config.json").read_text())) == config
    assert config.update(config=None) == {"config": None}
    assert HfConfig("nf4") != HfConfig("mxfp4")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "ao_lab", "version": 1, "other": 2}, "no field other"),
        ({"quant_method": "gptq", "version": 1}, "quant_method is ao_lab"),
        ({"quant_method": "ao_lab"}, "install another ao_lab"),
        ({"quant_method": "ao_lab", "config": {"class": "QuantizedTensor"}}, "with the name of its class"),
        ({"quant_method": "ao_lab", "config": {"class": "os.system", "x": 1}}, "with the name of its class"),
        ({"quant_method": "ao_lab", "config": {"class": "SchemeConfig", "other": 1}}, "no field other"),
        (
            {"quant_method": "ao_lab", "config": {"class": "SchemeConfig", "scheme": {"a": 1}}},
            "no value of a conf",
        ),
        ({"quant_method": "ao_lab", "config": {"class": "FqnToConfig", "fqn_to_config": 3}}, "is an object"),
        ({"quant_method": "ao_lab", "config": "nf4"}, "with the name of its class"),
    ],
)
def test_descriptions_that_are_none(values, message):
    with pytest.raises(ValueError, match=message):
        HfConfig.from_dict(values)


def test_what_json_cannot_hold():
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        config_values(Int8StaticActivationInt8WeightConfig(act_quant_scale=0.1, statistic=lambda: None))

    class Own(type(INT8), registered=False):
        pass

    with pytest.raises(ValueError, match="no configuration that ao_lab can name"):
        HfConfig(Own())


def test_copies(folder):
    """Copies, pickles, dtypes and dense models of a quantized one."""
    model = load(folder, HfConfig(IntxWeightOnlyConfig("int4", ao_lab.PerGroup(32))))
    inputs = {"input_ids": torch.arange(6)[None]}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_weights(model, other)
        assert torch.equal(outputs(model, inputs), outputs(other, inputs))
        assert other.is_quantized
        assert other.hf_quantizer.given == model.hf_quantizer.given
    wide = copy.deepcopy(model).to(torch.float32)
    assert wide.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    dense = copy.deepcopy(model)
    dense.dequantize()
    weight, numbers = (m.model.layers[0].mlp.up_proj.weight for m in (model, dense))
    assert not any(isinstance(p, QuantizedTensor) for p in dense.parameters())
    assert torch.equal(numbers, weight.dequantize())
    assert not dense.is_quantized
