"""Self-speculation: tokens are those of greedy decoding, however bad the drafts are."""

import pytest
import torch
import transformers

import ao_lab
from ao_lab.self_speculation import SelfSpeculation


def llama(layers=4, seed=0, **more):
    """Random weights of the size that layers keep."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def idle_after(model, layer):
    """Layers from `layer` on add nothing: the first layers alone predict as all do."""
    for one in model.model.layers[layer:]:
        torch.nn.init.zeros_(one.self_attn.o_proj.weight)
        torch.nn.init.zeros_(one.mlp.down_proj.weight)
    return model


def greedy(model, ids, new, **more):
    options = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids), **more}
    return model.generate(ids, **options)


PROMPT = torch.arange(7)[None] * 5 % 61


@pytest.mark.parametrize(("exit_layer", "drafts"), [(1, 4), (3, 2), (2, 1)])
def test_tokens_are_those_of_greedy_decoding(exit_layer, drafts):
    """Drafts of random layers: few are right."""
    model = llama()
    expected = greedy(model, PROMPT, 24)
    found = SelfSpeculation(model, exit_layer=exit_layer, drafts=drafts, max_length=32).generate(PROMPT, 24)
    assert torch.equal(found.tokens, expected)
    assert found.acceptance < 0.6


def test_of_a_prompt_the_last_logits_alone():
    """A long prompt's would be as large as a model."""
    model, sizes = llama(), []
    model.lm_head.register_forward_hook(lambda _, given, result: sizes.append(result.shape[1]))
    SelfSpeculation(model, exit_layer=1, drafts=2, max_length=32).begin(PROMPT)
    assert sizes == [1]


def test_right_drafts_are_accepted():
    """All of them, in every round: tokens in as few rounds as that allows."""
    model = idle_after(llama(), 2)
    expected = greedy(model, PROMPT, 21)
    found = SelfSpeculation(model, exit_layer=2, drafts=3, max_length=32).generate(PROMPT, 21)
    assert torch.equal(found.tokens, expected)
    assert (found.acceptance, found.tokens_per_round, found.rounds) == (1.0, 4.0, 5)


def test_a_round_goes_beyond_the_last_token():
    """Of the call, or an end token, which may come twice in a round."""
    model = idle_after(llama(), 2)
    plain = greedy(model, PROMPT, 16)
    new = plain[0, 7:].tolist()
    assert new.count(13) == 3
    speculation = SelfSpeculation(model, exit_layer=2, drafts=9, max_length=32)
    for wanted, end in ((16, None), (16, 13), (2, 13), (2, 49)):
        found = speculation.generate(PROMPT, wanted, end)
        last = min(wanted, new.index(end) + 1) if end else wanted
        assert torch.equal(found.tokens, plain[:, : 7 + last])
        assert found.rounds <= 2


def test_drafts_that_are_always_wrong_cost_no_token():
    model = llama()
    expected = greedy(model, PROMPT, 12)
    speculation = SelfSpeculation(model, exit_layer=1, drafts=3, max_length=32)
    right = speculation.draft
    speculation.draft = lambda ids, cache: -right(ids, cache)
    found = speculation.generate(PROMPT, 12)
    assert torch.equal(found.tokens, expected)
    assert (found.accepted, found.rounds) == (0, 11)


def test_weights_and_cache_in_low_precision():
    """As greedy decoding by the same weights and the same kind of cache."""
    model = llama()
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    ao_lab.use_kv_cache_(model, "int8")
    expected = greedy(model, PROMPT, 10)
    found = SelfSpeculation(model, exit_layer=2, drafts=2, max_length=32, kv_cache="int8").generate(
        PROMPT, 10
    )
    assert torch.equal(found.tokens, expected)


def test_it_ends_with_the_end_token_and_can_be_called_again():
    model = llama()
    plain = greedy(model, PROMPT, 16)
    end = int(plain[0, 7 + 6])
    first = (plain[0, 7:] == end).nonzero()[0].item()
    speculation = SelfSpeculation(model, exit_layer=3, drafts=4, max_length=32)
    for _ in range(2):
        assert torch.equal(
            speculation.generate(PROMPT, 16, eos_token_id=end).tokens, plain[:, : 7 + first + 1]
        )
        assert torch.equal(speculation.generate(PROMPT, 16).tokens, plain)
    assert torch.equal(speculation.generate(PROMPT, 1).tokens, plain[:, :8])
    several = [60 if end != 60 else 59, end]
    first = min(place for one in several for place in (plain[0, 7:] == one).nonzero().flatten().tolist())
    assert torch.equal(speculation.generate(PROMPT, 16, several).tokens, plain[:, : 7 + first + 1])


def test_the_model_is_left_alone():
    """Its layers, configuration and weights; the first layers share its parameters."""
    model = llama()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    speculation = SelfSpeculation(model, exit_layer=1, max_length=32)
    speculation.generate(PROMPT, 4)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    early = speculation.draft.model
    assert len(early.model.layers) == 1
    assert early.lm_head.weight is model.lm_head.weight


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exit_layer": 4}, "at least 1 and below this model's 4 layers"),
        ({"exit_layer": 1, "drafts": 0}, "drafts is 1 or more"),
        ({"exit_layer": 1, "captured": True}, "needs a model on a GPU"),
    ],
)
def test_numbers_out_of_range(options, words):
    model = llama()
    with pytest.raises(ValueError, match=words):
        SelfSpeculation(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_torch_compile_wraps():
    model = llama()
    expected = SelfSpeculation(model, exit_layer=1, max_length=16).generate(PROMPT, 4).tokens
    wrapped = SelfSpeculation(torch.compile(model, backend="eager"), exit_layer=1, max_length=16)
    assert torch.equal(wrapped.generate(PROMPT, 4).tokens, expected)


def test_calls_that_cannot_be():
    speculation = SelfSpeculation(llama(), exit_layer=1, max_length=16)
    with pytest.raises(ValueError, match="one sequence"):
        speculation.generate(PROMPT.expand(2, -1), 2)
    with pytest.raises(ValueError, match="do not fit max_length=16"):
        speculation.generate(PROMPT, 10)
    with pytest.raises(TypeError, match=r"model\.layers and lm_head"):
        SelfSpeculation(torch.nn.Linear(2, 2), exit_layer=1)
    mistral = transformers.MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="sliding windows or states"):
        SelfSpeculation(transformers.MistralForCausalLM(mistral), exit_layer=1)
