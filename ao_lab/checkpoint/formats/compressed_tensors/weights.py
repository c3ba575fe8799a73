"""Weights in the formats of compressed-tensors: what their tensors are, and the values that its decompressors make of them.

Read off compressed-tensors 0.20: compressors/*/base.py (which tensors), quantization/lifecycle/forward_helpers.py, _dequantize:
`(code - zero) * scale` in the scale's own dtype, rounded to the output's. For a scale of 16 bits that is one rounding of the
exact product, as scheme.dequantize "ieee" has it in that dtype; NVFP4's block scale is divided by the global one in float32, MX
scales are powers of two. Nothing here looks at the name of a format but the table of the formats' layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

import fast
from ao_lab.checkpoint.formats.compressed_tensors.groups import Arguments
from ao_lab.checkpoint.formats.group_integers import regrouped, run_length
from ao_lab.checkpoint.io.safetensors_header import Spec
from ao_lab.checkpoint.io.weight_specs import WORD_BYTES, Specs, words
from ao_lab.config.recipe import block_name
from reference import FORMATS, SCHEMES, Quantized, Scheme, Zero
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.default_schemes import mx_name
from reference.schemes.schemes import Block

Tensors = dict[str, torch.Tensor]
#: Storage of scales by their dtype: its name, and the end of a scheme's name.
FLOATS = {
    torch.float32: ("float32", ""),
    torch.bfloat16: ("bfloat16", "_bf16"),
    torch.float16: ("float16", "_f16"),
}
ELEMENTS = {4: "float4_e2m1fn", 6: "float6_e2m3fn", 8: "float8_e4m3fn"}
#: What a weight takes that is not quantized, in bits an element.
DENSE_BITS = 16
INTEGERS = (torch.int64, torch.int32)
E8M0_NAN = 255


@dataclass(frozen=True)
class Layout:
    """How a format stores codes and scales."""

    #: The tensor of codes: "weight", a byte each, or "weight_packed".
    codes: str
    #: Whether packed codes are int32 words (integers with an offset), not bytes.
    words: bool = False
    #: Scales: "float", "e8m0" or "e4m3".
    scales: str = "float"


LAYOUTS = {
    "naive-quantized": Layout("weight"),
    "int-quantized": Layout("weight"),
    "float-quantized": Layout("weight"),
    "mxfp8-quantized": Layout("weight", scales="e8m0"),
    "pack-quantized": Layout("weight_packed", words=True),
    "mxfp4-pack-quantized": Layout("weight_packed", scales="e8m0"),
    "mxfp6-pack-quantized": Layout("weight_packed", scales="e8m0"),
    "nvfp4-pack-quantized": Layout("weight_packed", scales="e4m3"),
}


def block_of(arguments: Arguments) -> Block:
    """The block of a record for a strategy."""
    if arguments.block is not None:
        return arguments.block
    whole: dict[str, Block] = {"tensor": "tensor", "channel": -1}
    return arguments.group_size if arguments.group_size is not None else whole[arguments.strategy]


def scheme_of(arguments: Arguments, layout: Layout, scale: torch.dtype) -> Scheme:
    """The record of a weight; ValueError where no record says what the arguments say."""
    block = block_of(arguments)
    kinds = {"int": {bits: f"int{bits}" for bits in range(2, 9)}, "float": ELEMENTS}
    element = kinds[arguments.kind].get(arguments.bits)
    if element is None or (element not in FORMATS) or (arguments.kind == "float" and layout.words):
        raise ValueError(
            f"{arguments.kind} of {arguments.bits} bits are no elements of this format that a scheme has"
        )
    if not arguments.symmetric and arguments.kind != "int":
        raise ValueError("floats with zero points are in no scheme")
    if layout.scales == "e8m0":
        if block != 32:
            raise ValueError(f"MX scales are for groups of 32, got {block}")
        model = SCHEMES[f"compressed_tensors.{mx_name(element)}"]
        # Exact in every dtype: the record rounds in the output's, where float16 holds no such scales.
        return known(replace(model, name=f"{model.name}_checkpoint", dequantize="ieee"))
    if layout.scales == "e4m3":
        model = SCHEMES["compressed_tensors.nvfp4"]
        name = model.name if block == model.scale.block else f"{model.name}_{block_name(block)}"
        return known(replace(model, name=name, element=element, scale=replace(model.scale, block=block)))
    return float_scales(element, block, scale, arguments.symmetric)


def float_scales(element: str, block: Block, scale: torch.dtype, symmetric: bool = True) -> Scheme:
    """Integers or floats in any block beside scales of 16 or 32 bits, by compressed-tensors' rules."""
    if scale not in FLOATS:
        raise ValueError(f"scales are float32, bfloat16 or float16, got {scale}")
    kept, end = FLOATS[scale]
    fmt = FORMATS[element]
    integer = fmt.kind == "int"
    model = SCHEMES[f"compressed_tensors.{'int8' if integer else 'fp8'}_channel"]
    target = (2.0**fmt.bits - 1) / (2 if symmetric else 1) if integer else fmt.max
    statistic = "absmax" if symmetric else "minmax_with_zero"
    record = replace(
        model.scale,
        block=block,
        target=target,
        statistic=statistic,
        storage=kept,
        partial=isinstance(block, tuple),
    )
    short = element if integer else f"fp{fmt.bits}"
    name = (
        f"compressed_tensors.{short}_{block_name(block)}{'' if symmetric else '_asymmetric'}{end}_checkpoint"
    )
    zero = None if symmetric else Zero()
    return known(replace(model, name=name, element=element, scale=record, zero=zero, dequantize="ieee"))


def known(scheme: Scheme) -> Scheme:
    """The record of the table that is the same, if there is one."""
    return SCHEMES[scheme.name] if SCHEMES.get(scheme.name) == scheme else scheme


# What the tensors are.


def shape_of(
    layout: Layout, found: Specs, arguments: Arguments, stored: tuple[int, ...] | None
) -> tuple[int, int]:
    """The weight's shape, from its codes and, where words leave it open, from weight_shape or the scales."""
    codes = found[layout.codes].shape
    if len(codes) != 2:
        raise ValueError(f"{layout.codes} is a matrix, got shape {codes}")
    rows, width = codes
    if layout.codes == "weight":
        return rows, width
    if not layout.words:
        return rows, width * 8 // arguments.bits
    if stored is not None:
        if len(stored) != 2 or stored[0] != rows or words(max(stored[1], 0), arguments.bits) != width:
            raise ValueError(
                f"weight_shape says {stored}, weight_packed has shape {codes} of {arguments.bits}-bit integers"
            )
        return rows, stored[1]
    if arguments.group_size is not None and len(found["weight_scale"].shape) == 2:
        return rows, found["weight_scale"].shape[1] * arguments.group_size
    return rows, width * WORD_BYTES * 8 // arguments.bits


def specs_of(layout: Layout, scheme: Scheme, shape: tuple[int, int], found: Specs) -> Specs:
    """dtype and shape of every tensor of a weight, given those that are there."""
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    fmt = scheme.format
    if layout.words:
        codes = Spec(torch.int32, (shape[0], words(shape[1], fmt.bits)))
    elif layout.codes == "weight":
        codes = Spec(torch.int8 if fmt.kind == "int" else torch.float8_e4m3fn, shape)
    else:
        codes = Spec(torch.uint8, packed_shape(shape, fmt))
    result = {layout.codes: codes, "weight_scale": _scale(layout, found["weight_scale"], blocks)}
    if layout.scales == "e4m3":
        result["weight_global_scale"] = Spec(torch.float32, (1,))
    if "weight_shape" in found:
        kind = found["weight_shape"].dtype
        result["weight_shape"] = Spec(kind if kind in INTEGERS else torch.int64, (2,))
    if "weight_g_idx" in found:
        result["weight_g_idx"] = Spec(found["weight_g_idx"].dtype, (shape[1],))
    if scheme.zero is not None or "weight_zero_point" in found:
        result["weight_zero_point"] = _zero(layout, scheme, shape, blocks, found)
    return result


def _scale(layout: Layout, found: Spec, blocks: tuple[int, ...]) -> Spec:
    dtype = {"float": found.dtype, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}[layout.scales]
    if layout.scales == "e8m0" and found.dtype == torch.float8_e8m0fnu:
        dtype = found.dtype
    return Spec(dtype, like(found.shape, blocks))


def like(found: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that is there, where it is the blocks' with or without axes of length 1; else the blocks'."""
    squeezed = [tuple(n for n in shape if n != 1) for shape in (found, blocks)]
    return found if squeezed[0] == squeezed[1] and len(found) <= 2 else blocks or (1,)


def _zero(
    layout: Layout, scheme: Scheme, shape: tuple[int, int], blocks: tuple[int, ...], found: Specs
) -> Spec:
    bits = scheme.format.bits
    packed = (
        layout.words
        and scheme.zero is not None
        and len(blocks) == 2
        and not isinstance(scheme.scale.block, tuple)
    )
    if packed:
        return Spec(torch.int32, (words(shape[0], bits), blocks[1]))
    there = found.get("weight_zero_point")
    # Symmetric weights of earlier versions have zero points, all of them 0.
    dtype = torch.int8 if there is None or scheme.zero is not None else there.dtype
    return Spec(dtype, like(there.shape, blocks) if there is not None else blocks or (1,))


# The values.


def quantized_of(
    layout: Layout, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> Quantized:
    """The stored weight of its tensors; ValueError where their values are in no scheme."""
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    scale, zero = tensors["weight_scale"].reshape(blocks), _zero_codes(layout, scheme, shape, tensors)
    if "weight_g_idx" in tensors and isinstance(scheme.scale.block, int) and scheme.scale.block > 0:
        scheme, scale, zero = _in_runs(scheme, scale, zero, tensors["weight_g_idx"])
    if layout.scales == "e8m0":
        scale = scale.view(torch.uint8)
        if bool((scale == E8M0_NAN).any()):
            raise ValueError("a scale is 255, which e8m0 calls NaN and compressed-tensors infinity")
    elif layout.scales == "e4m3":
        scale = scale.view(torch.uint8)
    elif scale.dtype != torch.float32:
        scale = scale.view(torch.uint16)
    outer = tensors["weight_global_scale"].reshape(()) if scheme.outer is not None else None
    codes, packed = _codes(layout, scheme, shape, tensors[layout.codes])
    return Quantized(codes, scale, outer, zero, shape, 1, scheme, packed)


def _codes(
    layout: Layout, scheme: Scheme, shape: tuple[int, int], kept: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Codes as `QuantizedTensor` stores them, and whether they are packed."""
    fmt = scheme.format
    if layout.codes != "weight" and not layout.words:
        return kept, True
    codes = unwords(kept, fmt.bits, shape) if layout.words else kept.view(torch.uint8)
    if fmt.bits == 8:
        return codes, False
    if not layout.words:
        low, high = fmt.integer_range
        if bool(((kept < low) | (kept > high)).any()):
            raise ValueError(
                f"codes of {fmt.name} lie from {low} to {high}, got {int(kept.min())} to {int(kept.max())}"
            )
        codes = codes & ((1 << fmt.bits) - 1)
    return fast.pack(codes.contiguous(), fmt), True


def unwords(kept: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Two's complement codes of integers that lie, offset by 2**(bits - 1), in little-endian int32 words of rows."""
    rows = kept.contiguous().reshape(-1).view(torch.uint8).reshape(kept.shape[0], kept.shape[1] * WORD_BYTES)
    data = rows[:, : -(-shape[1] * bits // 8)].contiguous()
    unsigned = data if bits == 8 else fast.unpack(data, f"uint{bits}", shape)
    return (unsigned ^ (1 << (bits - 1))).contiguous()


def _zero_codes(
    layout: Layout, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    kept = tensors.get("weight_zero_point")
    if kept is None:
        return None
    if scheme.zero is None:
        if bool((kept != 0).any()):
            raise ValueError("a symmetric weight has zero points that are not 0; fetch the folder again")
        return None
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    if kept.dtype == torch.int32:
        bits = scheme.format.bits
        unsigned = unwords(kept.t().contiguous(), bits, (blocks[1], shape[0])).t().to(torch.int16)
        return (unsigned - ((unsigned >> (bits - 1)) << bits)).to(torch.int8).contiguous()
    low, high = scheme.format.integer_range
    if bool(((kept < low) | (kept > high)).any()):
        raise ValueError(f"zero points of {scheme.element} lie from {low} to {high}, others are there")
    return kept.reshape(blocks)


def _in_runs(
    scheme: Scheme, scale: torch.Tensor, zero: torch.Tensor | None, g_idx: torch.Tensor
) -> tuple[Scheme, torch.Tensor, torch.Tensor | None]:
    """Scheme, scales and zero points for runs of neighbours, where groups follow an order of activations."""
    if bool((g_idx == -1).all()):  # what earlier versions keep where there is no order
        return scheme, scale, zero
    length = run_length(g_idx, scale.shape[1])
    kept = 8 * scale.element_size() + (0 if zero is None else 8)
    if scheme.format.bits + kept / length >= DENSE_BITS:
        raise ValueError(
            f"weight_g_idx gives neighbouring columns to other groups (actorder 'group'), in runs of {length}: scales for "
            "these take more than the dense weight; dequantize the folder with the compressed-tensors that wrote it"
        )
    parts = regrouped(g_idx, length, scale, *(() if zero is None else (zero,)))
    name = f"{scheme.name}_in_runs_of_{length}" if length != scheme.scale.block else scheme.name
    result = known(replace(scheme, name=name, scale=replace(scheme.scale, block=length)))
    return result, parts[0], parts[1] if len(parts) == 2 else None


def sizes_fit(found: Spec) -> bool:
    """Whether a tensor is small enough to be read beside the headers: a shape."""
    return found.dtype in INTEGERS and prod(found.shape) <= 8


__all__ = [
    "LAYOUTS",
    "Layout",
    "float_scales",
    "quantized_of",
    "scheme_of",
    "shape_of",
    "sizes_fit",
    "specs_of",
]
