"""Tiny random models of transformers, and what tests of `from_pretrained` compare.

A small Llama with a tokenizer made on the fly, as folders of transformers have them.

A small sentence encoder and a small Whisper with random weights, as folders of transformers have them.

Folders of small random language models of several architectures, with a tokenizer, as experiments take them by --model.
"""

import json

import torch
from torch import nn

from ao_lab import QuantizedTensor, SchemeConfig, quantize_
from ao_lab.transforms.layers import linear_and_experts
from tests.ao_lab.quantization.test_models import MODELS, transformers

KINDS = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "WhisperForConditionalGeneration", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM", "GptOssForCausalLM", "ViTForImageClassification", "T5ForConditionalGeneration",
)  # fmt: skip
MORE = {
    "MixtralForCausalLM": (
        {**MODELS["LlamaForCausalLM"][0], "num_local_experts": 4},
        {"input_ids": torch.arange(18)[None]},
    )
}


def dense_model(kind, dtype=torch.float32, **fields):
    """A model of a class, with the same numbers each time, and inputs for it."""
    given, inputs = (MORE.get(kind) or MODELS[kind])[:2]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class._from_config(model_class.config_class(**{**given, **fields}), dtype=dtype).eval()
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    return model, inputs


def everything(module, name):
    """Tables too."""
    return isinstance(module, nn.Embedding) or linear_and_experts(module, name)


def quantized_model(kind, scheme, activation=None, accepts=linear_and_experts, **fields):
    """A model of a class, its weights in a scheme, and inputs for it."""
    model, inputs = dense_model(kind, **fields)
    quantize_(model, SchemeConfig(scheme=scheme, activation_scheme=activation), accepts)
    return model, inputs


def assert_same_weights(one, two):
    """Parameters and buffers by type, dtype, description and bits; which are one tensor."""
    first, second = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())} for m in (one, two)
    )
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert (type(a), a.dtype, a.device) == (type(b), b.dtype, b.device), name
        if not isinstance(a, QuantizedTensor):
            assert torch.equal(a, b), name
            continue
        assert a.meta == b.meta, name
        assert not b.requires_grad
        for part, value in a.parts.items():
            other = b.parts[part]
            assert (value is None) == (other is None), (name, part)
            assert value is None or (value.dtype == other.dtype and torch.equal(value, other)), (name, part)
    assert [first[a] is first[b] for a in first for b in first] == [
        second[a] is second[b] for a in second for b in second
    ]


def outputs(model, inputs):
    """What a model says, without gradients."""
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.logits if hasattr(outputs, "logits") else outputs[0]


WORDS = "the of and to in is it that for was on are with as at be this have from or by not but what all were when we there can"


def tokenizer():
    """Words of one text, and bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return tokenizer


def save_llama(path, *, seed=0, vocabulary=320, with_tokenizer=True, tied=False):
    """The folder of a random model in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    if with_tokenizer:
        tokenizer().save(str(path / "tokenizer.json"))
    return model


#: Of the multilingual Whisper: tokens in all, and the ids of its special ones that are asked for.
VOCABULARY = 51865
SPECIAL = {
    "<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259, "<|transcribe|>": 50359, "<|notimestamps|>": 50363,
}  # fmt: skip


def save_mpnet(path, *, seed=0):
    """The folder of a random encoder of one layer in float32."""
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=400,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.MPNetModel(config).eval()
    model.save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="!")
    fast.save_pretrained(path)
    return model


def save_whisper(path, *, seed=0, special=SPECIAL):
    """The folder of a random Whisper of one layer a side in float16, and a tokenizer of a few words with Whisper's ids."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_target_positions=80, pad_token_id=50257,
        bos_token_id=50257, eos_token_id=50257, decoder_start_token_id=50258,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config).half()
    model.save_pretrained(path)
    words = {word: number for number, word in enumerate(["[UNK]", "one", "two", "three", "of", "clubs"])}
    made = Tokenizer(models.WordLevel({**words, **special}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path / "tokenizer.json"))
    return model


#: Names, and what each has that the others lack.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def save_lm(path, kind="llama", *, tied=False, seed=0, **fields):
    """The folder of a random model in bfloat16: biases in qwen2, norms of queries in qwen3, BOS and short windows in gemma3."""
    import transformers

    made = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    }
    config_name, class_name, more = made[kind]
    config = getattr(transformers, config_name)(**{**SIZES, **more, **fields}, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, class_name)(config).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    words = tokenizer()
    if kind == "gemma3":
        _begin(path, words)
    words.save(str(path / "tokenizer.json"))
    return path


def _begin(path, tokenizer):
    """Each text begins with <s>."""
    from tokenizers import processors

    tokenizer.add_special_tokens(["<s>"])
    token = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token)])
    config = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
