"""`quantize_pretrained`: the model of loading and quantizing, bit for bit, without the dense model ever being there."""

import gc
import json

import pytest
import torch
from torch import nn

from ao_lab import (
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NF4WeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    calibrate,
    explain,
    load_pretrained,
    quantize_,
    quantize_pretrained,
    save_pretrained,
)
from ao_lab.checkpoint.model_builder import parameters_without_memory
from ao_lab.quantization.api import StreamedWeights
from experiments.models.llama import LanguageModel, ModelSettings
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.compressed_folders import INT4, group

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("compressed_tensors")

pytestmark = [
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
TOKENS = torch.arange(20).reshape(2, 10)
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "vocab_size": 256, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", SIZES),
    "llama_tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "gpt2": ("GPT2", GPT2),
}
INT8 = Int8DynamicActivationInt8WeightConfig()


def everything(module, name):
    return isinstance(module, (nn.Linear, nn.Embedding)) or name.endswith("experts")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The models above, in bfloat16 and in shards."""
    transformers.utils.logging.disable_progress_bar()
    made = {}
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(0)
        suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        model = getattr(transformers, kind + suffix)(getattr(transformers, f"{kind}Config")(**sizes))
        made[name] = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16).save_pretrained(made[name], max_shard_size="200KB")
    assert len(list(made["llama"].glob("*.safetensors"))) > 2
    return made


def loaded(folder, **given):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **given})


def assert_same_model(one, two):
    """Parameters and buffers by bits, types and what is shared; reports; configurations; outputs."""
    first, second = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())} for m in (one, two)
    )
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert torch.equal(a, b), name
        assert (type(a), a.dtype, a.device, a.requires_grad) == (
            type(b),
            b.dtype,
            b.device,
            b.requires_grad,
        ), name
    assert shared(first) == shared(second)
    assert explain(one) == explain(two)
    assert one.training == two.training


def shared(tensors):
    names = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(names.values())


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("filter_fn", [None, everything])
def test_transformers_models_are_those_of_load_and_quantize(folders, name, filter_fn):
    told = []
    model = quantize_pretrained(folders[name], INT8, filter_fn, progress=lambda *given: told.append(given))
    other = loaded(folders[name])
    report = quantize_(other, INT8, filter_fn)
    assert_same_model(model, other)
    assert model.config.to_dict() == other.config.to_dict()
    assert vars(model).keys() == vars(other).keys()
    assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)
    distinct = {id(p) for p in model.parameters() if isinstance(p, QuantizedTensor)}
    assert [done for _, done, _ in told] == list(range(1, len(distinct) + 1))
    assert told[-1][2] == len(distinct)
    assert len(report.changed) >= len(distinct)


def test_weights_that_the_configuration_ties_and_the_folder_does_not(folders, tmp_path):
    """The folder decides, as it does for transformers."""
    model = loaded(folders["llama"])
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    made, other = quantize_pretrained(tmp_path, INT8, everything), loaded(tmp_path)
    quantize_(other, INT8, everything)
    assert made.lm_head.weight is not made.model.embed_tokens.weight
    assert_same_model(made, other)


def test_another_dtype_and_patterns(folders):
    config = FqnToConfig({"re:.*mlp.*": SchemeConfig(scheme="nf4"), "_default": Int8WeightOnlyConfig()})
    model = quantize_pretrained(folders["llama"], config, dtype=torch.float32)
    other = loaded(folders["llama"], dtype=torch.float32)
    quantize_(other, config)
    assert model.lm_head.weight.dtype == torch.float32
    assert_same_model(model, other)


def test_observers_of_the_dense_model(folders):
    config, dense = Int8StaticActivationInt8WeightConfig(), loaded(folders["llama"])
    observers = calibrate(dense, config, lambda m: m(TOKENS))
    model = quantize_pretrained(folders["llama"], config, observers=observers)
    quantize_(dense, config, observers=observers)
    assert_same_model(model, dense)
    with pytest.raises(ValueError, match="needs calibration"):
        quantize_pretrained(folders["llama"], config)


def test_the_dense_model_is_never_there(folders, monkeypatch):
    """Bytes of all tensors that live whenever a weight has been made: those of the result, and of one layer."""
    whole = sum(p.numel() * p.element_size() for p in loaded(folders["llama"]).parameters())
    gc.collect()
    most = []

    def progress(name, done, total):
        most.append(sum(t.untyped_storage().nbytes() for t in live()))

    # What is there already is none of its tensors: the collector lists the others only.
    gc.freeze()
    try:
        model = quantize_pretrained(folders["llama"], INT8, everything, progress=progress)
    finally:
        gc.unfreeze()
    kept = sum(p.numel() * p.element_size() for t in model.parameters() for p in parts(t))
    assert 0.5 * kept < max(most) < 0.75 * whole
    assert max(most) < kept + 4 * 256 * 128 * 2


def parts(t):
    return [p for p in t.parts.values() if p is not None] if isinstance(t, QuantizedTensor) else [t]


def live():
    """One tensor of every storage that lives."""
    found = {}
    for value in gc.get_objects():
        # Other tests leave fake tensors behind, which have no memory.
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            found[value.untyped_storage().data_ptr()] = value
    return list(found.values())


def test_what_fails_while_reading_is_raised_as_it_is(folders, monkeypatch):
    def fails(self, name, dense):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StreamedWeights, "parameter", fails)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        quantize_pretrained(folders["llama"], INT8)


def test_folders_that_cannot_be_read(folders, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        quantize_pretrained(tmp_path, INT8)
    with pytest.raises(ValueError, match="match nothing"):
        quantize_pretrained(folders["llama"], FqnToConfig({"nowhere": INT8}))
    model = quantize_pretrained(folders["llama"], INT8)
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="quantized already"):
        quantize_pretrained(tmp_path, INT8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_the_folder_lacks_are_not_made_up(folders, tmp_path):
    model = loaded(folders["llama"])
    state = {name: p for name, p in model.state_dict().items() if "up_proj" not in name}
    safetensors.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no weights for \['model\.layers\.0\.mlp\.up_proj\.weight'"):
        quantize_pretrained(tmp_path, INT8)


def build(**changes):
    torch.manual_seed(1)
    return LanguageModel(ModelSettings(layers=2, **changes))


def saved(folder, shards=1, **changes):
    """A model of our own, in safetensors files."""
    torch.manual_seed(0)
    model = LanguageModel(ModelSettings(layers=2, **changes)).to(torch.bfloat16)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    names = [f"model-{i}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        safetensors.save_file(dict(list(state.items())[i::shards]), folder / name)
    if shards > 1:
        index = {key: names[i % shards] for i, key in enumerate(state)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_models_of_ones_own(tmp_path, shards, dtype):
    source = saved(tmp_path, shards)
    model = quantize_pretrained(tmp_path, INT8, everything, build=build, dtype=dtype)
    other = build() if dtype is None else build().to(dtype)
    other.load_state_dict(source.state_dict())
    quantize_(other, INT8, everything)
    assert_same_model(model, other)
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(model(tokens), other(tokens))


class Tied(nn.Module):
    """A table that is the head, too, a buffer in the file and one that is not."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("made", torch.arange(4.0), persistent=False)


@pytest.mark.parametrize("stored", ["table.weight", "head.weight"])
def test_tied_weights_and_buffers(tmp_path, stored):
    weight = torch.randn(64, 32)
    safetensors.save_file({stored: weight, "kept": torch.zeros(3)}, tmp_path / "model.safetensors")
    model = quantize_pretrained(tmp_path, INT8, everything, build=Tied)
    assert model.head.weight is model.table.weight
    other = Tied()
    other.head.weight.data.copy_(weight)
    other.kept.zero_()
    quantize_(other, INT8, everything)
    assert_same_model(model, other)


def test_names_and_shapes_are_checked_before_anything_is_read(tmp_path, monkeypatch):
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"lacks \['model\.layers\.2"):
        quantize_pretrained(tmp_path, INT8, build=lambda: LanguageModel(ModelSettings(layers=3)))
    with pytest.raises(ValueError, match=r"which the model lacks"):
        quantize_pretrained(tmp_path, INT8, build=lambda: LanguageModel(ModelSettings(layers=1)))
    with pytest.raises(ValueError, match=r"has shape .* the model's is"):
        quantize_pretrained(tmp_path, INT8, build=lambda: build(width=128))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        quantize_pretrained(tmp_path / "other", INT8, build=build)

    def hollow():
        model = Tied()
        model.made = model.made.to("meta")
        return model

    safetensors.save_file(
        {"head.weight": torch.ones(64, 32), "kept": torch.zeros(3)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"\['made'\] are on the meta device"):
        quantize_pretrained(tmp_path, INT8, lambda module, name: name == "head", build=hollow)


def test_parameters_are_on_meta_inside_alone():
    with parameters_without_memory():
        model = Tied()
    assert model.table.weight.is_meta
    assert model.head.weight is model.table.weight
    assert model.made.tolist() == [0, 1, 2, 3]
    assert not nn.Linear(2, 2).weight.is_meta


def test_the_model_does_not_look_into_the_file(tmp_path):
    """Rewriting the folder afterwards changes nothing."""
    saved(tmp_path)
    model = quantize_pretrained(tmp_path, INT8, build=build, dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    with path.open("r+b") as file:
        file.seek(len(data) // 4)
        file.write(b"\x11" * (len(data) // 2))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# quantize_pretrained of folders that hold quantized weights.

QUANTIZED_INT8 = Int8WeightOnlyConfig()
PACKED = {"group_0": {**group({**INT4, "strategy": "group", "group_size": 32}), "format": "pack-quantized"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of another library, its head and one projection dense; the weights as the library makes them."""
    path = tmp_path_factory.mktemp("packed")
    model = made.apply(made.tiny_llama(), PACKED, ("lm_head", "re:.*down_proj"))
    return path, made.compress(model, path)


def test_what_is_quantized_stays_and_the_rest_is_quantized(folder, tmp_path):
    path, wanted = folder
    model = quantize_pretrained(path, QUANTIZED_INT8)
    loaded = load_pretrained(path)
    for name, dense in wanted.items():
        assert made.same_bits(model.get_parameter(name).dequantize(), dense)
    same = loaded
    quantize_(same, QUANTIZED_INT8)
    rest = {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)} - set(wanted)
    assert rest == {"lm_head.weight", "model.layers.0.mlp.down_proj.weight"}
    for name in rest:
        assert made.same_bits(model.get_parameter(name).dequantize(), same.get_parameter(name).dequantize())
    reasons = {layer.name: layer.reason for layer in explain(model).layers}
    assert all("compressed-tensors (pack-quantized)" in reasons[name] for name in wanted)
    assert all("Linear" in reasons[name] for name in rest)
    save_pretrained(model, tmp_path / "both")
    again = load_pretrained(tmp_path / "both")
    for name, p in model.named_parameters():
        if isinstance(p, QuantizedTensor):
            assert made.same_bits(again.get_parameter(name).dequantize(), p.dequantize())


def test_models_of_ones_own_are_quantized_further(folder):
    path, wanted = folder
    model = quantize_pretrained(path, QUANTIZED_INT8, build=made.tiny_llama, dtype=torch.bfloat16)
    assert {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)} > set(wanted)


@pytest.mark.parametrize("first", [True, False])
def test_a_folder_with_nothing_left_says_what_it_holds(folder, tmp_path, first):
    path = folder[0]
    if not first:
        save_pretrained(quantize_pretrained(path, QUANTIZED_INT8), tmp_path)
        path = tmp_path
    names = "re:.*up_proj.weight" if first else "re:.*_proj.weight"
    with pytest.raises(
        ValueError,
        match=r"quantized already: .* weights in .*stay as they are; give its unquantized base model\.$",
    ):
        quantize_pretrained(path, FqnToConfig({names: NF4WeightOnlyConfig()}))
    with pytest.raises(ValueError, match=r"quantized already: .*nowhere"):
        quantize_pretrained(path, FqnToConfig({"nowhere": QUANTIZED_INT8}))
