"""Pairs of layers are found by trying them out: those of known architectures, in their dtypes, and nothing else."""

import pytest
import torch
from torch import nn

from ao_lab.calibration.equivalence import (
    GAIN,
    OFFSET_GAIN,
    ROWS,
    Pair,
    find_pairs,
    scale_inputs,
    scale_producer,
)
from ao_lab.transforms.data import calibrating
from ao_lab.transforms.walk import captured, find_blocks, walk

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
LLAMA = [
    Pair("input_layernorm", GAIN, QKV, 0, 64, 64, 1),
    Pair("self_attn.v_proj", ROWS, ("self_attn.o_proj",), 0, 32, 16, 2),
    Pair("post_attention_layernorm", GAIN, MLP, 0, 64, 64, 1),
    Pair("mlp.up_proj", ROWS, ("mlp.down_proj",), 0, 128, 128, 1),
]
#: Model, its configuration's class and fields, dtype, the pairs of each block.
MODELS = {
    "grouped queries": ("LlamaForCausalLM", "LlamaConfig", GROUPED, torch.float32, LLAMA),
    "in bfloat16": ("LlamaForCausalLM", "LlamaConfig", GROUPED, torch.bfloat16, LLAMA),
    "norms of queries and keys": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED, torch.bfloat16, LLAMA),
    "gains of 1 + g": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED, torch.bfloat16,
        [
            Pair("input_layernorm", OFFSET_GAIN, QKV, 0, 64, 64, 1),
            LLAMA[1],
            Pair("pre_feedforward_layernorm", OFFSET_GAIN, MLP, 0, 64, 64, 1),
            LLAMA[3],
        ],
    ),
    "joined projections": (
        "Phi3ForCausalLM", "Phi3Config",
        {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}, torch.float32,
        [
            Pair("input_layernorm", GAIN, ("self_attn.qkv_proj",), 0, 64, 64, 1),
            Pair("self_attn.qkv_proj", ROWS, ("self_attn.o_proj",), 96, 32, 16, 2),
            Pair("post_attention_layernorm", GAIN, ("mlp.gate_up_proj",), 0, 64, 64, 1),
            Pair("mlp.gate_up_proj", ROWS, ("mlp.down_proj",), 128, 128, 128, 1),
        ],
    ),
}  # fmt: skip


def each_block(model, batches, look):
    with calibrating(model):
        walk(captured(model, batches, find_blocks(model)), look)


def model_of(name):
    transformers = pytest.importorskip("transformers")
    kind, config, fields, dtype, pairs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # gains that differ from channel to channel
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model, pairs


@pytest.mark.parametrize("name", MODELS)
def test_pairs_of_known_architectures(name):
    model, pairs = model_of(name)
    before, found = [p.detach().clone() for p in model.parameters()], []

    def look(block):
        found.append(find_pairs(block))
        assert find_pairs(block, found[0]) == found[0]
        # Those of another block are tried, not believed.
        wrong = [Pair(p.consumers[0] if p.kind == ROWS else p.producer, *_rest(p)) for p in found[0]]
        assert find_pairs(block, wrong) == found[-1]

    each_block(model, [{"input_ids": torch.randint(0, 128, (2, 12))}], look)
    assert found == [pairs, pairs]
    assert all(map(torch.equal, model.parameters(), before))


def _rest(pair):
    return pair.kind, pair.consumers, pair.first, pair.count, pair.head, pair.repeats


class Block(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


#: What a block computes, and the producers of the pairs that it has.
BLOCKS = {
    "a norm and its reader": (lambda b, x: x + b.one(b.norm(x)), ["norm"]),
    "a reader beside that is no layer": (lambda b, x: b.norm(x) + b.one(b.norm(x)), []),
    "another reader that is a layer": (lambda b, x: (lambda h: b.one(h) + b.two(h))(b.norm(x)), ["norm"]),
    "a function that is not linear": (lambda b, x: b.two(torch.tanh(b.one(x))), []),
    "one that is, for positive factors": (lambda b, x: b.two(torch.relu(b.one(x))), ["one"]),
    "a product with something else": (lambda b, x: b.two(b.one(x) * torch.sigmoid(x)), ["one"]),
    "channels in another order": (lambda b, x: b.two(b.one(x).flip(-1)), []),
    "a path that no data takes": (lambda b, x: x + b.two(b.one(x)) * 0, []),
    "a layer that runs twice": (lambda b, x: b.two(b.two(b.one(x))), []),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_a_pair(name):
    torch.manual_seed(0)
    forward, producers = BLOCKS[name]
    model, found = nn.Sequential(Block(forward), Block(forward)), []
    with calibrating(model):
        capture = captured(model, [torch.randn(3, 5, 16)], {"0": model[0], "1": model[1]})
        walk(capture, lambda block: found.append([pair.producer for pair in find_pairs(block)]))
    assert found == [producers, producers]


def test_factors_of_repeated_heads():
    pair = Pair("v", ROWS, ("o",), 0, 4, 2, 2)
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert pair.per_input(factors).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]
    assert pair.per_channel(torch.arange(8.0)).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("kind", [GAIN, OFFSET_GAIN])
def test_gains_are_rounded_once_and_say_by_what_they_were_scaled(kind):
    """So what reads them is divided by just that."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(64).to(torch.bfloat16)
    norm.weight.data.copy_(torch.randn(64) * 0.1 + (kind == GAIN))
    norm.weight.data[3] = 0.0 if kind == GAIN else -1.0  # an output of zeros
    offset, old = float(kind == OFFSET_GAIN), norm.weight.detach().clone()
    wanted = torch.rand(64, dtype=torch.float64) + 0.5
    factors = scale_producer(norm, Pair("norm", kind, ("one",), 0, 64, 64, 1), wanted)
    expected = ((old.double() + offset) * factors - offset).to(torch.bfloat16)
    assert torch.equal(norm.weight.detach(), expected)
    assert factors[3] == 1
    off = (factors / wanted - 1).abs()
    assert off[torch.arange(64) != 3].max() < 2**-6
    assert torch.allclose(
        (old.double() + offset) * factors, norm.weight.detach().double() + offset, rtol=1e-15
    )


def test_scaled_layers_compute_the_same():
    torch.manual_seed(0)
    one, two = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    x, factors = torch.randn(5, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64) + 0.5
    pair = Pair("one", ROWS, ("two",), 8, 8, 8, 1)  # the last rows of a joined projection
    two = nn.Linear(8, 4).double()
    expected = two(one(x)[:, 8:])
    assert torch.equal(scale_producer(one, pair, factors), factors)
    scale_inputs(two, 1 / pair.per_input(factors))
    assert torch.allclose(two(one(x)[:, 8:]), expected, rtol=1e-12, atol=1e-12)


class Values(nn.Module):
    """A block with values: its own, which it leaves to others where it shares them, or those that another block left."""

    def __init__(self, own, shares):
        super().__init__()
        self.own, self.shares = own, shares
        if own:
            self.v = nn.Linear(16, 8, bias=False)
        self.o = nn.Linear(8, 16, bias=False)

    def forward(self, x, shared):
        v = self.v(x) if self.own else shared["v"]
        if self.shares:
            shared["v"] = v
        return x + self.o(v)


class SharedValues(nn.Module):
    """Blocks that share values through a mapping, as those do that share keys and values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Values(True, False), Values(True, True), Values(False, False)])

    def forward(self, x):
        shared = {}
        for block in self.blocks:
            x = block(x, shared)
        return x


def test_values_that_other_blocks_read_are_no_pair():
    model, found = SharedValues(), []
    with calibrating(model):
        capture = captured(
            model, [torch.randn(3, 5, 16)], {f"blocks.{i}": b for i, b in enumerate(model.blocks)}
        )
        walk(capture, lambda block: found.append([pair.producer for pair in find_pairs(block)]))
    assert found == [["v"], [], []]
