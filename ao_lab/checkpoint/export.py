"""Quantized weights as compressed-tensors stores them, so that transformers and vLLM read them without this library.

An `Export` is one format of compressed-tensors 0.20: the tensors that stand for a weight (by what follows the module's name),
the way back, and what its reader makes of them (`ao_lab.config.compressed_tensors` says which recipes it stores).
`ao_lab.checkpoint.plain_readers` compares that with the model and raises where a bit differs: a file either means what
the model means, or is not written.

Integers are offset by 2**(bits - 1) and packed little-endian into int32 words; e8m0 scales are bytes; the outer scale of NVFP4
is stored as its reciprocal, by which the reader divides. The reader's rounding of that quotient may differ from one product,
so a neighbour of the reciprocal is taken where only that gives the right bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import fast
from ao_lab.checkpoint.io.shards import Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.config.compressed_tensors import format_of, input_arguments, plain_scales, weight_arguments
from ao_lab.config.recipe import Recipe
from ao_lab.interop import native_dtype
from reference import Quantized, Scheme
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import unpacked


@dataclass(frozen=True)
class Export:
    """One format: the tensors of a weight, and the stored weight of tensors."""

    name: str
    write: Callable[[Quantized], Tensors]
    #: Of tensors, the scheme and the weight's shape.
    read: Callable[[Tensors, Scheme, tuple[int, ...]], Quantized]
    #: dtype and shape of every tensor.
    specs: Callable[[Scheme, tuple[int, ...]], Specs]


def export_of(recipe: Recipe) -> Export | None:
    """The export in whose format a recipe's weight is stored, or None."""
    found = format_of(recipe)
    return None if found is None else EXPORTS[found.name]


def value_read(
    export: Export, tensors: Tensors, q: Quantized, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """What compressed-tensors makes of tensors that stand for q, in a dtype, by its own order of operations.

    Scales count as they are given, float32 or narrower. A product of float32 that is rounded once is the product in `dtype`.
    """
    read = unpacked(export.read(tensors, q.scheme, q.shape))
    codes, scale, storage = fast.decode(read.codes, q.scheme.element), read.scale, q.scheme.scale.storage
    scale = scale if storage == "float32" else fast.decode(scale, storage)
    if read.zero is not None:
        codes = codes - _spread(read.zero.to(torch.float32), q)
    if "weight_global_scale" in tensors:
        scale = scale / tensors["weight_global_scale"]
    return (codes * _spread(scale, q)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one floating-point dtype have the same bits."""
    carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(carrier), b.view(carrier))


def variants(tensors: Tensors) -> list[Tensors]:
    """The tensors, and with the neighbours of a reciprocal outer scale."""
    name = "weight_global_scale"
    if name not in tensors:
        return [tensors]
    exact = tensors[name]
    up, down = (torch.nextafter(exact, torch.full_like(exact, end)) for end in (torch.inf, 0.0))
    return [{**tensors, name: scale} for scale in (exact, up, down)]


def _spread(scale: torch.Tensor, q: Quantized) -> torch.Tensor:
    """Scales (or zero points) for every element of a matrix."""
    block = q.scheme.scale.block
    if scale.dim() < 2 or block == -1:
        return scale
    rows, columns = block if isinstance(block, tuple) else (1, int(block))
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: q.shape[0], : q.shape[1]]


# What the tensors are: dtype and shape of each.

#: Static scales of a layer's input.
INPUT_SPECS = {"input_scale": Spec(torch.float32, (1,)), "input_zero_point": Spec(torch.int8, (1,))}
WORD_BYTES = 4


def byte_specs(scheme: Scheme, shape: tuple[int, ...]) -> Specs:
    """compressed-tensors' formats of one byte an element."""
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape or (1,)
    result = {
        "weight": Spec(native_dtype(scheme.format) or torch.int8, shape),
        "weight_scale": _scale_spec(scheme, blocks),
    }
    return result if scheme.zero is None else {**result, "weight_zero_point": Spec(torch.int8, blocks)}


def word_specs(scheme: Scheme, shape: tuple[int, ...]) -> Specs:
    """pack-quantized: little-endian int32 words of rows, zero points likewise along the columns."""
    if len(shape) != 2:
        raise ValueError(f"compressed-tensors holds matrices, got shape {shape}")
    bits, (rows, columns) = scheme.format.bits, shape
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    result = {
        "weight_packed": Spec(torch.int32, (rows, words(columns, bits))),
        "weight_scale": _scale_spec(scheme, blocks),
        "weight_shape": Spec(torch.int64, (2,)),
    }
    if scheme.zero is None:
        return result
    return {**result, "weight_zero_point": Spec(torch.int32, (words(rows, bits), blocks[1]))}


def packed_specs(scheme: Scheme, shape: tuple[int, ...]) -> Specs:
    """compressed-tensors' packed floats."""
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    # A byte an element or more: e8m0 scales stay bytes there.
    e4m3 = scheme.scale.storage == "float8_e4m3fn"
    scale = Spec(torch.float8_e4m3fn if e4m3 else torch.uint8, blocks)
    result = {"weight_packed": Spec(torch.uint8, packed_shape(shape, scheme.format)), "weight_scale": scale}
    return result if scheme.outer is None else {**result, "weight_global_scale": Spec(torch.float32, (1,))}


def words(count: int, bits: int) -> int:
    """32-bit words of `count` codes."""
    return math.ceil(math.ceil(count * bits / 8) / WORD_BYTES)


def _scale_spec(scheme: Scheme, blocks: tuple[int, ...]) -> Spec:
    """Block scales in their own dtype; e8m0 as bytes."""
    kept = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return Spec(kept.get(scheme.scale.storage, torch.uint8), blocks)


# Tensors of weights, and back.


def _write_bytes(q: Quantized) -> Tensors:
    """One byte per element."""
    dtype = native_dtype(q.scheme.format) or torch.int8
    return {"weight": q.codes.view(dtype), "weight_scale": _channels(_scale(q)), **_zero(q, _channels)}


def _read_bytes(tensors: Tensors, scheme: Scheme, shape: tuple[int, ...]) -> Quantized:
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    zero = tensors.get("weight_zero_point") if scheme.zero is not None else None
    scale = _stored_scale(tensors["weight_scale"], scheme)
    codes = tensors["weight"].view(torch.uint8)
    return Quantized(
        codes, scale.reshape(blocks), None, None if zero is None else zero.reshape(blocks), shape, 1, scheme
    )


def _scale(q: Quantized) -> torch.Tensor:
    """Scales as tensors of their own dtype, not as its codes."""
    scale: torch.Tensor = q.scale
    return scale.view(torch.bfloat16) if q.scheme.scale.storage == "bfloat16" else scale


def _stored_scale(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The inverse of `_scale`, whatever the dtype that a program gave them in between."""
    if scheme.scale.storage == "bfloat16":
        return scale.to(torch.bfloat16).view(torch.uint16)
    return scale.to(torch.float32) if plain_scales(scheme) else scale


def _channels(scale: torch.Tensor) -> torch.Tensor:
    """Scales with an axis, also where there is one for the tensor."""
    return scale.reshape(1) if scale.dim() == 0 else scale


def _zero(q: Quantized, form: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {} if q.zero is None else {"weight_zero_point": form(q.zero)}


def _write_words(q: Quantized) -> Tensors:
    """Integers offset to be unsigned, little-endian in int32 words; zero points likewise, along the rows."""
    bits, codes = q.scheme.format.bits, unpacked(q).codes
    packed_zero = _zero(q, lambda zero: _words(zero.view(torch.uint8).t(), bits).t().contiguous())
    return {
        "weight_packed": _words(codes, bits),
        "weight_scale": _scale(q),
        "weight_shape": torch.tensor(q.shape),
        **packed_zero,
    }


def _read_words(tensors: Tensors, scheme: Scheme, shape: tuple[int, ...]) -> Quantized:
    bits = scheme.format.bits
    codes = unwords(tensors["weight_packed"], bits, shape)
    zero = None
    if scheme.zero is not None:
        zero = zeros_of_words(
            tensors["weight_zero_point"], bits, Blocks.of(shape, scheme.scale, -1).scale_shape
        )
    scale = _stored_scale(tensors["weight_scale"], scheme)
    return packed(Quantized(codes, scale, None, zero, shape, 1, scheme))


def packed(q: Quantized) -> Quantized:
    """q as `QuantizedTensor` stores it."""
    if q.scheme.format.bits >= 8:
        return q
    return replace(q, codes=fast.pack(q.codes, q.scheme.format), packed=True)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    unsigned = ((codes ^ (1 << (bits - 1))) & ((1 << bits) - 1)).contiguous()
    data = unsigned if bits == 8 else fast.pack(unsigned, f"uint{bits}")
    padded = torch.nn.functional.pad(data, (0, -data.shape[-1] % WORD_BYTES))
    # Flat first: the stride of an axis of length 1 may be anything, which view(dtype) minds.
    return padded.reshape(-1).view(torch.int32).reshape(*data.shape[:-1], padded.shape[-1] // WORD_BYTES)


def zeros_of_words(words: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Zero points (rows, groups) as int8, of words along the rows."""
    unsigned = unwords(words.t().contiguous(), bits, shape[::-1]).t().to(torch.int16)
    return (unsigned - ((unsigned >> (bits - 1)) << bits)).to(torch.int8).contiguous()


def unwords(words: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Two's complement codes of integers that lie, offset by 2**(bits - 1), in little-endian int32 words of rows."""
    rows = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], words.shape[-1] * WORD_BYTES)
    data = rows[..., : -(-shape[-1] * bits // 8)].contiguous()
    unsigned = data if bits == 8 else fast.unpack(data, f"uint{bits}", shape)
    return unsigned ^ (1 << (bits - 1))


def _write_packed(q: Quantized) -> Tensors:
    """Packed float codes are the bytes that we store; e4m3 scales have their dtype, the outer scale is inverted."""
    # Readers expect e4m3 scales in their dtype and e8m0 scales as bytes.
    storage = q.scheme.scale.storage
    scale = q.scale if storage == "float8_e8m0fnu" else q.scale.view(native_dtype(storage) or q.scale.dtype)
    result = {"weight_packed": q.codes, "weight_scale": scale}
    if q.outer is None:
        return result
    inverted = q.outer if q.scheme.outer_order == "encode" else 1.0 / q.outer
    return {**result, "weight_global_scale": inverted.reshape(1)}


def _read_packed(tensors: Tensors, scheme: Scheme, shape: tuple[int, ...]) -> Quantized:
    outer = tensors.get("weight_global_scale")
    if outer is not None:
        outer = outer.to(torch.float32).reshape(())
        outer = outer if scheme.outer_order == "encode" else 1.0 / outer
    scale = tensors["weight_scale"].view(torch.uint8)
    return Quantized(tensors["weight_packed"], scale, outer, None, shape, 1, scheme, packed=True)


EXPORTS = {
    export.name: export
    for export in (
        Export("int-quantized", _write_bytes, _read_bytes, byte_specs),
        Export("pack-quantized", _write_words, _read_words, word_specs),
        Export("float-quantized", _write_bytes, _read_bytes, byte_specs),
        Export("mxfp8-quantized", _write_bytes, _read_bytes, byte_specs),
        Export("mxfp6-pack-quantized", _write_packed, _read_packed, packed_specs),
        Export("mxfp4-pack-quantized", _write_packed, _read_packed, packed_specs),
        Export("nvfp4-pack-quantized", _write_packed, _read_packed, packed_specs),
    )
}


# The `quantization_config` of a folder in compressed-tensors' formats: which layers are stored how, as data.


def quantization_config(
    layers: Mapping[str, tuple[str, Recipe, bool]], dense: list[str], heads: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration of a model: (format, recipe, whether inputs are static) of each quantized module, and the dense ones.

    One group for each different recipe. A single group is for all nn.Linear but the dense ones; several name their layers
    (transformers 5.23 reads those without dequantize=True only). `heads`: modules that compute logits. vLLM's layer for them
    (ParallelLMHead) is no linear layer to it, so the group of a quantized one names it too, wherever it lies.
    """
    groups: dict[tuple[str, Recipe, bool], list[str]] = {}
    for name, how in layers.items():
        groups.setdefault(how, []).append(name)
    result = {}
    for index, ((name, recipe, static), members) in enumerate(groups.items()):
        result[f"group_{index}"] = {
            "targets": _targets(members, heads, len(groups) == 1),
            "weights": weight_arguments(recipe.weight),
            "input_activations": None
            if recipe.activation is None
            else input_arguments(recipe.activation, static),
            "output_activations": None,
            "format": name,
        }
    formats = {name for name, _, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": result,
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(members: Collection[str], heads: Collection[str], alone: bool) -> list[str]:
    """The layers of a group: patterns for the heads among them, then the others.

    Readers give a layer to the first target that matches, and warn of targets that got none: a pattern comes before "Linear",
    and in place of the names of the heads that it matches, unless another group has a head of that name.
    """
    leaf_of = {name: name.rpartition(".")[2] for name in heads}
    leaves = sorted({leaf_of[name] for name in heads if name in members})
    patterns = [f"re:.*{re.escape(leaf)}$" for leaf in leaves]
    apart = {leaf_of[name] for name in heads if name not in members}
    named = [name for name in members if name not in leaf_of or leaf_of[name] in apart]
    return [*patterns, *(["Linear"] if alone else named)]


def check_groups(given: Mapping[str, Any], weights: Iterable[tuple[str, Recipe]], where: str) -> None:
    """ValueError where a folder's configuration describes weights as none of these (format, recipe) are stored.

    Readers of compressed-tensors go by the configuration, `load_pretrained` by its records: they must mean one thing. Which
    layers a group is for (`targets`, `ignore`) is not looked at; no pattern of a file is ever matched.
    """
    known = {(fmt, recipe.weight.key): weight_arguments(recipe.weight) for fmt, recipe in weights}
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where} has no config_groups, got {shown(groups)}; fetch it again")
    for name, group in groups.items():
        arguments = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(arguments, dict) or not isinstance(group.get("targets"), list):
            raise ValueError(
                f"{where}: {shown(name)} names targets and describes weights, got {shown(group)}; fetch it again"
            )
        fmt = group.get("format") or given.get("format")
        wrong = [
            next(
                (key for key in wanted if arguments.get(key) != wanted[key]), "format" if kind != fmt else ""
            )
            for (kind, _), wanted in known.items()
        ]
        if not wrong:
            raise ValueError(
                f"{where}: {shown(name)} is there, and the records name no weights; fetch it again"
            )
        if all(wrong):
            got = arguments.get(wrong[0], fmt)
            raise ValueError(
                f"{where}: {shown(name)} is of no weight of the files: {wrong[0]} is {shown(got)}; fetch it again"
            )
