"""`use_kv_cache_` and `KVCache` in transformers' `generate()` on a CPU."""

import copy
from dataclasses import replace

import pytest
import torch

import ao_lab
import fast
from ao_lab.kv_cache.recipe import RECIPES
from fast.attention.stored import room_for
from fast.layers.hadamard import hadamard, rotated_back
from reference import SCHEMES

transformers = pytest.importorskip("transformers")
GROUPS_OF_4 = replace(
    SCHEMES["int4_g32_asymmetric"],
    name="groups_of_4",
    scale=replace(SCHEMES["int4_g32_asymmetric"].scale, block=4),
)


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


def test_values_as_they_are(model, prompt):
    """The recipe that changes nothing: the same logits as transformers' own cache, to float32's roundoff of attention."""
    expected = model.generate(**prompt, **CALL, **LOGITS)
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "bfloat16")
    found = ours.generate(**prompt, **CALL, **LOGITS)
    assert torch.equal(found.sequences, expected.sequences)
    assert type(found.past_key_values) is ao_lab.KVCache
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


class RoundedCache(transformers.DynamicCache):
    """transformers' own cache, of which a call after the first reads what a recipe keeps of all keys and values.

    For calls with one token.
    """

    def __init__(self, recipe):
        super().__init__()
        self.recipe, self.filled = recipe, set()

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = super().update(keys, values, layer, *args, **kwargs)
        if layer in self.filled:
            keys = self.rounded(keys, self.recipe.key, self.recipe.key_axis, self.recipe.rotate)
            values = self.rounded(values, self.recipe.value, self.recipe.value_axis, False)
        self.filled.add(layer)
        return keys, values

    def rounded(self, x, scheme, axis, rotate):
        recipe, length = self.recipe, x.shape[2]
        group = scheme.scale.block if axis == -2 else 1
        whole = length - length % group
        mixed = hadamard(x, x.shape[-1]) if rotate else x
        y = fast.dequantize(fast.quantize(mixed[:, :, :whole].contiguous(), scheme, axis=axis))
        y = rotated_back(y, x.shape[-1]) if rotate else y
        groups = [one.scale.block for one, axis in zip(recipe.schemes, (recipe.key_axis, recipe.value_axis), strict=True)
                  if axis == -2]  # fmt: skip
        last = max(0, min(length - recipe.residual, length - length % max(groups, default=1)))
        if last <= recipe.sinks:
            return x
        return torch.cat([x[:, :, : recipe.sinks], y[:, :, recipe.sinks : last], x[:, :, last:]], 2)


#: Recipes by what of a record they use.
USED = {
    "residual": ao_lab.KVRecipe(key="int4_g32", value="int4_g64_asymmetric", rotate=True, residual=5),
    "sinks": ao_lab.KVRecipe(key="int2_g32", value="int2_g32", sinks=2, residual=2),
    "channels": ao_lab.KVRecipe(key=GROUPS_OF_4, key_axis=-2, value="int2_g32", sinks=1),
    "both by channel": ao_lab.KVRecipe(
        key=GROUPS_OF_4, key_axis=-2, value=GROUPS_OF_4, value_axis=-2, residual=6, sinks=3
    ),
}


@pytest.mark.parametrize("recipe", [*(name for name in RECIPES if name != "bfloat16"), *USED])
def test_recipes(model, prompt, recipe):
    """The prompt attends to its own states, later tokens to what is stored: to float32's roundoff of attention.

    Of one layer, whose keys and values do not depend on that roundoff: of another layer they might round to other codes.
    """
    recipe = USED.get(recipe) or RECIPES[recipe]
    ours = copy.deepcopy(model)
    ours.config.num_hidden_layers, ours.model.layers = 1, ours.model.layers[:1]
    expected = ours.generate(**prompt, **CALL, **LOGITS, past_key_values=RoundedCache(recipe))
    ao_lab.use_kv_cache_(ours, recipe)
    found = ours.generate(**prompt, **CALL, **LOGITS)
    assert torch.equal(found.sequences, expected.sequences)
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.parametrize("recipe", ["int4", "int4_tokens", "mxfp4", "int2"])
def test_long_prompts(model, recipe):
    """Beyond first and last tokens: a prompt in one call is exact, what follows reads codes of most of it."""
    ids = torch.randint(3, 128, (2, 170), generator=torch.Generator().manual_seed(2))
    ours = copy.deepcopy(model)
    ours.config.num_hidden_layers, ours.model.layers = 1, ours.model.layers[:1]
    plain = ours.generate(ids, **CALL, **LOGITS)
    expected = ours.generate(ids, **CALL, **LOGITS, past_key_values=RoundedCache(RECIPES[recipe]))
    ao_lab.use_kv_cache_(ours, recipe)
    found = ours.generate(ids, **CALL, **LOGITS)
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()
    assert (found.logits[0] - plain.logits[0]).norm() <= 1e-5 * plain.logits[0].norm()
    assert (found.logits[1] - plain.logits[1]).norm() > 1e-4 * plain.logits[1].norm()


#: Calls of `generate` beside greedy search with one prompt.
SEARCHES = {
    "beams": {"num_beams": 3},
    "several": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "right padding": {"padding": "right"},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(model, prompt, name):
    """As with transformers' cache, where nothing is rounded; with FP8 they run."""
    call = {**CALL, **SEARCHES[name]}
    if call.pop("padding", None):
        prompt = {key: value.flip(1) for key, value in prompt.items()}
    expected = model.generate(**prompt, **call)
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "bfloat16")
    assert torch.equal(ours.generate(**prompt, **call), expected)
    ao_lab.use_kv_cache_(ours, "fp8")
    assert ours.generate(**prompt, **call).shape == expected.shape


def test_rejected_drafts(model, prompt):
    """Assisted generation crops the cache: the tokens are those without it."""
    ids = prompt["input_ids"][:1]
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "bfloat16")
    expected = ours.generate(ids, **CALL)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert torch.equal(ours.generate(ids, **CALL, assistant_model=assistant), expected)


@pytest.mark.parametrize("recipe", ["fp8", "nf4", *USED])
def test_crop_and_reorder(model, prompt, recipe):
    """What is cropped is written again; sequences change places, scales of 16 bits too."""
    recipe = USED.get(recipe, recipe)
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, recipe)
    ids = prompt["input_ids"]
    cache = ao_lab.KVCache(ours, recipe, 16)
    ours(ids, past_key_values=cache)
    once = ours(ids[:, :1], past_key_values=cache).logits
    cache.crop(-1)
    assert int(cache.get_seq_length()) == 9
    assert torch.equal(ours(ids[:, :1], past_key_values=cache).logits, once)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    turned = ours(ids[:, :1].flip(0), past_key_values=cache).logits
    assert torch.equal(turned.flip(0), once)
    cache.reset()
    assert int(cache.get_seq_length()) == 0


def test_sliding_windows_are_left():
    """Layers with a window keep transformers' cache; full ones have ours."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).eval()
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, **CALL)
    settings = ao_lab.use_kv_cache_(model, "bfloat16")
    assert (settings.layers, settings.others) == (1, 1)
    assert torch.equal(model.generate(ids, **CALL), expected)


def test_encoder_decoder():
    """Self and cross attention are stored; positions are learned."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, forced_eos_token_id=None,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, **CALL, num_beams=2)
    ao_lab.use_kv_cache_(model, "bfloat16")
    assert torch.equal(model.generate(ids, **CALL, num_beams=2), expected)
    ao_lab.use_kv_cache_(model, "int8")
    cache = model.generate(ids, **CALL, return_dict_in_generate=True).past_key_values
    assert type(cache.cross_attention_cache) is type(cache.self_attention_cache) is ao_lab.KVCache


def test_undone(model):
    ours = copy.deepcopy(model)
    settings = ao_lab.use_kv_cache_(ours, "int4")
    assert "kv_int4" in str(settings)
    ao_lab.use_kv_cache_(ours, None)
    assert ours.config._attn_implementation == "sdpa"
    assert vars(ours).keys() == vars(model).keys()


def test_default_recipe(model):
    """Of the recipes of 8 bits that round every token it is the one whose keys err least, those of a biased channel too."""
    keys = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 3] += 8
    errors = {
        name: float((fast.dequantize(fast.quantize(keys, RECIPES[name].key)) - keys).norm())
        for name in ("fp8", "int8", "mxfp8")
    }
    best = RECIPES[min(errors, key=errors.__getitem__)]
    assert ao_lab.use_kv_cache_(copy.deepcopy(model)).recipe == ao_lab.KVCache(model).recipe == best


def test_prepared_and_explained(model):
    """By `prepare_for_generate_`; `explain` says it."""
    ours = copy.deepcopy(model)
    settings = ao_lab.prepare_for_generate_(ours, kv_cache="int8")
    assert "keys int8_rowwise" in str(settings)
    assert "values int8_rowwise" in str(ao_lab.explain(ours))
    assert "keys" not in str(ao_lab.explain(model))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_as_text_and_its_bytes(name):
    """Those of the memory that a cache allocates."""
    recipe = RECIPES[name]
    assert str(recipe).startswith("keys ")
    pairs = zip(recipe.schemes, recipe.axes, strict=True)
    rooms = [
        room_for(torch.zeros(1, 2, 1, 128), 96, scheme, axis=axis, window=recipe.window)
        for scheme, axis in pairs
    ]
    tokens = [
        t.nbytes * 96 / room.codes.shape[2]
        for room in rooms
        for t in room.tensors()
        if t is not room.computed
    ]
    assert sum(tokens) == 96 * recipe.bytes_per_token(2, 128, 4)
    beside = sum(room.computed.nbytes for room in rooms if room.computed is not None)
    assert beside == recipe.bytes_beside(2, 128, 4)


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


TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def tiny(name, **fields):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**{**TINY, **fields})
    ).eval()


def test_softcap(prompt):
    """Of windows, which torch's attention would refuse, and of the prompt's own states."""
    model = tiny("Gemma2Config", query_pre_attn_scalar=16)
    expected = model.generate(**prompt, **CALL)
    ao_lab.use_kv_cache_(model, "bfloat16")
    assert torch.equal(model.generate(**prompt, **CALL), expected)


def test_drafts_and_windows(prompt):
    """Rejected drafts leave a window."""
    model = tiny("Gemma3TextConfig")
    ids = prompt["input_ids"][:1].repeat(1, 2)
    expected = model.generate(ids, **CALL)
    ao_lab.use_kv_cache_(model, "bfloat16")
    assert torch.equal(model.generate(ids, **CALL, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_drafts_of_encoder_decoder(prompt, name):
    """T5 asks for the number of keys, for its relative positions."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    bart = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_layers": 1, "decoder_layers": 2, "forced_eos_token_id": None}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128, eos_token_id=None, pad_token_id=0, **sizes, **(bart if name == "Bart" else {})
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    call = {**CALL, "input_ids": prompt["input_ids"][:1]}
    expected = model.generate(**call)
    assistant = copy.deepcopy(model)
    ao_lab.use_kv_cache_(model, "bfloat16")
    assert torch.equal(model.generate(**call), expected)
    assert torch.equal(model.generate(**call, assistant_model=assistant), expected)
    # With attention in 8 bits beside, which hands on what has a position bias, and few queries.
    call["decoder_input_ids"] = torch.tensor([[0, 5, 7]])
    expected = model.generate(**call)
    ao_lab.use_attention_(model, "int8")
    assert torch.equal(model.generate(**call), expected)


def test_refused_attention():
    """Sinks would be left out, and latent states multiplied after the cache."""
    latent = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    for model, said in (
        (tiny("GptOssConfig", **experts), "has attention sinks"),
        (
            tiny("DeepseekV3Config", **latent, num_key_value_heads=2, first_k_dense_replace=2),
            "stores latent states",
        ),
    ):
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=said):
            ao_lab.use_kv_cache_(model, "bfloat16")
        assert model.config._attn_implementation == before
    model = tiny("GptOssConfig", **experts)
    model.set_attn_implementation("ao_lab")
    cache = ao_lab.KVCache(model, "bfloat16", 8)
    with pytest.raises(ValueError, match="attention 'ao_lab' has no 's_aux'"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)


def test_wrapped(model, prompt):
    """What torch.compile returns calls the model's own `generate`."""
    ours = torch.compile(copy.deepcopy(model), backend="eager")
    ao_lab.use_kv_cache_(ours, "bfloat16")
    found = ours.generate(**prompt, **CALL, return_dict_in_generate=True, use_cache=True)
    assert type(found.past_key_values) is ao_lab.KVCache
    plain = ours.generate(**prompt, **CALL, cache_implementation="dynamic")
    assert torch.equal(found.sequences, plain)
    ao_lab.use_kv_cache_(ours, None)
    assert ours.config._attn_implementation == "sdpa"


def test_fewer_layers(model, prompt):
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    ours = copy.deepcopy(model)
    ao_lab.use_kv_cache_(ours, "fp8")
    with pytest.raises(ValueError, match="for a model with 1 layers, and got layer 1"):
        ours(prompt["input_ids"], past_key_values=ao_lab.KVCache(config, "fp8", 32))
