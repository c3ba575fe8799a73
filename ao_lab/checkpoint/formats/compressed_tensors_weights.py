"""Weights in the formats of compressed-tensors: what their tensors are, and the values that its decompressors make of them.

Read off compressed-tensors 0.20: compressors/*/base.py (which tensors), quantization/lifecycle/forward_helpers.py,
_dequantize: `(code - zero) * scale` in the scale's own dtype, rounded to the output's. For a scale of 16 bits that is one
rounding of the exact product, as scheme.dequantize "ieee" has it in that dtype; NVFP4's block scale is divided by the global
one in float32, MX scales are powers of two. Nothing here looks at the name of a format but the table of the formats'
layouts.

`config_groups` say which description is that of a module, and are checked as data from elsewhere. The fields and their
meaning are those of compressed-tensors 0.20 (quantization/quant_args.py, quant_config.py), and a module's group is found as
utils/match.py finds it: a target that is its name, then one that is "re:" and an expression, then one that names a class.
Files know no classes, so a target that is no module's name and no expression is taken for the class of every module that has
quantized tensors. Expressions are followed by `ao_lab.checkpoint.io.patterns`, in bounded time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

import fast
from ao_lab.checkpoint.export import WORD_BYTES, unwords, words, zeros_of_words
from ao_lab.checkpoint.formats.group_integers import regrouped, run_length
from ao_lab.checkpoint.io.patterns import compiled
from ao_lab.checkpoint.io.shards import Spec, Specs
from ao_lab.checkpoint.io.strict_json import check_value, shown
from ao_lab.config.recipe import block_name
from reference import FORMATS, SCHEMES, Quantized, Scheme, Zero
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Block, mx_name

EXPRESSION = "re:"
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Fields that decide what values mean, with their types; observers and how groups were ordered while calibrating do not.
ARGUMENTS: dict[str, Any] = {
    "num_bits": int, "type": str, "symmetric": bool, "group_size": int | None, "strategy": str | None,
}  # fmt: skip
#: Groups of a file at most.
MOST_GROUPS = 1000
#: Names of modules of a group at most.
MOST_TARGETS = 200_000
#: Rows or columns of a block at most.
LONGEST_AXIS = 2**31


@dataclass(frozen=True)
class Arguments:
    """QuantizationArgs of a weight."""

    bits: int
    #: "int" or "float".
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class Group:
    """One group: the modules it is for, and how their weights and inputs are stored."""

    name: str
    targets: tuple[str, ...]
    format: str
    weights: Arguments
    #: QuantizationArgs of inputs as the file has them; None: not quantized.
    inputs: Mapping[str, Any] | None


def groups_of(given: Mapping[str, Any], where: str) -> tuple[Group, ...]:
    """The checked groups of a quantization_config; ValueError that names the group and the rule."""
    found = given.get("config_groups")
    if not isinstance(found, dict) or not found or len(found) > MOST_GROUPS:
        raise ValueError(
            f"{where} describes its weights in config_groups, got {shown(found)}; fetch it again"
        )
    result = [_group(name, group, given.get("format"), where) for name, group in found.items()]
    return tuple(group for group in result if group is not None)


def _group(name: str, given: Any, fmt: Any, where: str) -> Group | None:
    """One group; None where it is not about weights (attention, for instance)."""
    place = f"{where}: group {shown(name)}"
    if not isinstance(given, dict):
        raise ValueError(
            f"{place} is an object with targets and weights, got {shown(given)}; names of presets are not read"
        )
    targets = names_in(given.get("targets"), f"{place}: targets")
    if given.get("output_activations") is not None:
        raise ValueError(f"{place} quantizes outputs, which ao_lab does not; load it with transformers")
    if given.get("weights") is None:
        return None
    fmt = given.get("format") or fmt
    if not isinstance(fmt, str):
        raise ValueError(f"{place}: format is the name of one, got {shown(fmt)}; fetch it again")
    inputs = given.get("input_activations")
    if inputs is not None and not isinstance(inputs, dict):
        raise ValueError(f"{place}: input_activations is an object or null, got {shown(inputs)}")
    return Group(name, targets, fmt, arguments(given["weights"], f"{place}: weights"), inputs)


def arguments(given: Any, place: str) -> Arguments:
    """QuantizationArgs of a weight, with the library's defaults; ValueError for what contradicts itself."""
    if not isinstance(given, dict):
        raise ValueError(f"{place} is an object, got {shown(given)}; fetch it again")
    known = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": None}
    values = {name: given.get(name, default) for name, default in known.items()}
    for name, hint in ARGUMENTS.items():
        check_value(values[name], hint, f"{place}: {name}")
    size, block = values["group_size"], _block(given.get("block_structure"), place)
    strategy = values["strategy"] or ("tensor" if size is None else "channel" if size == -1 else "group")
    grouped = strategy in ("group", "tensor_group")
    if strategy not in STRATEGIES or values["type"] not in ("int", "float"):
        raise ValueError(
            f"{place}: strategy is one of {', '.join(STRATEGIES)}, type int or float; got {shown(strategy)}, "
            f"{shown(values['type'])}"
        )
    if grouped is (size is None or size < 1) or (strategy == "block") is (block is None):
        raise ValueError(
            f"{place}: groups have a group_size, blocks a block_structure, and others neither; got strategy {strategy}, "
            f"group_size {size}, block_structure {block}"
        )
    if given.get("dynamic") not in (False, None):
        raise ValueError(f"{place}: a weight's scales are static, got dynamic {shown(given['dynamic'])}")
    return Arguments(
        values["num_bits"], values["type"], values["symmetric"], strategy, size if grouped else None, block
    )


def _block(given: Any, place: str) -> tuple[int, int] | None:
    """Rows and columns of a block, also as the older text "128x128"."""
    if given is None:
        return None
    sizes: Any = given.split("x") if isinstance(given, str) and len(given) < 20 else given
    sizes = sizes if isinstance(sizes, list) else []
    sizes = [int(n) if isinstance(n, str) and n.isdecimal() else n for n in sizes]
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= LONGEST_AXIS for n in sizes):
        raise ValueError(f"{place}: block_structure is [rows, columns], got {shown(given)}; fetch it again")
    return sizes[0], sizes[1]


def names_in(given: Any, place: str) -> tuple[str, ...]:
    """A list of names and expressions; None is an empty one."""
    given = [] if given is None else given
    if not isinstance(given, list) or len(given) > MOST_TARGETS or not all(isinstance(n, str) for n in given):
        raise ValueError(f"{place} is a list of names, got {shown(given)}; fetch it again")
    return tuple(given)


class Modules:
    """Which groups a module may be of."""

    def __init__(self, groups: tuple[Group, ...], ignore: tuple[str, ...], modules: Collection[str]) -> None:
        self.named: dict[str, Group] = {}
        self.expressions: dict[str, Group] = {}
        self.classes: list[Group] = []
        names = set(modules)
        for group in groups:
            for target in group.targets:
                if target.startswith(EXPRESSION):
                    self.expressions[target] = group
                elif target in names or not target.isidentifier():
                    self.named[target] = group
                elif group not in self.classes:
                    self.classes.append(group)
        self.ignored = {name for name in ignore if not name.startswith(EXPRESSION)}
        self.left_out = [_expression(name) for name in ignore if name.startswith(EXPRESSION)]

    def groups_for(self, path: str) -> list[Group]:
        """The groups that may be a module's, one where a name or an expression decides; none for an ignored module."""
        if path in self.ignored or any(pattern.matches(path) for pattern in self.left_out):
            return []
        if path in self.named:
            return [self.named[path]]
        for target in sorted(self.expressions):
            if _expression(target).matches(path):
                return [self.expressions[target]]
        return self.classes


def _expression(target: str) -> Any:
    return compiled(target.removeprefix(EXPRESSION))


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
    scale, zero = tensors["weight_scale"].reshape(blocks), _zero_codes(scheme, shape, tensors)
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


def _zero_codes(
    scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]
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
        return zeros_of_words(kept, scheme.format.bits, (shape[0], blocks[1]))
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
