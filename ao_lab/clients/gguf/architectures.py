"""What GGUF calls the tensors and the numbers of a transformers model.

llama.cpp's rotary embedding of "llama" turns neighbouring elements (2 i, 2 i + 1) of a head, transformers' turns (i, i + d/2):
rows of the query's and the key's projections lie in another order in such a file. Rows are moved whole, with their codes and
scales, so no value changes. "qwen2" and "qwen3" turn halves in both.

Source: convert_hf_to_gguf.py and gguf-py/gguf/constants.py of llama.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Architecture:
    """name: of GGUF. reordered: whether rows of q and k are reordered. forward: the inverse is for reading."""

    name: str
    reordered: bool


#: By the model_type of transformers.
ARCHITECTURES = {
    "llama": Architecture("llama", reordered=True),
    "mistral": Architecture("llama", reordered=True),
    "qwen2": Architecture("qwen2", reordered=False),
    "qwen3": Architecture("qwen3", reordered=False),
}
TURNED = re.compile(r"self_attn\.([qk])_proj\.(?:weight|bias)$")
#: Numbers of the metadata, by the field of the configuration: one of uint32 each.
COUNTS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}


def architecture_of(config: Any) -> Architecture:
    """The record of a model's configuration; ValueError with the reason where GGUF cannot say what the model computes."""
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"GGUF is written for {', '.join(ARCHITECTURES)}, not for {kind!r}; save_pretrained writes any model"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope_type {rope['rope_type']!r} of this {kind} is not written to GGUF; only 'default' is"
        )
    used = getattr(config, "use_sliding_window", True)
    if getattr(config, "sliding_window", None) and used:
        raise ValueError(
            f"llama.cpp's {ARCHITECTURES[kind].name} has no sliding window, and this model's is {config.sliding_window}; "
            "set config.sliding_window = None if no text is longer"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ValueError(
            f"llama.cpp's {ARCHITECTURES[kind].name} has silu, and this model {config.hidden_act!r}"
        )
    return ARCHITECTURES[kind]


def metadata_of(config: Any, arch: Architecture) -> dict[str, int | float]:
    """Names and numbers of the file's metadata."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    numbers: dict[str, int | float] = {name: int(getattr(config, field)) for field, name in COUNTS.items()}
    numbers |= {"rope.dimension_count": width, "attention.key_length": width, "attention.value_length": width}
    numbers["attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    numbers["rope.freq_base"] = float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
    return {f"{arch.name}.{name}": value for name, value in numbers.items()}


def tensor_names(gguf: Any, arch: Architecture, layers: int, names: list[str]) -> dict[str, str]:
    """GGUF's name of each tensor of a state; ValueError for one that the architecture has not."""
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch.name)
    known = gguf.get_tensor_name_map(kind, layers)
    found = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    if lost := [name for name, new in found.items() if new is None]:
        raise ValueError(f"GGUF's {arch.name} has no tensor for {lost[0]}; save_pretrained writes any model")
    return found


def row_order(name: str, config: Any, arch: Architecture, rows: int, *, reading: bool) -> Array | None:
    """Which row of a tensor stands at each place of the file (reading: of the model); None where they stay."""
    found = TURNED.search(name)
    if found is None or not arch.reordered:
        return None
    heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
    pairs = (heads, -1, 2) if reading else (heads, 2, -1)
    order: Array = np.arange(rows).reshape(pairs).swapaxes(1, 2).reshape(-1)
    return order


__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "metadata_of", "row_order", "tensor_names"]
