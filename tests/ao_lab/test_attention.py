"""Attention in 8 bits where users call it: a transformers model, and torch's own function replaced."""

import warnings
from functools import partial

import pytest
import torch

import ao_lab
from ao_lab import attention
from ao_lab.attention import FEWEST_QUERIES, forward
from fast.attention.quantized import quantized_attention
from reference.attention.quantized import ATTENTION_RECIPES

F = torch.nn.functional
TORCH = F.scaled_dot_product_attention


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def states(tokens=FEWEST_QUERIES, keys=FEWEST_QUERIES, heads=4):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, tokens, 32, generator=draw)
    return q, *(torch.randn(2, 2, keys, 32, generator=draw) for _ in range(2))


@torch.no_grad()
def test_model(model):
    """Its layers compute what the function says, near what they computed; None gives back what was, and generation runs."""
    ids = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    before, calls = model(ids).logits, []
    settings = ao_lab.use_attention_(model, "int8")
    assert str(settings).startswith("prefill by attention ao_lab_int8 (queries int8_rowwise")
    assert settings.before == "sdpa"
    assert str(settings) in str(ao_lab.explain(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention, "quantized_attention", lambda *x, **o: calls.append(o) or quantized_attention(*x, **o)
        )
        after = model(ids).logits
        assert [(one["causal"], one["offset"]) for one in calls] == [(True, 0)] * 2
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
        )
        assert new.shape == (2, 43)
        assert len(calls) == 4  # prompts alone
    assert 0 < (after - before).norm() < 0.1 * before.norm()
    assert ao_lab.use_attention_(model, "fp8").before == "sdpa"
    assert ao_lab.use_attention_(model, None) is None
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_padding_and_static_cache(model):
    """Left padding is hidden; a prompt that fills a static cache, and one of ours, sees the prompt alone."""
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    ao_lab.use_attention_(model, "int8")
    plain = model(ids).logits
    mask = (torch.arange(43) >= 3).long()[None]
    left = model(padded, attention_mask=mask, position_ids=(torch.arange(43) - 3).clamp_min(0)[None]).logits
    assert torch.equal(left[:, 3:], plain)
    more = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True,
            "attention_mask": torch.ones_like(ids)}  # fmt: skip
    first = [
        model.generate(ids, **more).logits[0],
        model.generate(ids, cache_implementation="static", **more).logits[0],
    ]
    ao_lab.use_attention_(model, None)
    ao_lab.use_kv_cache_(model, "fp8")
    ao_lab.use_attention_(model, "int8")
    first.append(model.generate(ids, **more).logits[0])
    ao_lab.use_attention_(model, None)
    assert model.config._attn_implementation == "ao_lab"
    ao_lab.use_kv_cache_(model, None)
    ao_lab.use_attention_(model, "int8")  # the other way round
    assert ao_lab.use_kv_cache_(model, "fp8").attention == "sdpa"
    first.append(model.generate(ids, **more).logits[0])
    ao_lab.use_kv_cache_(model, None)
    assert model.config._attn_implementation == "ao_lab_int8"
    ao_lab.use_attention_(model, None)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(one, first[0]) for one in first)


@torch.no_grad()
def test_replaced():
    """In a block and for good, exactly restored; torch's causal edge begins at the first key."""
    q, k, v = states(keys=FEWEST_QUERIES + 8)
    expected = quantized_attention(q, k, v, causal=True, offset=0)
    with ao_lab.replace_sdpa_("int8") as replaced:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), expected)
        compiled = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), backend="aot_eager",
            fullgraph=True,
        )  # fmt: skip
        assert torch.equal(compiled(q, k, v), expected)
        inner = ao_lab.replace_sdpa_("fp8")
        with pytest.raises(ValueError, match="restore what was replaced last first"):
            replaced.restore()
        inner.restore()
        inner.restore()
    assert F.scaled_dot_product_attention is TORCH
    with pytest.raises(RuntimeError), ao_lab.replace_sdpa_():
        raise RuntimeError
    assert F.scaled_dot_product_attention is TORCH


def test_what_goes_to_torch(monkeypatch):
    """With one warning a reason, and torch's own numbers; few queries without."""
    monkeypatch.setattr(attention, "_WARNED", set())
    q, k, v = states()
    full = {"enable_gqa": True}
    cases = [({"dropout_p": 1e-9}, "no dropout"), ({"attn_mask": torch.zeros(32, 32)}, "masks of bool"),
             ({"scale": -1.0}, "positive scales")]  # fmt: skip
    capped = torch.compile(partial(forward, ATTENTION_RECIPES["int8"]), backend="aot_eager", fullgraph=True)
    with ao_lab.replace_sdpa_():
        for options, said in cases:
            torch.manual_seed(0)
            with pytest.warns(UserWarning, match=said):
                y = F.scaled_dot_product_attention(q, k, v, **full, **options)
            torch.manual_seed(0)
            assert torch.equal(y, TORCH(q, k, v, **full, **options))
        with pytest.warns(UserWarning, match="no axes that are broadcast"):
            y = F.scaled_dot_product_attention(q, k[:1], v[:1], **full)
        assert torch.equal(y, TORCH(q, k[:1], v[:1], **full))
        with pytest.warns(UserWarning, match="of one dtype"), pytest.raises(RuntimeError, match="same dtype"):
            F.scaled_dot_product_attention(q, k.half(), v, **full)
        with pytest.warns(UserWarning, match="nested"):
            F.scaled_dot_product_attention(
                *[torch.nested.nested_tensor([q[0]], layout=torch.jagged).transpose(1, 2)] * 3
            )
        with pytest.warns(UserWarning, match="no softcap"):
            capped(torch.nn.Module(), q, k, v, None, softcap=30.0)
        with pytest.warns(UserWarning, match="no gradient"):
            F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v, **full).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            few = F.scaled_dot_product_attention(q[:, :, :3], k, v, **full)
            F.scaled_dot_product_attention(q, k, v, **full, **cases[0][0])  # said before
        assert torch.equal(few, TORCH(q[:, :, :3], k, v, **full))
        with pytest.raises(ValueError, match="enable_gqa=True"):
            F.scaled_dot_product_attention(q, k, v)


def test_refused(model):
    with pytest.raises(TypeError, match="takes a transformers model"):
        ao_lab.use_attention_(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no recipe of attention"):
        ao_lab.use_attention_(model, "int4")
    with pytest.raises(ValueError, match="no recipe of attention"):
        ao_lab.replace_sdpa_("int4")
    assert model.config._attn_implementation == "sdpa"
    assert F.scaled_dot_product_attention is TORCH
