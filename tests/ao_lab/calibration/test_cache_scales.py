"""Static scales of keys and values: where the attention is called, of quantized weights, in the report and in files."""

import json
from dataclasses import replace

import pytest
import torch

import fast
from ao_lab import SchemeConfig, StaticKV, load_pretrained, quantize_, save_pretrained
from ao_lab.calibration.methods import Clip
from ao_lab.kv_cache.static_scales import cache_scales, read_cache_scales, remember_scales
from tests.ao_lab.calibration.test_run import inputs as channels
from tests.ao_lab.calibration.test_run import stack

transformers = pytest.importorskip("transformers")
INT4 = SchemeConfig(scheme="int4_g32").for_layout("compressed-tensors")
IDS = [torch.arange(i, i + 4 * 24).reshape(4, 24) % 250 for i in (0, 50, 100)]
NAMES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def model_of(attention="sdpa"):
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, rope_theta=100.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def of_a_cache(model, batches, **options):
    """The scales of what a cache holds after each batch, merged by their maximum."""
    found = []
    for ids in batches:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(**ids, past_key_values=cache, use_cache=True)
        found.append([fast.kv_scales(layer.keys, layer.values, **options) for layer in cache.layers])
    layers = list(zip(*found, strict=True))
    return [
        [torch.stack([getattr(one, part) for one in layer]).amax(0) for part in ("k", "v")]
        for layer in layers
    ]


@pytest.mark.parametrize(
    ("attention", "per", "element"), [("sdpa", "head", "float8_e4m3fn"), ("eager", "tensor", "int8")]
)
def test_scales_are_those_of_what_a_cache_of_the_quantized_model_holds(attention, per, element):
    """Keys after their rotation by position; heads of the cache, not those of queries."""
    model = model_of(attention)
    batches = [{"input_ids": ids} for ids in IDS]
    report = quantize_(model, INT4, calibration=batches, methods=(Clip(), StaticKV(per, element)))
    assert model.config._attn_implementation == attention
    found = cache_scales(model)
    assert list(found) == NAMES
    for one, (k, v) in zip(found.values(), of_a_cache(model, batches, per=per, element=element), strict=True):
        assert one.k.shape == ((2,) if per == "head" else (1,))
        torch.testing.assert_close(one.k, k.reshape(-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(one.v, v.reshape(-1), rtol=1e-6, atol=0)
    told = [
        layer.reason for layer in report.changed if f"scales of a {element} cache a {per}" in layer.reason
    ]
    assert len(told) == 2


def test_padding_is_not_seen():
    plain, padded = model_of(), model_of()
    mask = torch.cat([torch.zeros(4, 6), torch.ones(4, 24)], 1).long()
    positions = torch.cat([torch.zeros(6), torch.arange(24)])[None].long()
    wide = [
        {
            "input_ids": torch.cat([torch.full((4, 6), 255), ids], 1),
            "attention_mask": mask,
            "position_ids": positions,
        }
        for ids in IDS
    ]
    methods = (StaticKV(),)
    quantize_(plain, INT4, calibration=[{"input_ids": ids} for ids in IDS], methods=methods)
    quantize_(padded, INT4, calibration=wide, methods=methods)
    for one, two in zip(cache_scales(plain).values(), cache_scales(padded).values(), strict=True):
        torch.testing.assert_close(one.k, two.k, rtol=1e-5, atol=0)
        torch.testing.assert_close(one.v, two.v, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("layout", "per"),
    [
        ("compressed-tensors", "head"),
        ("ao_lab", "tensor"),
        pytest.param("compressed-tensors", "tensor", marks=pytest.mark.nightly),
    ],
)
def test_files_hold_them(tmp_path, layout, per):
    """As compressed-tensors names and shapes them; loading gives them back without a warning, plain transformers loads."""
    model = model_of()
    quantize_(model, INT4, calibration=[{"input_ids": ids} for ids in IDS], methods=(StaticKV(per),))
    save_pretrained(model, tmp_path, layout=layout)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["strategy"] == ("attn_head" if per == "head" else "tensor")
    assert (scheme["num_bits"], scheme["type"], scheme["dynamic"]) == (8, "float", False)
    read = load_pretrained(tmp_path)
    for name, one in cache_scales(model).items():
        other = cache_scales(read)[name]
        assert (other.per, other.element) == (one.per, one.element)
        assert torch.equal(other.k, one.k)
        assert torch.equal(other.v, one.v)
    assert torch.equal(read(IDS[0]).logits, model(IDS[0]).logits)
    save_pretrained(read, tmp_path / "again", layout=layout)
    again = load_pretrained(tmp_path / "again")
    assert torch.equal(cache_scales(again)[NAMES[0]].k, cache_scales(model)[NAMES[0]].k)
    if layout == "ao_lab":
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(cache_scales(plain)[NAMES[1]].k, cache_scales(model)[NAMES[1]].k)
        plain.save_pretrained(tmp_path / "plain")
        assert list(cache_scales(load_pretrained(tmp_path / "plain"))) == NAMES
        trunk = transformers.AutoModel.from_pretrained(tmp_path)
        assert list(cache_scales(trunk)) == [name.removeprefix("model.") for name in NAMES]
    if layout == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        k = plain.model.layers[1].self_attn.k_scale
        wanted = cache_scales(model)[NAMES[1]].k
        assert torch.equal(k.reshape(-1), wanted.to(k.dtype))
        assert k.shape == ((2, 1, 1) if per == "head" else (1,))


def test_a_killed_call_has_them_again(tmp_path):
    one, two = model_of(), model_of()
    given = {
        "calibration": [{"input_ids": ids} for ids in IDS],
        "methods": ("clip", "kv"),
        "resume": tmp_path,
    }
    first, second = quantize_(one, INT4, **given), quantize_(two, INT4, **given)
    assert str(first) == str(second)
    assert torch.equal(cache_scales(one)[NAMES[1]].v, cache_scales(two)[NAMES[1]].v)


def test_blocks_that_stay_dense_have_them_too():
    """A folder's scheme is about all caches; readers would take memory as it is for scales that it lacks."""
    model = model_of()
    batches = [{"input_ids": ids} for ids in IDS]
    given = {"calibration": batches, "filter_fn": lambda m, n: n.startswith("model.layers.1")}
    quantize_(model, INT4, methods=(StaticKV(),), **given)
    assert list(cache_scales(model)) == NAMES
    for one, (k, _) in zip(
        cache_scales(model).values(),
        of_a_cache(model, batches, per="head", element="float8_e4m3fn"),
        strict=True,
    ):
        torch.testing.assert_close(one.k, k.reshape(-1), rtol=1e-6, atol=0)


def test_blocks_whose_attention_stays_dense_say_so_once():
    model = model_of()
    given = {"calibration": [{"input_ids": ids} for ids in IDS], "filter_fn": lambda m, n: ".mlp." in f"{n}."}
    report = quantize_(model, INT4, methods=(StaticKV(),), **given)
    told = [
        layer.name for layer in report.changed if "scales of a float8_e4m3fn cache a head" in layer.reason
    ]
    assert told == [f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)]


def test_a_folder_has_scales_of_one_kind(tmp_path):
    model = model_of()
    quantize_(model, INT4, calibration=[{"input_ids": ids} for ids in IDS], methods=(StaticKV(),))
    other = replace(cache_scales(model)[NAMES[1]], element="int8")
    remember_scales(model, {NAMES[1]: other})
    with pytest.raises(ValueError, match="are of 2 kinds"):
        save_pretrained(model, tmp_path)


def test_blocks_without_attention_say_so_and_other_schemes_are_left():
    model = stack()
    report = quantize_(model, SchemeConfig(scheme="int4_g32"), calibration=channels(), methods=(StaticKV(),))
    assert cache_scales(model) == {}
    assert sum("no scales of keys and values" in layer.reason for layer in report.changed) == 2
    tensors = {"a.k_scale": torch.ones(1), "a.v_scale": torch.ones(1)}
    fields = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert list(read_cache_scales(tensors, fields)) == ["a"]
    for change in ({"dynamic": True}, {"strategy": "channel"}, {"num_bits": 4}, {"symmetric": False}):
        assert read_cache_scales(tensors, {**fields, **change}) == {}
    assert read_cache_scales({"a.k_scale": torch.ones(1)}, fields) == {}
    with pytest.raises(ValueError, match="StaticKV: per"):
        StaticKV("channel")
