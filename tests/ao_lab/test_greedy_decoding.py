"""Greedy decoding by a loop of our own: tokens are those of transformers' `generate()`."""

import functools
from unittest import mock

import pytest
import torch

import ao_lab
from ao_lab.greedy_decoding import LOOK, GreedyDecoding, most_likely
from tests.ao_lab.test_self_speculation import PROMPT, greedy, llama

PROMPTS = torch.cat([PROMPT, PROMPT.flip(1)])


@pytest.mark.parametrize("recipe", ["bfloat16", "int4"])
def test_tokens_are_those_of_generate(recipe):
    """Of several sequences, and again with another prompt."""
    model = llama(layers=2, head_dim=64)
    decoding = GreedyDecoding(model, max_length=32, kv_cache=recipe)
    ao_lab.use_kv_cache_(model, recipe)
    for prompts in (PROMPTS, PROMPTS[:, 2:]):
        assert torch.equal(decoding.generate(prompts, 12), greedy(model, prompts, 12))


@pytest.mark.parametrize("vocabulary", [1, 61, 384])
def test_the_most_likely_token_is_that_of_argmax(vocabulary):
    """Of equal logits the first, of those with NaN the first NaN."""
    torch.manual_seed(0)
    logits = torch.randint(-2, 3, (6, 2, vocabulary)).bfloat16()
    logits[1, 0, vocabulary // 2] = logits[1, 0, -1] = float("nan")
    logits[2], logits[3], logits[4] = -torch.inf, torch.nan, 0.0
    logits[4, :, ::2] = -0.0
    assert torch.equal(most_likely(logits), logits.argmax(-1))
    assert torch.equal(most_likely(logits[:, -1:]), logits[:, -1:].argmax(-1))


def test_it_ends_where_every_sequence_has_an_end():
    """Before and behind a look for it, and without one."""
    model = llama()
    whole = GreedyDecoding(model, max_length=40).generate(PROMPTS, 30)
    new = whole[:, PROMPTS.shape[1] :]
    for at in (0, 1, LOOK - 1, LOOK, 29):
        ends = new[:, at].tolist()
        last = max(int(torch.isin(row, new[:, at]).int().argmax()) for row in new)
        found = GreedyDecoding(model, max_length=40).generate(PROMPTS, 30, eos_token_id=ends)
        assert torch.equal(found, whole[:, : PROMPTS.shape[1] + last + 1])
    missing = next(token for token in range(61) if token not in new)
    assert torch.equal(GreedyDecoding(model, max_length=40).generate(PROMPTS, 30, missing), whole)


def test_a_compiled_step_is_one_program():
    """The same tokens; nothing is compiled again for another prompt, and another object has a program of its own."""
    model, compile_ = llama(layers=1), torch.compile

    @functools.wraps(compile_)
    def eagerly(f, isolate_recompiles, **_):
        return compile_(f, backend="eager", fullgraph=True, isolate_recompiles=isolate_recompiles)

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with mock.patch.object(torch, "compile", eagerly):
        decoding, other = (GreedyDecoding(model, max_length=32, compiled=True) for _ in range(2))
    expected = GreedyDecoding(model, max_length=32)
    for prompts in (PROMPTS, PROMPTS[:, 2:]):
        assert torch.equal(decoding.generate(prompts, 8), expected.generate(prompts, 8))
    assert counters["stats"]["unique_graphs"] == 1
    with torch._dynamo.config.patch(recompile_limit=1):
        assert torch.equal(other.generate(PROMPT, 8), expected.generate(PROMPTS, 8)[:1])
    assert counters["stats"]["unique_graphs"] == 2


def test_positions_are_those_of_generate():
    """Of a model that takes them from its mask, of which there is none."""
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=61, word_embed_proj_dim=32,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=None, init_std=1.0,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    expected = greedy(model, PROMPTS, 12)
    assert len(expected[:, 7:].unique()) > 4
    assert torch.equal(GreedyDecoding(model, max_length=32).generate(PROMPTS, 12), expected)


def test_calls_that_cannot_be():
    model = llama()
    with pytest.raises(ValueError, match="captured=True needs a model on a GPU"):
        GreedyDecoding(model, captured=True)
    with pytest.raises(ValueError, match="max_length is a number of tokens, 2 or more"):
        GreedyDecoding(model, max_length=1)
    with pytest.raises(ValueError, match="sliding windows"):
        GreedyDecoding(sliding(), max_length=32)
    with pytest.raises(TypeError, match="takes a transformers decoder"):
        GreedyDecoding(torch.nn.Linear(4, 4))
    decoding = GreedyDecoding(model, max_length=16)
    with pytest.raises(ValueError, match="do not fit max_length=16"):
        decoding.generate(PROMPT, 10)
    decoding.generate(PROMPT, 2)
    with pytest.raises(ValueError, match="has 1 sequences and got 2"):
        decoding.generate(PROMPTS, 2)
    model.model.layers[0].self_attn.expand_kv = None
    with pytest.raises(ValueError, match="latent states"):
        GreedyDecoding(model)


def test_tokens_that_are_none():
    """Said before anything is written; a call that fails in the model leaves another number of sequences possible."""
    decoding = GreedyDecoding(llama(layers=1), max_length=16)
    with pytest.raises(ValueError, match="call begin"):
        decoding.step()
    for wrong in (PROMPT.tolist(), PROMPT.float(), PROMPT.bool(), None):
        with pytest.raises(TypeError, match="input_ids are a tensor of int64 or int32"):
            decoding.generate(wrong, 2)
    for wrong in (PROMPT[0], PROMPT[:0], PROMPT[None]):
        with pytest.raises(ValueError, match="input_ids have shape"):
            decoding.generate(wrong, 2)
    for new in (2.0, True, None):
        with pytest.raises(TypeError, match="max_new_tokens is a number of tokens"):
            decoding.generate(PROMPT, new)
    for end in ("</s>", 2.0, [2, "</s>"]):
        with pytest.raises(TypeError, match="eos_token_id is one token or several"):
            decoding.generate(PROMPT, 2, end)
    with pytest.raises(IndexError):
        decoding.generate(PROMPTS + 61, 2)
    assert decoding.generate(PROMPT, 2, torch.tensor(61)).shape == (1, 9)


def sliding():
    """A model whose layers have windows."""
    import transformers

    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=61,
        sliding_window=8,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def test_no_mask_but_with_a_cache_of_ours():
    """transformers' own attention would read what is behind the last token."""
    import transformers

    model = llama()
    cache = ao_lab.KVCache(model, "bfloat16", 32)
    model.set_attn_implementation("ao_lab")
    other = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="no_padding is for models all of whose layers"):
        model(PROMPT, past_key_values=other, attention_mask=cache.no_padding)
