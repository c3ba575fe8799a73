"""The published Llama 3.2 scheme on whole models: what each layer becomes, in both steps and both rounds."""

import pytest
import torch
from torch import nn

from ao_lab import LoRA, explain, llama32_qat, lora_state_dict, quantize_
from ao_lab.qat.lora import LoRALinear
from reference import SCHEMES, fake_quantize
from tests.support.models.qat_models import same

IDS = torch.tensor([[1, 5, 9, 31, 2, 8], [7, 7, 0, 30, 12, 3]])
BLOCK = "int4_g32 x int8_rowwise_asymmetric"
HEAD, TABLE = "int8_rowwise x int8_rowwise_asymmetric", "int8_rowwise"


class Block(nn.Module):
    """Attention's and the feed-forward's linear layers, without attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.wqkv, self.wo = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x):
        return x + self.feed_forward(self.wo(self.wqkv(self.norm(x))))


class TinyLlama(nn.Module):
    """The names of the authors' own code."""

    def __init__(self, tied):
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(64)
        self.output = nn.Linear(64, 32, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def transformers_llama(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"tiny": TinyLlama, "transformers": transformers_llama}


def made(kind, tied, dtype=torch.float32):
    torch.manual_seed(0)
    return MODELS[kind](tied).to(dtype)


def logits(model, ids=IDS):
    y = model(ids)
    return getattr(y, "logits", y)


def train(model, rate=1e-2, count=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def schemes(model, tied):
    """The scheme of every layer by what it is for; ValueError where one is of no kind, or where one kind has two."""
    found = {}
    for layer in explain(model).changed:
        kind = "block" if "layers." in layer.name else "table" if layer.kind == "Embedding" else "head"
        found.setdefault(kind, set()).add(layer.scheme)
    # A tied weight brings the classifier's scheme for inputs, which an embedding ignores.
    return found == {"block": {BLOCK}, "head": {HEAD}, "table": {HEAD if tied else TABLE}}


def before_the_head(model):
    """What the classifier multiplies: all of the blocks' work, by products of dense operands, whose order is torch's."""
    found, (_, head) = [], table_and_head(model)
    handle = head.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].detach().clone()))
    logits(model)
    handle.remove()
    return found[0]


def table_and_head(model):
    if isinstance(model, TinyLlama):
        return model.tok_embeddings, model.output
    return model.model.embed_tokens, model.lm_head


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", MODELS)
def test_both_rounds(kind, tied):
    """Dense QAT, the frozen backbone, adapters in the blocks, the merge: schemes, outputs and ties at every stage."""
    model = made(kind, tied)
    blocks = 8 if kind == "tiny" else 14
    quantize_(model, llama32_qat())
    table, head = table_and_head(model)
    assert explain(model).changed == ()
    assert len(explain(model).left) == blocks + 2
    losses = train(model)
    assert losses[-1] < losses[0]
    model.eval()
    dense_head = head.weight.detach().clone()
    with torch.no_grad():
        looked_up, y = table(IDS), before_the_head(model)
        quantize_(model, llama32_qat(step="convert"))
        assert schemes(model, tied)
        assert same(table(IDS), looked_up)
        assert same(before_the_head(model), y)
        assert (head.weight is table.weight) == tied
        assert head.weight.scheme == SCHEMES["int8_rowwise"]
        assert head.weight.scale.shape == (32, 1)
        assert same(head.weight.dequantize(), fake_quantize(dense_head, "int8_rowwise"))
        y = logits(model)

    model.requires_grad_(False)
    quantize_(model, llama32_qat(lora=LoRA(rank=4, alpha=4)))
    assert schemes(model, tied)
    assert same(logits(model), y)
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(adapters) == blocks
    assert type(head) is nn.Linear
    assert [name for name, one in model.named_parameters() if one.requires_grad] == list(
        lora_state_dict(model)
    )
    model.train()
    losses = train(model, 1e-3)
    assert losses[-1] < losses[0]
    assert (head.weight is table.weight) == tied
    quantize_(model, llama32_qat(step="convert"))
    assert schemes(model, tied)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", MODELS)
def test_from_dense_weights_with_adapters_at_once(kind):
    """The second round alone quantizes what is dense; and a whole model compiles."""
    model = made(kind, False, torch.bfloat16)
    quantize_(model, llama32_qat(lora=LoRA(rank=2, dropout=0.1)))
    assert schemes(model, False)
    model.eval()
    compiled = torch.compile(model, backend="aot_eager")
    assert same(logits(compiled), logits(model))
    torch.compiler.reset()


def test_rounded_sums_in_the_blocks():
    """What is trained is what is stored, in the whole model: outputs are equal bit for bit where torch multiplies."""
    model = made("tiny", False)
    quantize_(model, llama32_qat(lora=LoRA(rank=4, rounds="sum")))
    train(model)
    layer = model.layers[0].wo
    merged = layer.merged().detach()
    quantize_(model, llama32_qat(step="convert"))
    assert schemes(model, False)
    assert same(layer.weight.dequantize(), fake_quantize(merged, "int4_g32"))


def test_groups_of_another_size_and_learned_scales():
    model = made("tiny", False)
    quantize_(model, llama32_qat(group_size=64, learn_scales=True))
    assert model.layers[0].wo.qat_scale.shape == (64, 1)
    quantize_(model, llama32_qat(step="convert", group_size=64))
    assert model.layers[0].wo.weight.scheme.name == "int4_g64"


def test_a_model_of_other_names_is_refused():
    with pytest.raises(ValueError, match="match nothing; names are"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), llama32_qat())
