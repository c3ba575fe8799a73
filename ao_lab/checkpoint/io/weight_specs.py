"""What a quantized weight is on disk, from its scheme and shape alone: the dtype and shape of every tensor.

Loading compares files with this before it reads them; sizes of models (`ao_lab.checkpoint.size`) are sums over it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ao_lab.checkpoint.io.safetensors_header import Spec
from ao_lab.interop import native_dtype
from ao_lab.tensor.metadata import SPARSE, Meta, stored_shape
from ao_lab.tensor.slicing import COLUMNS
from reference import Scheme
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.quantize.scales import stored_parts
from reference.quantize.stored import check_tiled, tiled_size

WORD_BYTES = 4
#: Static scales of a layer's input in our layout.
STATIC_SPECS = {"input_scale": Spec(torch.float32, ()), "input_zero": Spec(torch.int8, ())}
Specs = dict[str, Spec]


def own_specs(meta: Meta, shape: tuple[int, ...], static: tuple[str, ...] = ()) -> Specs:
    """Our layout: what `reference.quantize` makes, codes packed below 8 bits; `static` names the input's scale and zero point.

    ValueError where the scheme's blocks do not fit the shape.
    """
    if meta.layout == SPARSE:
        return _sparse_specs(meta, shape, static)
    scheme, stored = meta.recipe.weight, stored_shape(meta, shape)
    blocks = Blocks.of(stored, scheme.scale, meta.axis)
    wide = torch.uint8 if scheme.format.bits <= 8 else torch.uint16
    result = {"codes": Spec(wide, packed_shape(stored, scheme.format))}
    for name, part in stored_parts(scheme, blocks).items():
        if part is not None:
            result[name] = Spec(getattr(torch, part[0]), part[1])
    if meta.layout == "tiled":
        check_tiled(scheme, stored, meta.axis)
        rows, columns = blocks.scale_shape
        result["scale"] = Spec(torch.uint8, (tiled_size((rows, columns)),))
    return {**result, **{name: STATIC_SPECS[name] for name in static}}


def _sparse_specs(meta: Meta, shape: tuple[int, ...], static: tuple[str, ...]) -> Specs:
    """2:4 storage: half of the codes and a byte of metadata for 8 columns, along the last stored axis; scales of the dense
    weight."""
    stored = stored_shape(meta, shape)
    if len(stored) < 2 or stored[-1] % 4 or meta.axis != -1:
        raise ValueError(
            f"2:4 storage holds matrices with groups of four along their blocks' axis, got shape {stored}"
        )
    scheme = meta.recipe.weight
    dense = own_specs(replace(meta, layout="plain", transposed=False, flat=None), stored, static)
    codes = packed_shape((*stored[:-1], stored[-1] // 2), scheme.format)
    metadata = Spec(torch.uint8, (*stored[:-1], -(-stored[-1] // COLUMNS)))
    return {**dense, "codes": Spec(dense["codes"].dtype, codes), "metadata": metadata}


def byte_specs(scheme: Scheme, shape: tuple[int, ...]) -> Specs:
    """compressed-tensors' formats of one byte an element."""
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape or (1,)
    result = {
        "weight": Spec(native_dtype(scheme.format) or torch.int8, shape),
        "weight_scale": _scale(scheme, blocks),
    }
    return result if scheme.zero is None else {**result, "weight_zero_point": Spec(torch.int8, blocks)}


def word_specs(scheme: Scheme, shape: tuple[int, ...]) -> Specs:
    """pack-quantized: little-endian int32 words of rows, zero points likewise along the columns."""
    bits, (rows, columns) = scheme.format.bits, _matrix(shape)
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    result = {
        "weight_packed": Spec(torch.int32, (rows, words(columns, bits))),
        "weight_scale": _scale(scheme, blocks),
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


#: Static scales of a layer's input there.
INPUT_SPECS = {"input_scale": Spec(torch.float32, (1,)), "input_zero_point": Spec(torch.int8, (1,))}


def words(count: int, bits: int) -> int:
    """32-bit words of `count` codes."""
    return math.ceil(math.ceil(count * bits / 8) / WORD_BYTES)


def _scale(scheme: Scheme, blocks: tuple[int, ...]) -> Spec:
    """Block scales in their own dtype; e8m0 as bytes."""
    kept = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return Spec(kept.get(scheme.scale.storage, torch.uint8), blocks)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"compressed-tensors holds matrices, got shape {shape}")
    return shape[0], shape[1]


__all__ = ["INPUT_SPECS", "Specs", "byte_specs", "own_specs", "packed_specs", "word_specs", "words"]
