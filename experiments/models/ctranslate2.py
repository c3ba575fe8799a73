"""Whisper in CTranslate2's binary format (version 6), as a folder of transformers.

The file is little-endian: version (uint32), the name of the specification (a string), its revision and the number of variables
(uint32), then for each its name (a string), rank (uint8), dimensions (uint32 each), type (uint8: 0 float32, 1 int8, 2 int16,
3 int32, 4 float16), bytes (uint32) and the bytes; at last the number of aliases (uint32) and their pairs of names. A string is
its length (uint16) with the closing zero, and its bytes.

Rows of ``self_attention/linear_0`` are query, key and value; of ``attention/linear_1``, over the encoder's output, key and
value; keys have no bias in transformers, and zero ones here.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ao_lab.install.extras import needed

VERSION, SPECIFICATION = 6, "WhisperSpec"
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
#: Token ids of the multilingual tokenizer: end of text, and start of a transcript.
END, START = 50257, 50258


class Reader:
    """Values of a file, one after the other; ValueError where it ends early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def number(self, kind: str) -> int:
        """An unsigned integer: B, H or I, of 1, 2 or 4 bytes."""
        (value,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))
        return int(value)

    def string(self) -> str:
        """A name."""
        return self.take(self.number("H")).rstrip(b"\0").decode()

    def take(self, count: int) -> bytes:
        """So many bytes."""
        if self.place + count > len(self.data):
            raise ValueError(f"a file of CTranslate2 ends within a value, at byte {len(self.data)}")
        self.place += count
        return self.data[self.place - count : self.place]


def variables(data: bytes) -> dict[str, Tensor]:
    """The variables of a file by name; ValueError for another format, another model, and types that are not known."""
    reader = Reader(data)
    version, name = reader.number("I"), reader.string()
    if (version, name) != (VERSION, SPECIFICATION):
        raise ValueError(
            f"a file of CTranslate2 of version {VERSION} holds a {SPECIFICATION}, got version {version} and {name!r}"
        )
    reader.number("I")
    found = {}
    for _ in range(reader.number("I")):
        name = reader.string()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        found[name] = tensor(name, shape, reader.number("B"), reader.take(reader.number("I")))
    return found


def tensor(name: str, shape: list[int], kind: int, data: bytes) -> Tensor:
    """The value of a variable; ValueError for an unknown type or another number of bytes than its shape has."""
    if kind not in TYPES:
        raise ValueError(f"{name} has type {kind}; known are {', '.join(map(str, TYPES))}")
    dtype = np.dtype(TYPES[kind])
    if len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} has {len(data)} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())


def state(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The variables under the names of transformers' Whisper."""
    made: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        made[f"model.{side}.embed_positions.weight"] = found[f"{side}/position_encodings/encodings"]
        norm(made, f"model.{side}.layer_norm", found, f"{side}/layer_norm")
        for number in range(layers(found, side)):
            layer(made, f"model.{side}.layers.{number}.", found, f"{side}/layer_{number}/")
    for name in ("conv1", "conv2"):
        copied(made, f"model.encoder.{name}", found, f"encoder/{name}")
    made["model.decoder.embed_tokens.weight"] = made["proj_out.weight"] = found["decoder/embeddings/weight"]
    return made


def layers(found: dict[str, Tensor], side: str) -> int:
    """How many layers the encoder or the decoder has."""
    return len(
        {name.split("/")[1] for name in found if name.startswith(f"{side}/layer_") and "norm" not in name}
    )


def layer(made: dict[str, Tensor], to: str, found: dict[str, Tensor], name: str) -> None:
    """One layer: attention to itself, in a decoder to the encoder, and the two linear layers."""
    norm(made, f"{to}self_attn_layer_norm", found, f"{name}self_attention/layer_norm")
    split(made, f"{to}self_attn", ("q_proj", "k_proj", "v_proj"), found, f"{name}self_attention/linear_0")
    copied(made, f"{to}self_attn.out_proj", found, f"{name}self_attention/linear_1")
    if f"{name}attention/linear_0/weight" in found:
        norm(made, f"{to}encoder_attn_layer_norm", found, f"{name}attention/layer_norm")
        copied(made, f"{to}encoder_attn.q_proj", found, f"{name}attention/linear_0")
        split(made, f"{to}encoder_attn", ("k_proj", "v_proj"), found, f"{name}attention/linear_1")
        copied(made, f"{to}encoder_attn.out_proj", found, f"{name}attention/linear_2")
    norm(made, f"{to}final_layer_norm", found, f"{name}ffn/layer_norm")
    copied(made, f"{to}fc1", found, f"{name}ffn/linear_0")
    copied(made, f"{to}fc2", found, f"{name}ffn/linear_1")


def norm(made: dict[str, Tensor], to: str, found: dict[str, Tensor], name: str) -> None:
    """Gain and bias of a normalization."""
    made[f"{to}.weight"], made[f"{to}.bias"] = found[f"{name}/gamma"], found[f"{name}/beta"]


def copied(made: dict[str, Tensor], to: str, found: dict[str, Tensor], name: str) -> None:
    """Weight and bias of a layer."""
    made[f"{to}.weight"], made[f"{to}.bias"] = found[f"{name}/weight"], found[f"{name}/bias"]


def split(
    made: dict[str, Tensor], to: str, names: tuple[str, ...], found: dict[str, Tensor], name: str
) -> None:
    """Layers whose rows are stored one after the other; ValueError where keys have a bias."""
    parts = len(names)
    weights, biases = found[f"{name}/weight"].chunk(parts), found[f"{name}/bias"].chunk(parts)
    for one, weight, bias in zip(names, weights, biases, strict=True):
        made[f"{to}.{one}.weight"] = weight.contiguous()
        if one != "k_proj":
            made[f"{to}.{one}.bias"] = bias.contiguous()
        elif bool(bias.any()):
            raise ValueError(f"{name}: keys have a bias, for which Whisper has no place")


def save_whisper(file: Path, folder: Path) -> None:
    """Write the model of a file into a folder that transformers loads, in the dtype of the file."""
    transformers: Any = needed("transformers")
    found = variables(file.read_bytes())
    weights = state(found)
    tokens, width = found["decoder/embeddings/weight"].shape
    config = transformers.WhisperConfig(
        vocab_size=tokens,
        d_model=width,
        num_mel_bins=found["encoder/conv1/weight"].shape[1],
        encoder_layers=layers(found, "encoder"),
        decoder_layers=layers(found, "decoder"),
        encoder_attention_heads=int(found["encoder/num_heads"]),
        decoder_attention_heads=int(found["decoder/num_heads"]),
        encoder_ffn_dim=len(found["encoder/layer_0/ffn/linear_0/bias"]),
        decoder_ffn_dim=len(found["decoder/layer_0/ffn/linear_0/bias"]),
        max_source_positions=len(found["encoder/position_encodings/encodings"]),
        max_target_positions=len(found["decoder/position_encodings/encodings"]),
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
    )
    model = transformers.WhisperForConditionalGeneration(config).to(weights["proj_out.weight"].dtype)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
