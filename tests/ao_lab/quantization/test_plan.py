"""Layers that programs join have one outer scale in schemes for such programs, however the model is quantized."""

import pytest
import torch
from torch import nn

from ao_lab import (
    HfConfig,
    NVFP4WeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    load_pretrained,
    quantize_,
    quantize_pretrained,
    quantized,
    save_pretrained,
)
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.quantization.plan import JOINED

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
CONFIG = NVFP4WeightOnlyConfig().for_layout("compressed-tensors")
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose projections differ in size."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, factor in (("k_proj", 3), ("v_proj", 0.3), ("up_proj", 5)):
        for path, module in model.named_modules():
            if path.endswith(name):
                module.weight.data *= factor
    path = tmp_path_factory.mktemp("joined")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def dense(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def in_memory(folder):
    model = dense(folder)
    quantize_(model, CONFIG)
    return model


#: Every way to a quantized model.
WAYS = {
    "in memory": in_memory,
    "streamed": lambda folder: quantize_pretrained(folder, CONFIG),
    "streamed, built": lambda folder: quantize_pretrained(folder, CONFIG, build=lambda: dense(folder)),
    "transformers": lambda folder: transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfConfig(CONFIG)
    ),
}


def outers(model):
    return {
        name.split(".")[-2]: float(p.outer)
        for name, p in model.named_parameters()
        if isinstance(p, QuantizedTensor)
    }


@pytest.mark.parametrize("way", WAYS)
def test_joined_layers_have_one_outer_scale(folder, way):
    model, before = WAYS[way](folder), dense(folder)
    found = outers(model)
    alone = {
        name.split(".")[-2]: float(quantized(p.detach(), CONFIG.recipe()).outer)
        for name, p in before.named_parameters()
        if name.endswith("_proj.weight")
    }
    for group in GROUPS:
        assert len({alone[name] for name in group}) > 1
        assert {found[name] for name in group} == {max(alone[name] for name in group)}
    assert all(found[name] == alone[name] for name in ("o_proj", "down_proj"))
    for name, p in model.named_parameters():
        if isinstance(p, QuantizedTensor):
            wanted = before.get_parameter(name).float()
            assert (p.dequantize().float() - wanted).norm() < 0.11 * wanted.norm(), name


def test_readers_find_one_global_scale(folder, tmp_path):
    """By vLLM's rule 1 / max(global scales) the weights of every joined layer are what they are here."""
    model = in_memory(folder)
    saved = save_pretrained(model, tmp_path, layout="compressed-tensors")
    assert saved.limits == ()
    files = look_at(tmp_path)
    stored = files.read(name for name in files.specs if name.endswith("weight_global_scale"))
    for group in GROUPS:
        scales = [t for name, t in stored.items() if name.split(".")[-2] in group]
        assert len(scales) == len(group)
        assert len({float(t) for t in scales}) == 1
    theirs, ours = dense(tmp_path), load_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_other_schemes_keep_each_its_own(folder, tmp_path):
    """And a folder of them says what vLLM does to it."""
    model = dense(folder)
    quantize_(model, SchemeConfig(scheme="compressed_tensors.nvfp4"))
    for name, p in dense(folder).named_parameters():
        if name.endswith("_proj.weight"):
            alone = quantized(p.detach(), "compressed_tensors.nvfp4")
            assert torch.equal(model.get_parameter(name).outer, alone.outer)
    saved = save_pretrained(model, tmp_path, layout="compressed-tensors")
    assert any("takes one global scale for all; theirs differ" in line for line in saved.limits)


def test_one_of_a_group_alone_has_its_own():
    model = nn.ModuleDict({"a": nn.ModuleDict({"q_proj": nn.Linear(64, 32), "other": nn.Linear(64, 32)})})
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 2}
    quantize_(model, CONFIG)
    for name, weight in weights.items():
        assert torch.equal(model.get_parameter(name).codes, quantized(weight, CONFIG.recipe()).codes)


def test_a_name_is_in_one_group():
    names = [name for group in JOINED for name in group]
    assert len(names) == len(set(names))
