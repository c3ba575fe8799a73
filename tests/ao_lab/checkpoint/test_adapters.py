"""Adapters of QATConfig(lora=...) as folders of PEFT: read by peft's own class, and read back."""

import json

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import LoRA, QATConfig, lora_state_dict, quantize_
from ao_lab.checkpoint.adapters import load_adapter, save_adapter

# transformers deprecates what peft asks its models for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
INT4 = ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(32))
IDS = torch.arange(24).reshape(2, 12)


def llama(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **more)).eval()


def attention(module, name):
    return isinstance(module, nn.Linear) and name.endswith(("q_proj", "v_proj"))


def trained(net, seed=1):
    """The model with adapters that are none of zero."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in lora_state_dict(net).values():
        adapter.copy_(0.1 * torch.randn(adapter.shape, generator=generator))
    return net


def adapted(lora=None, config=INT4, net=None):
    net = llama() if net is None else net
    quantize_(net, QATConfig(config, lora=lora or LoRA(4, alpha=12)), attention)
    return trained(net)


def closest(got, want):
    """Both add the same float32 numbers in another order: each of 2 layers rounds sums of at most 96 terms anew."""
    return torch.allclose(got, want, rtol=0, atol=2 * 96 * 2.0**-23 * float(want.abs().max()))


def test_peft_reads_them(tmp_path):
    """On the same quantized weights the outputs are those of training; on the dense ones those of the dense sum."""
    peft = pytest.importorskip("peft")
    net = adapted(LoRA(4, alpha=12, dtype=torch.float32))
    files = save_adapter(net, tmp_path, base_model="owner/base")
    assert sorted(file.name for file in files) == sorted(file.name for file in tmp_path.iterdir())
    card = (tmp_path / "README.md").read_text()
    assert "Trained with ao_lab beside weights of `owner/base` in:\n\n- `int4" in card
    assert ": 4 layers (`q_proj`, `v_proj`)\n" in card
    config = json.loads(files[0].read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12, ["q_proj", "v_proj"])
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", "owner/base")
    base, dense, merged = llama(), llama(), llama()
    quantize_(base, INT4, attention)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path)
        assert type(theirs).__name__ == "PeftModelForCausalLM"
        want = net(IDS).logits
        assert closest(theirs(IDS).logits, want)
        with theirs.disable_adapter():
            assert not closest(theirs(IDS).logits, want)  # the adapters count
        for name, layer in net.named_modules():
            if hasattr(layer, "lora_a"):
                merged.get_submodule(name).weight += layer.lora.factor * layer.lora_b @ layer.lora_a
        on_dense = peft.PeftModel.from_pretrained(dense, tmp_path)(IDS).logits
        assert closest(on_dense, merged(IDS).logits)


def test_without_a_filter_they_are_of_the_layers_that_quantize_takes(tmp_path):
    """A tied head has no adapter: PEFT on `quantize_(model, base)` has the outputs of training, bit for bit."""
    peft = pytest.importorskip("peft")
    net, base = llama(tie_word_embeddings=True), llama(tie_word_embeddings=True)
    report = quantize_(net, QATConfig(INT4, lora=LoRA(4, alpha=8, dtype=torch.float32)))
    assert "that of model.embed_tokens" in next(one.reason for one in report.layers if "head" in one.name)
    assert net.lm_head.weight is net.model.embed_tokens.weight
    save_adapter(trained(net), tmp_path)
    quantized = quantize_(base, INT4).changed
    assert {one.name for one in quantized} == {one.name for one in report.changed}
    with torch.no_grad():
        assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path)(IDS).logits, net(IDS).logits)


def test_they_come_back(tmp_path):
    net = adapted()
    save_adapter(net, tmp_path)
    again = llama()
    quantize_(again, QATConfig(INT4, lora=LoRA(4, alpha=12)), attention)
    assert load_adapter(again, tmp_path) == tuple(
        name[:-7] for name in lora_state_dict(net) if "lora_a" in name
    )
    assert torch.equal(again(IDS).logits, net(IDS).logits)


def test_folders_of_peft_come_in(tmp_path):
    peft = pytest.importorskip("peft")
    base = llama()
    quantize_(base, INT4, attention)
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, lora).eval()
    theirs.save_pretrained(tmp_path)
    net = adapted(LoRA(4, alpha=12, dtype=torch.float32))
    load_adapter(net, tmp_path)
    with torch.no_grad():
        assert closest(net(IDS).logits, theirs(IDS).logits)


def test_layers_of_several_ranks_and_names(tmp_path):
    """One layer of an MLP alone has no name of its own: whole names; ranks beside that of most layers in patterns."""
    peft = pytest.importorskip("peft")

    def mlp():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)))

    net, base = mlp(), mlp()
    some = {"0.0": 2, "0.1": 4, "1.1": 4}
    wanted = {f"{name}.weight": QATConfig(INT4, lora=LoRA(rank)) for name, rank in some.items()}
    quantize_(net, ao_lab.FqnToConfig(wanted))
    save_adapter(trained(net), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["0.0", "0.1", "1.1"]
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (4, {"0.0": 2}, {"0.0": 4})
    quantize_(base, INT4, lambda module, name: name in some)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert closest(peft.PeftModel.from_pretrained(base, tmp_path)(x), net(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.last = nn.LayerNorm(64)

    def forward(self, x):
        return self.last(self.proj(x))


class Named(nn.Module):
    """Names that are ends of other names: proj and block.proj, last and block.last; or one layer in two places."""

    def __init__(self, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.block, self.last = nn.Linear(64, 64), Block(), nn.Linear(64, 64)
        self.last = self.proj if shared else self.last

    def forward(self, x):
        return self.last(self.block(self.proj(x)))


def test_names_that_end_other_names(tmp_path):
    """PEFT takes the first pattern that a name ends in; a layer in two places has an adapter in one of them there."""
    peft = pytest.importorskip("peft")
    net, base, dtype = Named(), Named(), torch.float32
    some = {
        "proj": LoRA(2, alpha=10, dtype=dtype),
        "block.proj": LoRA(4, dtype=dtype),
        "last": LoRA(4, dtype=dtype),
    }
    quantize_(
        net, ao_lab.FqnToConfig({f"{name}.weight": QATConfig(INT4, lora=one) for name, one in some.items()})
    )
    save_adapter(trained(net), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"^proj": 2}, {"^proj": 10})
    assert config["target_modules"] == r"block\.proj|last|proj"
    quantize_(base, INT4)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert closest(peft.PeftModel.from_pretrained(base, tmp_path)(x), net(x))
    assert load_adapter(net, tmp_path) == tuple(some)
    shared = Named(shared=True)
    quantize_(shared, QATConfig(INT4, lora=LoRA(4)))
    with pytest.raises(ValueError, match="proj stand in several places"):
        save_adapter(shared, tmp_path)


def test_folders_of_peft_as_it_reads_them(tmp_path):
    """Expressions of names, alpha over the root of the rank; what changed the base is refused, and what cannot be filled."""
    net, told = adapted(LoRA(49, alpha=1)), tmp_path / "adapter_config.json"
    save_adapter(net, tmp_path)
    config = json.loads(told.read_text())
    assert config["lora_alpha"] == 1  # 1 / 49 * 49 is not

    def load(into, **fields):
        told.write_text(json.dumps(config | fields))
        return load_adapter(into, tmp_path)

    assert load(net, lora_alpha=3, alpha_pattern={r".*layers\.\d+\..*": 1, "q_proj": 3})
    with pytest.raises(ValueError, match=r"alpha / rank 0\.0612"):
        load(net, alpha_pattern={r".*self_attn\.q_proj": 3})
    with pytest.raises(ValueError, match="prepare the model with LoRA") as refused:
        load(net, lora_alpha=2, use_rslora=True)
    alpha = float(str(refused.value).rpartition("alpha=")[2].rstrip(")"))
    assert load(adapted(LoRA(49, alpha=alpha)), lora_alpha=2, use_rslora=True)
    with pytest.raises(ValueError, match="began as pissa_niter_4, which changed the weights of the base"):
        load(net, init_lora_weights="pissa_niter_4")
    with pytest.raises(ValueError, match="are on meta, without values"):
        load(adapted(LoRA(49, alpha=1)).to("meta"))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is no safetensors file"):
        load(net)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"lora": LoRA(8)}, "prepare the model with LoRA.4, alpha=12"),
        ({"lora": LoRA(4, alpha=8)}, "alpha / rank 3, in the model rank 4 and 2"),
    ],
)
def test_other_models_are_refused(other, told, tmp_path):
    save_adapter(adapted(), tmp_path)
    net = adapted(**other)
    before = {name: value.clone() for name, value in lora_state_dict(net).items()}
    with pytest.raises(ValueError, match=told):
        load_adapter(net, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in lora_state_dict(net).items())


def test_other_layers_and_other_weights(tmp_path):
    save_adapter(adapted(), tmp_path)
    other = llama()
    quantize_(other, QATConfig(INT4, lora=LoRA(4, alpha=12)), lambda module, name: name.endswith("q_proj"))
    with pytest.raises(ValueError, match="other layers than the model's"):
        load_adapter(other, tmp_path)
    with pytest.warns(UserWarning, match="quantized as .*int4.*, and this model has .*int8"):
        load_adapter(adapted(config=ao_lab.Int8WeightOnlyConfig()), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json with adapter_model"):
        load_adapter(other, tmp_path.parent)
    with pytest.raises(ValueError, match="has no adapters; call quantize_"):
        load_adapter(llama(), tmp_path)


def test_what_a_folder_does_not_hold_is_refused(tmp_path):
    net = adapted(LoRA(4, freeze_rest=False))
    with pytest.raises(ValueError, match=r"train too, .* LoRA\(freeze_rest=True\)"):
        save_adapter(net, tmp_path)
    with pytest.raises(ValueError, match="has no adapters of QATConfig"):
        save_adapter(llama(), tmp_path)
    with pytest.raises(ValueError, match=r"ao_lab\.save_adapter\(model, folder\)"):
        ao_lab.save_pretrained(net, tmp_path)
    assert not list(tmp_path.iterdir())
