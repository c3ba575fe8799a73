"""`save_gguf`: a quantized language model as one file that llama.cpp and transformers read.

Codes and scales go over as they are (`ao_lab.clients.gguf.blocks`); what is not quantized is written in its own dtype, vectors
in float32, as llama.cpp wants them. Every tensor is converted before the file is begun, so a refusal leaves nothing behind.

The tokenizer goes with it: tokens, merges, kinds of tokens, and what llama.cpp calls the splitting of words. It is byte-level
BPE, as Llama 3, Qwen and SmolLM have it. llama.cpp knows rules of splitting by name; that name is found from the
pre-tokenizer's own description, and a rule that has none here is refused, since another one would give other tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ao_lab.checkpoint.io.files import file_to_write, staged
from ao_lab.checkpoint.save_checks import check_finished, check_quantized
from ao_lab.clients.gguf.architectures import (
    Architecture,
    architecture_of,
    metadata_of,
    row_order,
    tensor_names,
)
from ao_lab.clients.gguf.blocks import TYPES, WAY_OUT, Blocks, to_blocks
from ao_lab.config.base import SchemeConfig
from ao_lab.config.recipe import Recipe
from ao_lab.install.extras import needed
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import check_model, is_untied
from ao_lab.transforms.low_rank import refuse_residuals
from reference import Scheme

#: The embedding of each architecture here.
EMBEDDING = "model.embed_tokens.weight"
DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class GgufFile(NamedTuple):
    """What `save_gguf` wrote: the file, its bytes, and how many tensors have each type of GGUF."""

    path: Path
    bytes: int
    types: dict[str, int]


def save_gguf(
    model: nn.Module,
    path: str | Path,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    embedding: str | Scheme | None = None,
) -> GgufFile:
    """Save a causal language model of transformers (llama, mistral, qwen2, qwen3) as a GGUF file.

    model: weights (N, K) quantized with float16 scales or as mxfp4, in blocks along K of a multiple of 32, are stored in Q8_0,
    Q5_0, Q4_0, Q5_1, Q4_1 or MXFP4, bitwise equal to `dequantize` in float32; other tensors in float32, float16 or bfloat16.
    tokenizer: a fast tokenizer of byte-level BPE; None: llama.cpp only accepts token numbers. name: `general.name`.
    embedding: a scheme (int8_g32_f16 is Q8_0) by which the file stores an embedding that the model has dense, rounded to
    nearest, and with it a head that shares its weight; the model is not changed. Default: in its dtype.

    TypeError for anything but a module. ValueError, before anything is written, for a scheme without a GGUF block, quantized
    activations (llama.cpp rounds them by its own rules), a rotation, another architecture, a tokenizer of another kind, a
    model in training, one without quantized weights, and a path in no folder; it says which and what would work.
    """
    check_model(model)
    path = file_to_write(path)
    gguf = needed("gguf")
    config: Any = getattr(model, "config", None)
    arch = architecture_of(config)
    check_finished(model)
    check_quantized(model, "convert_hf_to_gguf.py of llama.cpp writes")
    refuse_residuals(model, "GGUF")
    state = _state(model)
    if str(embedding).upper() in TYPES:
        raise ValueError(f"embedding={embedding!r} is a type of GGUF, and embedding is a scheme; {WAY_OUT}")
    if embedding is not None:
        state[EMBEDDING] = _rounded(state[EMBEDDING], SchemeConfig(scheme=embedding).recipe())
    names = tensor_names(gguf, arch, config.num_hidden_layers, list(state))
    tensors = {names[key]: _written(key, value, config, arch) for key, value in state.items()}
    fields = {} if tokenizer is None else tokenizer_fields(tokenizer, config.vocab_size)
    with staged(path.parent) as place:
        writer = gguf.GGUFWriter(place / path.name, arch.name)
        # transformers takes a llama whose name has "mistral" in it for an architecture that GGUF has not.
        writer.add_name(name or arch.name)
        writer.add_quantization_version(2)
        for key, value in metadata_of(config, arch).items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        _add_tokenizer(writer, fields)
        for key, blocks in tensors.items():
            writer.add_tensor(key, blocks.data, raw_dtype=gguf.GGMLQuantizationType[blocks.type])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    kinds = [blocks.type for blocks in tensors.values()]
    return GgufFile(path, path.stat().st_size, {kind: kinds.count(kind) for kind in sorted(set(kinds))})


def _add_tokenizer(writer: Any, fields: dict[str, Any]) -> None:
    if not fields:
        writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in fields.items():
        full = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_array)(full, value)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors; a head that is the embedding's table is left out, as readers expect it."""
    state = {key: value.detach() for key, value in model.state_dict(keep_vars=True).items()}
    config: Any = model.config
    if config.tie_word_embeddings and not is_untied(model):
        state.pop("lm_head.weight", None)
    return state


def _rounded(table: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """A dense embedding rounded to nearest; ValueError for one that is quantized already."""
    if isinstance(table, QuantizedTensor):
        raise ValueError(
            f"embedding={recipe.weight.name!r}: the model's embedding is quantized already, by {table.recipe.weight.name}; "
            f"leave it out"
        )
    return quantized_weight(table, recipe)


def _written(name: str, value: torch.Tensor, config: Any, arch: Architecture) -> Blocks:
    """A tensor as it stands in the file; ValueError with its name."""
    order = row_order(name, config, arch, value.shape[0], reading=False)
    if not isinstance(value, QuantizedTensor):
        return _dense(name, value, order)
    recipe, value = value.recipe, value.plain
    try:
        if recipe.activation is not None:
            raise ValueError(
                f"inputs in {recipe.activation.name}: llama.cpp rounds inputs by its own rules; quantize weights only"
            )
        if recipe.rotation:
            raise ValueError(f"a rotation of {recipe.rotation} inputs, which llama.cpp does not make")
        if isinstance(value, SparseQuantizedTensor) or value.meta.transposed:
            raise ValueError("2:4 and transposed storage are not written; quantize the dense weight")
        blocks = to_blocks(value.cpu().quantized)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return blocks if order is None else Blocks(blocks.type, blocks.data[order])


def _dense(name: str, value: torch.Tensor, order: NDArray[Any] | None) -> Blocks:
    if value.dtype not in DENSE:
        raise ValueError(f"{name}: dense tensors are float32, float16 or bfloat16, got {value.dtype}")
    kind = DENSE[value.dtype] if value.ndim > 1 else "F32"
    value = value.cpu().float() if kind == "F32" else value.cpu()
    raw = value.view(torch.uint16) if kind == "BF16" else value
    data = np.ascontiguousarray(raw.numpy() if order is None else raw.numpy()[order])
    return Blocks(kind, data.view(np.uint8) if kind == "BF16" else data)


#: Kinds of tokens.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's name by the regular expression that splits words.
SPLITS = {_LLAMA + "{1,3}" + _END: "llama-bpe", _LLAMA + _END: "qwen2"}


def tokenizer_fields(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The entries `tokenizer.*` of a file, by their names, for a fast tokenizer of transformers.

    vocab_size: rows of the token embedding; places without a token are unused. ValueError for tokenizers of another kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer; save without one (tokenizer=None)"
        )
    said = json.loads(backend.to_str())
    model = said["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"only byte-level BPE is written to GGUF, and this tokenizer is {model['type']}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''}; save without one (tokenizer=None)"
        )
    tokens, kinds = _tokens(tokenizer, said, vocab_size)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": _splitting(said["pre_tokenizer"]),
        "tokens": tokens,
        "token_type": kinds,
    }
    fields |= {"merges": merges} if merges else {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := getattr(tokenizer, f"{role}_token_id", None)) is not None:
            fields[f"{key}_token_id"] = int(number)
    fields["add_bos_token"] = _begins(tokenizer)
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        fields["chat_template"] = template
    return fields


def _tokens(tokenizer: Any, said: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {one["id"]: CONTROL if one["special"] else USER_DEFINED for one in said["added_tokens"]}
    if names and max(names) >= vocab_size:
        raise ValueError(
            f"the tokenizer has token {max(names)}, and the model {vocab_size} rows; it belongs to another model"
        )
    tokens = [names.get(place, f"[PAD{place}]") for place in range(vocab_size)]
    return tokens, [added.get(place, NORMAL if place in names else UNUSED) for place in range(vocab_size)]


def _begins(tokenizer: Any) -> bool:
    """Whether a text begins with BOS."""
    first = tokenizer("a").input_ids[:1]
    return bool(first) and first[0] == tokenizer.bos_token_id


def _splitting(rule: dict[str, Any] | None) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    steps = [] if rule is None else rule.get("pretokenizers", [rule])
    kinds = [one["type"] for one in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and steps[0]["pattern"].get("Regex") in SPLITS:
        return SPLITS[steps[0]["pattern"]["Regex"]]
    raise ValueError(
        f"llama.cpp's name of the pre-tokenizer {' + '.join(kinds) or 'none'} is not known here; save without a tokenizer "
        "(tokenizer=None)"
    )


__all__ = ["GgufFile", "save_gguf", "tokenizer_fields"]
