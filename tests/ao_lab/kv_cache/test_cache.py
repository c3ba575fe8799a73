"""`use_kv_cache_` and `KVCache` in transformers' `generate()` on a CPU."""

import copy

import pytest
import torch

import ao_lab
from ao_lab.kv_cache.recipe import RECIPES

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def prompt():
    """Two sequences, one padded on the left."""
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


CALL = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


def test_values_are_bit_equal(model, prompt):
    """The recipe that changes nothing: the same logits as transformers' own cache, to float32's roundoff of attention."""
    expected = model.generate(**prompt, **CALL, **LOGITS)
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "bfloat16")
    found = ours.generate(**prompt, **CALL, **LOGITS)
    assert torch.equal(found.sequences, expected.sequences)
    assert type(found.past_key_values) is ao_lab.KVCache
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


#: Largest relative distance of logits in decoding, some twice what was seen.
NEAR = {"fp8": 0.03, "int8": 0.01, "int4": 0.2, "mxfp8": 0.04, "mxfp4": 0.2, "nvfp4": 0.15, "nf4": 0.2}


@pytest.mark.parametrize("recipe", NEAR)
def test_recipes(model, prompt, recipe):
    """The first token comes from unquantized states; the second one's logits are near, and not equal."""
    expected = model.generate(**prompt, **CALL, **LOGITS)
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, recipe)
    found = ours.generate(**prompt, **{**CALL, "max_new_tokens": 2}, **LOGITS)
    assert (found.logits[0] - expected.logits[0]).norm() <= 1e-6 * expected.logits[0].norm()
    if torch.equal(found.sequences, expected.sequences[:, : found.sequences.shape[1]]):
        distance = (found.logits[1] - expected.logits[1]).norm() / expected.logits[1].norm()
        assert 0 < distance <= NEAR[recipe]


def test_undone(model):
    ours = copy.deepcopy(model)
    settings = ao_lab.use_kv_cache_(ours, "int4")
    assert "kv_int4" in str(settings)
    ao_lab.use_kv_cache_(ours, None)
    assert ours.config._attn_implementation == "sdpa"
    assert vars(ours).keys() == vars(model).keys()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_as_text(name):
    assert str(RECIPES[name]).startswith("keys ")


def test_refused(model):
    """One clear error, and nothing has changed."""
    ours = copy.deepcopy(model)
    with pytest.raises(ValueError, match="no recipe of a KV cache is called 'fp7'"):
        ao_lab.use_kv_cache_(ours, "fp7")
    with pytest.raises(ValueError, match="do not divide this model's 64 channels"):
        ao_lab.use_kv_cache_(ours, ao_lab.KVRecipe(key="int4_g128", value="int4_g128"))
    assert ours.config._attn_implementation == "sdpa"
    assert vars(ours).keys() == vars(model).keys()
    with pytest.raises(TypeError, match="takes a transformers model"):
        ao_lab.use_kv_cache_(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="grows token by token"):
        ao_lab.KVRecipe(key="nvfp4")


def test_beyond_the_cache(model, prompt):
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "fp8")
    with pytest.raises(ValueError, match=r"room for 12 tokens and this call may reach 1[67]"):
        ours.generate(**prompt, **CALL, past_key_values=ao_lab.KVCache(ours, "fp8", 12))
    cache = ao_lab.KVCache(ours, "fp8", 8)
    with pytest.raises(ValueError, match="room for 8 tokens, 0 are there and 9 came"):
        ours(prompt["input_ids"], past_key_values=cache)


def test_another_model(model, prompt):
    other = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "fp8")
    with pytest.raises(ValueError, match="is for a model with 4 key heads of 32 channels, and got 1 of 64"):
        ours(prompt["input_ids"], past_key_values=ao_lab.KVCache(other, "fp8", 32))
    # The attention of transformers meets no tensor.
    with pytest.raises(AttributeError, match="use_kv_cache_"):
        model(prompt["input_ids"], past_key_values=ao_lab.KVCache(model, "fp8", 32))
