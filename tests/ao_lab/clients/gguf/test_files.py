"""GGUF files of models: read by transformers' own loader and by ours, with the weights of the model that was written."""

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import QuantizedTensor, SchemeConfig
from tests.support.models.hf_models import tokenizer

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
FIELDS = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CLASSES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
}


def model_of(kind="llama", scheme="int8_g32_f16", dtype=torch.float32, **fields):
    """A small model in a scheme; biases and norms are not what they are at first."""
    name, own = CLASSES[kind]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = (
        cls._from_config(cls.config_class(**{**FIELDS, **own, **fields}), dtype=dtype)
        .eval()
        .requires_grad_(False)
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1)
    if scheme:
        ao_lab.quantize_(model, SchemeConfig(scheme=scheme))
    return model


def prepared(model):
    """The model in step "prepare"."""
    half = ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(32), scale_dtype=torch.float16)
    ao_lab.quantize_(model, ao_lab.QATConfig(half, step="prepare"))
    return model


def values(model):
    """Every tensor's float32 values."""
    state = model.state_dict(keep_vars=True)
    return {
        name: value.dequantize(torch.float32)
        if isinstance(value, QuantizedTensor)
        else value.detach().float()
        for name, value in state.items()
    }


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def fast_tokenizer():
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer())


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 200, 31, 77, 4]])).logits


def by_transformers(path):
    """The model as transformers' GGUF loader makes it."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip


READ = {"llama": "int8_g32_f16", "mistral": "mxfp4", "qwen2": "int4_g32_f16", "qwen3": "int5_g32_f16"}


@pytest.mark.parametrize("kind", READ)
def test_transformers_reads_the_same_weights(kind, tmp_path):
    """Bit for bit, biases and norms too, and the same outputs up to float32's rounding of sums."""
    # Its loader knows no biases of "llama".
    model = model_of(
        kind, READ[kind], **({"attention_bias": False, "mlp_bias": False} if kind == "llama" else {})
    )
    written = ao_lab.save_gguf(model, tmp_path / "model.gguf", fast_tokenizer())
    theirs = by_transformers(written.path)
    assert theirs.config.model_type == kind.replace("mistral", "llama")
    assert_same(values(theirs), values(model))
    # Twelve products deep, of at most 96 terms: far below what a wrong row order would change.
    assert (logits(theirs) - logits(model)).abs().max() < 2**-14 * logits(model).abs().max()


def test_an_embedding_in_8_bits(tmp_path):
    """A head that shares it reads it too; the model stays as it is."""
    model = model_of("qwen2", "int4_g32_f16")
    dense = model.model.embed_tokens.weight.clone()
    written = ao_lab.save_gguf(model, tmp_path / "model.gguf", fast_tokenizer(), embedding="int8_g32_f16")
    assert written.types["Q8_0"] == 1
    assert torch.equal(model.model.embed_tokens.weight, dense)
    table = ao_lab.dequantize(ao_lab.quantize(dense, SchemeConfig(scheme="int8_g32_f16").recipe().weight))
    assert not torch.equal(table, dense)
    for theirs in (by_transformers(written.path), ao_lab.load_gguf(written.path, dtype=torch.float32)):
        assert torch.equal(theirs.get_input_embeddings().weight, table)
        assert torch.equal(theirs.get_output_embeddings().weight, table)
    with pytest.raises(ValueError, match=r"'q8_0' is a type of GGUF.*int8_g32_f16 as Q8_0"):
        ao_lab.save_gguf(model, tmp_path / "other.gguf", embedding="q8_0")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: nf4"):
        ao_lab.save_gguf(model, tmp_path / "other.gguf", embedding="nf4")
    ao_lab.quantize_(model, SchemeConfig(scheme="int8_g32_f16"), lambda module, name: "embed" in name)
    with pytest.raises(ValueError, match="quantized already, by int8_g32_f16; leave it out"):
        ao_lab.save_gguf(model, tmp_path / "other.gguf", embedding="int8_g32_f16")
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.parametrize("kind", CLASSES)
def test_load_gguf_gives_the_codes_back(kind, tmp_path):
    model = model_of(kind, "int4_g32_f16", torch.bfloat16)
    ao_lab.save_gguf(model, tmp_path / "model.gguf")
    again = ao_lab.load_gguf(tmp_path / "model.gguf")
    assert again.config.model_type == kind.replace("mistral", "llama")
    assert_same(values(again), values(model))
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, QuantizedTensor):
            other = again.get_parameter(name)
            assert other.scheme == weight.scheme
            assert torch.equal(other.codes, weight.codes), name
            assert torch.equal(other.scale, weight.scale), name
    assert torch.equal(logits(again), logits(model))


def test_the_width_of_heads_is_read(tmp_path):
    """transformers' own loader takes 128 for qwen3 whatever the file says."""
    model = model_of("qwen3", "int8_g32_f16", head_dim=32)
    ao_lab.save_gguf(model, tmp_path / "model.gguf")
    again = ao_lab.load_gguf(tmp_path / "model.gguf", dtype=torch.float32)
    assert_same(values(again), values(model))


def test_the_tokenizer_goes_along(tmp_path):
    own = fast_tokenizer()
    ao_lab.save_gguf(model_of(), tmp_path / "model.gguf", own)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("the of and to", "zq 17 \n which"):
        assert theirs(text).input_ids == own(text).input_ids
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    assert (len(kinds), kinds[-1], kinds[0]) == (320, 5, 1)


def test_types_of_a_file_are_said(tmp_path):
    written = ao_lab.save_gguf(model_of("qwen2", "int4_g32_f16", torch.bfloat16), tmp_path / "model.gguf")
    assert written.types == {"BF16": 1, "F32": 11, "Q4_0": 14}
    assert written.bytes == (tmp_path / "model.gguf").stat().st_size


def test_types_without_a_scheme_are_read_as_values_and_named(tmp_path):
    """A file of another program with a matrix in Q6_K."""
    model = model_of("qwen2", hidden_size=256, intermediate_size=256)
    ao_lab.save_gguf(model, tmp_path / "plain.gguf")
    reader = gguf.GGUFReader(tmp_path / "plain.gguf")
    writer = gguf.GGUFWriter(tmp_path / "mixed.gguf", "qwen2")
    for key, field in reader.fields.items():
        if key.startswith("qwen2."):
            is_float = field.types[0] == gguf.GGUFValueType.FLOAT32
            (writer.add_float32 if is_float else writer.add_uint32)(key, field.contents())
    for one in reader.tensors:
        data, kind = np.asarray(one.data), one.tensor_type
        if one.name == "blk.0.ffn_up.weight":
            data, kind = np.full((256, 210), 7, np.uint8), gguf.GGMLQuantizationType.Q6_K
            data[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        writer.add_tensor(one.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.warns(UserWarning, match="mixed.gguf has linear layers in Q6_K"):
        read = ao_lab.load_gguf(tmp_path / "mixed.gguf", dtype=torch.float32)
    (data,) = (
        t.data for t in gguf.GGUFReader(tmp_path / "mixed.gguf").tensors if t.name == "blk.0.ffn_up.weight"
    )
    wanted = gguf.quants.dequantize(np.asarray(data), gguf.GGMLQuantizationType.Q6_K)
    assert np.array_equal(read.model.layers[0].mlp.up_proj.weight.numpy(), wanted)


REFUSED = {
    "scheme": (lambda: model_of(scheme="int8_rowwise"), "q_proj.weight: int8_rowwise: its scales .* int8_g32_f16 as Q8_0"),
    "architecture": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32)),
        "GGUF is written for llama, mistral, qwen2, qwen3, not for 'gpt2'",
    ),
    "window": (lambda: model_of("mistral", sliding_window=32), "no sliding window, and this model's is 32"),
    "rope": (
        lambda: model_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type 'linear' of this llama",
    ),
    "activation": (
        lambda: (ao_lab.quantize_(
            m := model_of(scheme=None), SchemeConfig(scheme="int8_g32_f16", activation_scheme="int8_rowwise")
        ) and None) or m,
        "inputs in int8_rowwise: llama.cpp rounds inputs by its own rules",
    ),
    "dense": (lambda: model_of(scheme=None), "no quantized weights; call quantize_ first .convert_hf_to_gguf.py of llama.cpp"),
    "in training": (lambda: prepared(model_of(scheme=None)), "prepared for quantization-aware training; step='convert'"),
}  # fmt: skip


def test_a_missing_folder_is_not_made(tmp_path):
    for write in (ao_lab.save_gguf, lambda model, path: ao_lab.export_onnx(model, (), path)):
        with pytest.raises(ValueError, match="new is no folder, so model"):
            write(torch.nn.Identity(), tmp_path / "new" / "model.bin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_said_is_refused_and_nothing_is_written(case, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ao_lab.save_gguf(make(), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_other_tokenizers_are_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    for given, message in (
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "only byte-level BPE .* WordLevel"),
        (other, "pre-tokenizer Whitespace is not known"),
    ):
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=given)
        with pytest.raises(ValueError, match=message):
            ao_lab.save_gguf(model_of(), tmp_path / "model.gguf", wrapped)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no file"):
        ao_lab.load_gguf(tmp_path / "model.gguf")
    ao_lab.save_gguf(model_of("qwen2"), tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(
        content.replace(b"blk.1.attn_norm.weight", b"blk.1.attn_nork.weight")
    )
    with pytest.raises(ValueError, match=r"has no tensor blk\.1\.attn_norm\.weight"):
        ao_lab.load_gguf(tmp_path / "model.gguf")


def test_a_broken_file_is_one_error(tmp_path):
    """Cut anywhere, no GGUF at all, and numbers of tensors and of rows that no file has."""
    path = tmp_path / "model.gguf"
    ao_lab.save_gguf(model_of("qwen2"), path)
    whole = path.read_bytes()
    place = whole.index(b"qwen2.embedding_length") + len(b"qwen2.embedding_length") + 4
    broken = [b"", b"GGUF", b"text" * 99, *(whole[:end] for end in (30, 200, 2000, len(whole) - 900))]
    broken += [whole[:8] + b"\xff" * 8 + whole[16:], whole[:16] + b"\xff" * 8 + whole[24:]]
    broken += [whole[:place] + b"\x00\x00\xff\x7f" + whole[place + 4 :]]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf"):
            ao_lab.load_gguf(path)
