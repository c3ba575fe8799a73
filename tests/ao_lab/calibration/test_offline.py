"""The residual stream rotated for good: the same function in float64, plain folders, and what is refused before any change."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fast
from ao_lab import SchemeConfig, explain, load_pretrained, quantize_, save_pretrained
from ao_lab.calibration import offline
from ao_lab.calibration.heads import Head
from ao_lab.calibration.methods import GPTQ, Clip, Rotate
from ao_lab.calibration.offline import Wide, rotate_residual
from ao_lab.transforms.data import calibrating
from ao_lab.transforms.walk import find_blocks
from tests.ao_lab.calibration.test_equivalence import SharedValues
from tests.ao_lab.calibration.test_run import INT4, inputs, stack

transformers = pytest.importorskip("transformers")
IDS = torch.arange(4 * 24).reshape(4, 24) % 90
SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64}
MODELS = {
    "Llama": {},
    "Llama, square and tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "Llama, biased": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
}


def model_of(name, **more):
    kind = name.split(",")[0]
    options = {**SIZES, **HEADS, **MODELS.get(name, {}), **more}
    if kind == "Qwen2":
        options.pop("head_dim")
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # gains and biases that do something
            parameter.data += 0.5 * torch.randn_like(parameter)
    return model


def rotated(model, **options):
    with Wide(), calibrating(model):
        return rotate_residual(model, find_blocks(model), {"input_ids": IDS}, **options)


def logits(model):
    with Wide(), torch.no_grad():
        return model(IDS).logits


NIGHTLY = ("Qwen2", "Qwen3", "Mixtral")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in MODELS]
)
def test_the_function_is_the_same_in_float64(name):
    """Gains are folded, square weights find their roles, a tied head gets its own weight, biases of writers go along."""
    model = model_of(name)
    wanted, before = logits(model), copy.deepcopy(model)
    told = rotated(model)
    assert (logits(model) - wanted).abs().max() < 1e-12 * wanted.abs().max() * 100
    assert told.worst < 1e-12
    tied = MODELS[name].get("tie_word_embeddings", False)
    assert told.untied == (96 * 48 * 8 if tied else 0)
    for full, parameter in model.named_parameters():
        norm = full.endswith("norm.weight") and parameter.shape == (48,)
        if norm:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name == "Gemma" else 1.0))
        elif (
            "q_norm" not in full
            and "k_norm" not in full
            and (not full.endswith("bias") or full.endswith(("o_proj.bias", "down_proj.bias")))
        ):
            assert not torch.equal(parameter, before.get_parameter(full)), full


@pytest.mark.parametrize(
    ("name", "more", "size"),
    [
        ("Llama, biased", {}, 12),
        ("Phi3", {"pad_token_id": 0}, 12),
        pytest.param("Llama", {"head_dim": 14}, 2, marks=pytest.mark.nightly),
        pytest.param("Qwen3Moe", {"head_dim": 20}, 20, marks=pytest.mark.nightly),
    ],
)
def test_values_are_rotated_by_head_and_the_output_projection_with_them(name, more, size):
    """Of grouped queries, with biases, in joined projections; by the Hadamard matrix of a head's width, m 2^k, or of pairs."""
    plain, heads = model_of(name, **more), model_of(name, **more)
    wanted = logits(plain)
    assert rotated(plain, heads=False).heads == ()
    told = rotated(heads)
    assert (logits(heads) - wanted).abs().max() < 1e-10 * wanted.abs().max()
    assert told.heads == ((size, 2),)
    assert f"values by heads of {size} in 2 blocks" in str(told)
    for one, other in zip(plain.model.layers, heads.model.layers, strict=True):
        a, b = one.self_attn, other.self_attn
        inner = a.o_proj.weight
        assert torch.allclose(b.o_proj.weight, fast.rotate(inner, size), atol=1e-12)
        v, turned = (m.qkv_proj if name == "Phi3" else m.v_proj for m in (a, b))
        count = 2 * a.head_dim
        assert torch.equal(turned.weight[:-count], v.weight[:-count])
        assert torch.allclose(
            turned.weight[-count:], fast.rotate(v.weight[-count:], size, axis=0), atol=1e-12
        )
        if v.bias is not None:
            assert torch.allclose(turned.bias[-count:], fast.rotate(v.bias[-count:], size), atol=1e-12)
        for full, parameter in other.mlp.named_parameters():
            assert torch.equal(parameter, one.mlp.get_parameter(full)), (
                "a gate lies between, no rotation holds"
            )


@pytest.mark.parametrize("name", ["Llama, square and tied", "GPT2"])
def test_values_alone_are_rotated_without_the_stream(name):
    """Also where norms have biases; weights are stored (in, out) there, and values are the last of a joined projection."""
    if name == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=48, n_head=4, n_layer=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).double().eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    else:
        model = model_of(name)
    wanted, before = logits(model), copy.deepcopy(model)
    with Wide(), calibrating(model):
        told = rotate_residual(model, find_blocks(model), {"input_ids": IDS}, stream=False)
    assert (logits(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()
    assert (told.block, told.untied, told.heads) == (0, 0, ((12, 2),))
    changed = {
        full.partition(".attn." if name == "GPT2" else ".self_attn.")[2]
        for full, p in model.named_parameters()
        if not torch.equal(p, before.get_parameter(full))
    }
    assert changed == (
        {"c_attn.weight", "c_attn.bias", "c_proj.weight"}
        if name == "GPT2"
        else {"v_proj.weight", "o_proj.weight"}
    )


def test_values_that_other_blocks_read_are_not_rotated():
    model, x = SharedValues().double(), torch.randn(3, 5, 16, dtype=torch.float64)
    before = copy.deepcopy(model)
    with calibrating(model):
        told = rotate_residual(
            model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)}, x, stream=False
        )
        assert (model(x) - before(x)).abs().max() < 1e-12
    assert told.heads == ((8, 1),)
    assert not torch.equal(model.blocks[0].v.weight, before.blocks[0].v.weight)


def test_a_model_without_heads_is_refused(monkeypatch):
    monkeypatch.setattr(offline, "find_heads", lambda *args: [])
    model = model_of("Llama")
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="no block has values and an output projection"), calibrating(model):
        rotate_residual(model, find_blocks(model), {"input_ids": IDS}, stream=False)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_what_is_done_to_a_block_is_proved_as_a_whole(monkeypatch):
    """Whatever finds heads: between these lies a gate."""
    wrong = Head("mlp.up_proj", "mlp.down_proj", 0, 80, 2)
    monkeypatch.setattr(offline, "find_heads", lambda *args: [wrong])
    model = model_of("Llama")
    wanted = logits(model)
    told = rotated(model)
    assert told.heads == ()
    assert told.worst < 1e-12
    assert (logits(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_channels_of_blocks():
    model = model_of("Llama")
    wanted, table = logits(model), model.model.embed_tokens.weight.clone()
    assert rotated(model, size=12).block == 12
    assert (logits(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()
    turned = model.model.embed_tokens.weight.reshape(96, 4, 12).norm(dim=-1)
    torch.testing.assert_close(turned, table.reshape(96, 4, 12).norm(dim=-1))


def test_a_plain_folder_holds_it(tmp_path):
    """In compressed-tensors, read by plain transformers; outliers are gone, and the report says what was done."""
    pytest.importorskip("compressed_tensors")
    model = model_of("Llama, square and tied").float()
    config = SchemeConfig(scheme="int4_g16").for_layout("compressed-tensors")
    report = quantize_(
        model, config, calibration=[{"input_ids": IDS}] * 3, methods=(Rotate("offline"), Clip(), GPTQ())
    )
    assert "the residual stream is rotated by blocks of 48" in str(report)
    assert "an untied head adds 18432 bytes" in str(report)
    assert model.config.tie_word_embeddings is False
    assert save_pretrained(model, tmp_path).layout == "compressed-tensors"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert torch.equal(plain(IDS).logits, ours(IDS).logits)
    assert torch.equal(ours(IDS).logits, model(IDS).logits)
    assert str(explain(model)) == str(report)


def test_the_first_batch_counts_as_data_too():
    """It is looked at first, and is part of the calibration as ever, also of an iterator."""
    one, two = model_of("Llama").float(), model_of("Llama").float()
    data = [{"input_ids": IDS}, {"input_ids": IDS.flip(0)}]
    methods = (Rotate("offline"), Clip())
    quantize_(one, SchemeConfig(scheme="int4_g16"), calibration=iter(data), methods=methods)
    report = quantize_(two, SchemeConfig(scheme="int4_g16"), calibration=data, methods=methods)
    assert all(map(torch.equal, map(plain, one.parameters()), map(plain, two.parameters())))
    assert report.changed[0].calibrated.tokens + report.changed[0].calibrated.held_out == 2 * 96


def plain(parameter):
    return parameter.dequantize() if hasattr(parameter.data, "dequantize") else parameter.data


class Scaled(nn.Module):
    """A norm behind a branch."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.post = inner, nn.RMSNorm(48)

    def forward(self, *args, **kwargs):
        return self.post(self.inner(*args, **kwargs))


def with_norm_after_a_branch(model):
    for layer in model.model.layers:
        layer.mlp.down_proj = Scaled(layer.mlp.down_proj).double()
        layer.mlp.down_proj.post.weight.data += torch.randn(48)


def with_embedding_norm(model):
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.RMSNorm(48).double())


def with_bias(model):
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(48).double()


def without_mean(model):
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(48, bias=False).double()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (with_norm_after_a_branch, {}, "model.layers.0 is not the same function in rotated channels"),
        (with_embedding_norm, {}, r"embed_tokens.1 \(RMSNorm\) is between the embeddings and the blocks"),
        (with_bias, {}, "LayerNorm has weight and bias: a norm with a bias"),
        (without_mean, {}, "LayerNorm is no RMS norm"),
        (lambda model: None, {"size": 32}, "48 channels, which blocks of 32 do not divide"),
    ],
)
def test_what_is_refused_before_anything_changes(change, options, said):
    model = model_of("Llama")
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"Rotate: .*{said}.*changed nothing"):
        rotated(model, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_without_a_stream_that_is_known():
    with pytest.raises(ValueError, match="the first block's input does not come from an embedding"):
        quantize_(stack(), INT4, calibration=inputs(), methods=(Rotate("offline"),))
    with pytest.raises(ValueError, match="the whole model is one block"):
        quantize_(stack(), INT4, calibration=inputs(), methods=(Rotate("offline"),), blocks="")
    with pytest.raises(ValueError, match="rotate needs calibration data; give calibration="):
        quantize_(stack(), INT4, methods=(Rotate("offline"),))


def test_a_tied_head_that_is_quantized_is_refused():
    model = model_of("Llama, square and tied").float()
    given = {"calibration": [{"input_ids": IDS}], "methods": (Rotate("offline"),)}
    with pytest.raises(
        ValueError, match=r"lm_head.weight has the weight of an embedding, .* changed nothing"
    ):
        quantize_(model, SchemeConfig(scheme="int4_g16"), lambda m, n: n == "lm_head", **given)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.1.mlp.up_proj"])
def test_weights_that_are_quantized_already_are_refused(name):
    """They would be rounded twice, and an embedding would stop a rotation half-way."""
    model = model_of("Llama").float()
    quantize_(model, SchemeConfig(scheme="int8_g16"), lambda m, n: n == name)
    wanted = model(IDS).logits
    given = {"calibration": [{"input_ids": IDS}], "methods": (Rotate("offline"),)}
    with pytest.raises(ValueError, match=f"Rotate: {name}.weight: quantized already, .* changed nothing"):
        quantize_(model, SchemeConfig(scheme="int4_g16"), lambda m, n: n.endswith("down_proj"), **given)
    assert torch.equal(model(IDS).logits, wanted)


class Batch(NamedTuple):
    ids: torch.Tensor


def test_a_batch_may_be_a_named_tuple():
    one = offline._small(Batch(IDS))
    assert type(one) is Batch
    assert torch.equal(one.ids, IDS[:1, :16])


def test_a_call_that_stops_behind_the_rotation_says_so():
    def stop(name, done, total):
        if done:
            raise KeyboardInterrupt

    given = {"calibration": [{"input_ids": IDS}], "methods": (Rotate("offline"),), "progress": stop}
    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_(model_of("Llama").float(), SchemeConfig(scheme="int4_g16"), **given)
    assert "stopped with 1 of 15 weights quantized; the others are rotated" in caught.value.__notes__[0]


@pytest.mark.parametrize("at", [0, 5, 9])
def test_a_rotation_that_was_begun_is_finished(monkeypatch, at):
    """The model is one function or the other, and an error says which weights it has."""
    model, count = model_of("Llama"), [0]
    wanted, made = logits(model), offline.Change.values

    def stopping(self, *args):
        if all(p is not self.parameter for p in model.parameters()):
            return made(self, *args)  # of a copy
        count[0] += 1
        if count[0] == at + 1:
            raise KeyboardInterrupt
        return made(self, *args)

    monkeypatch.setattr(offline.Change, "values", stopping)
    with pytest.raises(KeyboardInterrupt) as caught:
        rotated(model)
    assert "rotated as a whole" in caught.value.__notes__[0]
    assert (logits(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()
    assert torch.equal(model.model.norm.weight, torch.ones(48))
