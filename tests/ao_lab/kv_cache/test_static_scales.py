"""Static scales in `generate()`: of calibration and of a folder, and what explains and describes a cache."""

import pytest
import torch

import ao_lab
import fast
from ao_lab import SchemeConfig, StaticKV, load_pretrained, quantize_, save_pretrained
from ao_lab.kv_cache.recipe import KVRecipe
from ao_lab.kv_cache.static_scales import cache_scales, remember_scales
from reference.quantize.stored import Scales

transformers = pytest.importorskip("transformers")
CALL = {
    "max_new_tokens": 6,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}
IDS = torch.arange(40).reshape(2, 20) % 60 + 3


def model_of():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=100.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def calibrated(per, element):
    model = model_of()
    scheme = SchemeConfig(scheme="int4_g32").for_layout("compressed-tensors")
    quantize_(model, scheme, calibration=[{"input_ids": IDS}], methods=(StaticKV(per, element),))
    return model


@pytest.mark.parametrize(("per", "element"), [("head", "float8_e4m3fn"), ("tensor", "int8")])
def test_generate_from_a_folder(tmp_path, per, element):
    """Codes are those of the folder's scales; the loaded model answers as the calibrated one does; explain and card say so."""
    model = calibrated(per, element)
    save_pretrained(model, tmp_path)
    read = load_pretrained(tmp_path)
    expected = []
    for one in (model, read):
        settings = ao_lab.use_kv_cache_(one, "calibrated")
        assert settings.bytes_per_token == 2 * 2 * 2 * 16
        assert "static scales" in str(ao_lab.explain(one))
        assert "dequantized in each step, since kernels take heads of 64, 128, 256 channels, got 16" in str(
            settings
        )
        expected.append(one.generate(IDS, **CALL))
    for x, y in zip(expected[0].logits, expected[1].logits, strict=True):
        assert torch.equal(x, y)
    cache = expected[1].past_key_values
    scheme = {"float8_e4m3fn": "fp8_rowwise", "int8": "int8_rowwise"}[element]
    plain = transformers.DynamicCache()
    with torch.no_grad():
        read(IDS, past_key_values=plain)
    scales = next(iter(cache_scales(read).values())).k.reshape(1, -1, 1, 1).expand(2, 2, 20, 1).contiguous()
    codes = fast.quantize(plain.layers[0].keys, scheme, scales=Scales(scales)).codes
    assert torch.equal(cache.layers[0].keys.store.codes[:, :, :20], codes)
    card = (tmp_path / "README.md").read_text()
    assert (
        f"static {'FP8' if element != 'int8' else 'INT8'} scales for keys and values, one per {per}" in card
    )
    assert 'use_kv_cache_(model, "calibrated")' in card
    assert "generate() stored" not in card
    save_pretrained(read, tmp_path / "again")
    assert (
        f"generate() stored keys {scheme}, values {scheme}, static scales;"
        in (tmp_path / "again/README.md").read_text()
    )


def test_larger_values_saturate():
    """Beyond the scales of calibration nothing becomes infinite, and the rest has its own codes."""
    model = calibrated("head", "float8_e4m3fn")
    remember_scales(model, {name: type(one)(one.k / 64, one.v / 64, one.element, one.per)
                            for name, one in cache_scales(model).items()})  # fmt: skip
    ao_lab.use_kv_cache_(model, "calibrated")
    assert all(torch.isfinite(x).all() for x in model.generate(IDS, **CALL).logits)


def test_refused():
    """No scales, scales of other layers, and of other numbers of heads; nothing has changed."""
    model = model_of()
    with pytest.raises(ValueError, match="LlamaForCausalLM has none"):
        ao_lab.use_kv_cache_(model, "calibrated")
    static = KVRecipe(key="fp8_rowwise", value="fp8_rowwise", static=True)
    with pytest.raises(ValueError, match="for 0 of 2"):
        ao_lab.use_kv_cache_(model, static)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="one scale a token"):
        KVRecipe(key="int4_g32", value="int4_g32", static=True)
    other = calibrated("head", "float8_e4m3fn")
    remember_scales(other, {name: type(one)(torch.ones(3), torch.ones(3), one.element, one.per)
                            for name, one in cache_scales(other).items()})  # fmt: skip
    ao_lab.use_kv_cache_(other, "calibrated")
    with pytest.raises(ValueError, match="3 heads do not fit 2 key heads"):
        other.generate(IDS, **CALL)
