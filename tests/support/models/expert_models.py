"""Small mixtures of experts of transformers, one for each way in which their weights are laid out and named."""

import functools

import torch
import transformers

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
#: Tokens that every expert sees some of.
TOKENS = torch.arange(36).reshape(2, 18) * 7 % 256
MIXTRAL = {"intermediate_size": 128, "num_local_experts": 4}
QWEN = {"moe_intermediate_size": 128, "intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "moe_intermediate_size": 128, "intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1, "q_lora_rank": 128, "kv_lora_rank": 96,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size": 128,
    "intermediate_size_mlp": 256,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
}
#: (model, configuration, its own sizes, contraction axis of the experts).
MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MIXTRAL, -1),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**QWEN, "shared_expert_intermediate_size": 128},
        -1,
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN, -1),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, -1),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", MIXTRAL, -2),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4, -2),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", MIXTRAL, -1),
}


@functools.cache
def _made(name: str) -> torch.nn.Module:
    kind, config, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    fields = getattr(transformers, config)(**{**SIZES, **sizes})
    model = getattr(transformers, kind)._from_config(fields, dtype=torch.bfloat16)
    for parameter in model.parameters():
        # Some models leave experts uninitialized, or all alike.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def model_of(name: str) -> torch.nn.Module:
    """A model with random weights in bfloat16."""
    import copy

    return copy.deepcopy(_made(name))


def saved(name: str, folder) -> torch.nn.Module:
    """A model, saved by transformers."""
    model = model_of(name)
    model.save_pretrained(folder)
    return model
