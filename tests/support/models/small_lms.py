"""Folders of small random language models of several architectures, with a tokenizer, as experiments take them by --model."""

import json

import torch

from tests.support.models import hf_models

#: Names, and what each has that the others lack.
KINDS = ("llama", "qwen2", "qwen3", "gemma3")
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
    tokenizer = hf_models.tokenizer()
    if kind == "gemma3":
        _begin(path, tokenizer)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _begin(path, tokenizer):
    """Each text begins with <s>."""
    from tokenizers import processors

    tokenizer.add_special_tokens(["<s>"])
    token = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token)])
    config = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
