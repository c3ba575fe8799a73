"""The tokenizer in a GGUF file: tokens, merges, kinds of tokens, and what llama.cpp calls the splitting of words.

Byte-level BPE, as Llama 3, Qwen and SmolLM have it. llama.cpp knows rules of splitting by name; that name is found from the
pre-tokenizer's own description, and a rule that has none here is refused, since another one would give other tokens.
"""

from __future__ import annotations

import json
from typing import Any

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


__all__ = ["tokenizer_fields"]
