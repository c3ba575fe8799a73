"""Two processes that read one model by transformers, which shards it: `DistributedConfig(tp_plan="auto")`, experts, FSDP2.

    python -m tests.support.distributed.ranks hf.run RANKS DIRECTORY day|night

Prints "equal" where quantized weights are the shards of one process's, and outputs those of the sharded dense model's accuracy.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from ao_lab import HfConfig, KVCache, SchemeConfig, explain, quantize_, use_kv_cache_
from ao_lab.checkpoint.transformers.methods import holds_quantized
from tests.support.models.hf_models import assert_same_weights, dense_model, outputs

TENSOR, EXPERTS, DATA = {"tp_size": 2, "tp_plan": "auto"}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2}
#: (class, its fields, how it is sharded, scheme, modules_to_not_convert, from a quantized folder or a dense one)
DAY = (
    ("LlamaForCausalLM", {}, TENSOR, "int4_g32_asymmetric", None, True),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}, TENSOR, "int8_rowwise", [], False),
)
KINDS = (
    ("LlamaForCausalLM", {}), ("LlamaForCausalLM", {"tie_word_embeddings": True}), ("Qwen2MoeForCausalLM", {}),
    ("MixtralForCausalLM", {}), ("GptOssForCausalLM", {}),
)  # fmt: skip
SCHEMES = ("int8_rowwise", "int4_g32_asymmetric", "fp8_tensorwise", "nvfp4", "mxfp8_e4m3")
NIGHT = tuple(
    (kind, fields, sharding, scheme, names, stored)
    for kind, fields in KINDS
    for sharding in (TENSOR, DATA, *([EXPERTS] if kind == "MixtralForCausalLM" else []))
    for scheme in SCHEMES
    for names, stored in ((None, True), ([], False))
)


def read(kind, folder, sharding=None, **given):
    if sharding is not None:
        given["distributed_config"] = DistributedConfig(**sharding)
    return getattr(transformers, kind).from_pretrained(folder, **given)


def on_rank_0(write):
    if dist.get_rank() == 0:
        write()
    dist.barrier()


def check(folder, kind, fields, sharding, scheme, names, stored):
    """Weights after a save that gathers them bit for bit; outputs up to the order of sums; generated tokens."""
    case = (kind, fields, sharding, scheme, names, stored)
    model, inputs = dense_model(kind, **fields)
    dense, one_folder, again = (folder / name for name in ("dense", "quantized", "again"))
    on_rank_0(lambda: model.save_pretrained(dense))
    one = read(kind, dense, quantization_config=HfConfig(scheme, names))
    on_rank_0(lambda: one.save_pretrained(one_folder))
    many = (
        read(kind, one_folder, sharding)
        if stored
        else read(kind, dense, sharding, quantization_config=HfConfig(scheme, names))
    )
    quantized = [p for p in many.parameters() if holds_quantized(p)]
    assert len(quantized) == sum(map(holds_quantized, one.parameters())), case
    assert any(hasattr(p, "full_tensor") for p in quantized), case
    assert not any(p.requires_grad for p in quantized), case
    assert off(many, one) < 0.02, case
    wanted = outputs(one, inputs)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad():
            assert torch.allclose(many(**inputs).logits, wanted, rtol=0, atol=2e-6), case
    tokens = [m.generate(**inputs, max_new_tokens=2, do_sample=False) for m in (one, many)]
    assert torch.equal(*tokens), case
    many.save_pretrained(again)
    assert_same_weights(one, read(kind, again))
    lines = [[(line.name, line.shape, line.scheme) for line in explain(m).layers] for m in (one, many)]
    assert lines[0] == lines[1], case
    assert stored or not any("stopped" in line.reason for line in explain(many).layers), case
    plain = many.dequantize()
    assert not any(map(holds_quantized, plain.parameters())), case
    assert torch.allclose(outputs(plain, inputs), outputs(one.dequantize(), inputs), rtol=0, atol=2e-6), case


def off(many, one):
    """How far bytes of all shards are from those of one process; scales that hold for every shard are on every rank."""
    return abs(many.get_memory_footprint() / one.get_memory_footprint() - 1)


def check_refused(folder):
    """Blocks of the flattened tensor have no columns: an error on both ranks, that names the layer."""
    model, _ = dense_model("LlamaForCausalLM")
    on_rank_0(lambda: model.save_pretrained(folder / "dense"))
    with pytest.raises(
        ValueError, match=r"down_proj.weight in nf4 is not sharded as .*; leave the layer dense"
    ):
        read("LlamaForCausalLM", folder / "dense", TENSOR, quantization_config=HfConfig("nf4"))
    many = read("LlamaForCausalLM", folder / "dense", TENSOR)
    with pytest.raises(
        TypeError, match=r"q_proj.weight is a DTensor, .* changed nothing\..*=ao_lab\.HfConfig\(config\)"
    ):
        quantize_(many, SchemeConfig(scheme="int8_rowwise"))
    one = read("LlamaForCausalLM", folder / "dense", quantization_config=HfConfig("nf4"))
    on_rank_0(lambda: one.save_pretrained(folder / "quantized"))
    with pytest.raises(
        ValueError, match=r"down_proj.weight in nf4 is not sharded as .*; leave the layer dense"
    ):
        read("LlamaForCausalLM", folder / "quantized", TENSOR)


def check_written_once(folder):
    """A model that every rank has whole is written by the first, as dense ones are."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    model.save_pretrained(folder / f"by{dist.get_rank()}")
    dist.barrier()
    assert sorted(path.name for path in folder.glob("by*")) == ["by0"]


def check_cache(folder):
    """Each rank stores its own key heads: the tokens of one process, and what its cache has of those heads.

    Inputs of the second layer are sums of the ranks' products, in another order than in one process.
    """
    model, inputs = dense_model("LlamaForCausalLM")
    on_rank_0(lambda: model.save_pretrained(folder))
    many = read("LlamaForCausalLM", folder, TENSOR)
    whole, own = ([*stored(each, inputs)] for each in (model, many))
    assert torch.equal(whole.pop(), own.pop())
    for keys, part in zip(whole, own, strict=True):
        heads = keys.shape[1] // 2
        assert part.shape[1] == heads
        assert torch.allclose(part, keys[:, heads * dist.get_rank() :][:, :heads], rtol=0, atol=2e-6)


def stored(model, inputs):
    """Keys and values of each layer's cache that `generate` leaves behind, and the tokens."""
    use_kv_cache_(model, "bfloat16")
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    result = model.generate(**inputs, **options)
    assert type(result.past_key_values) is KVCache
    for layer in result.past_key_values.layers:
        yield from (layer.keys.store.codes, layer.values.store.codes)
    use_kv_cache_(model, "int8")
    assert model.generate(**inputs, **options).sequences.shape == result.sequences.shape
    yield result.sequences


def run(directory, when):
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for number, case in enumerate(DAY if when == "day" else NIGHT):
        check(Path(directory) / f"{when}{number}", *case)
    check_refused(Path(directory) / "refused")
    check_written_once(Path(directory))
    check_cache(Path(directory) / "cache")
