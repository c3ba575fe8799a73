"""torchao's safetensors: what `torchao.prototype.safetensors` and transformers with torchao write.

Folders that torchao wrote with safetensors, or transformers with it.

`torchao.prototype.safetensors` (0.18) stores each inner tensor as MODULE._PARAMETER_PART, and in the metadata for each
parameter a class's name and its attributes as JSON. Nothing of torchao is imported: names of classes choose among
`ao_lab.checkpoint.formats.torchao`.

torchao's tensor classes, as their files describe them, as weights under torchao's own schemes.

A reader takes the attributes and the dtypes and shapes of one parameter and says which recipe and tensors these mean, before a
tensor is read. The dense values are those of torchao's `dequantize`, bit for bit. What no scheme says (other classes, smoothing
scales, static scales of NVFP4 inputs) is a ValueError with the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ao_lab.checkpoint.export import packed
from ao_lab.checkpoint.formats import TORCHAO_KEY, reader
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import parsed, parsed_object, shown
from ao_lab.checkpoint.records import WEIGHT_DTYPES, Records, Weight, check_recipe, dense_names
from ao_lab.config.recipe import Recipe
from ao_lab.config.torchao import float8_record, int8_record, intx_record, mx_record
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import SCHEMES, Quantized, Scales, Scheme, untile_scales
from reference.quantize.blocks import Blocks
from reference.quantize.stored import tiled_size
from reference.schemes.schemes import Block

MX_ELEMENTS = {
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "float4_e2m1fn_x2": "float4_e2m1fn",
    "fp6_e2m3": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn",
}  # fmt: skip
STORAGE = {torch.float32: "_f32", torch.bfloat16: "_bf16", torch.float16: "_f16"}
PAIRS = getattr(torch, "float4_e2m1fn_x2", None)
MX_MODES = ("floor", "rceil", "ceil", "even")
WAY_OUT = "quantize the original model with ao_lab, or load the folder with torchao"


@dataclass(frozen=True)
class Given:
    """One parameter: its attributes, and what its tensors are, by part."""

    data: Mapping[str, Any]
    specs: Specs

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the codes as they are stored."""
        return self.specs["qdata"].shape

    def dtype(self, name: str) -> str:
        """The name of a dtype among the attributes."""
        return str(plain(self.data.get(name)))


@dataclass(frozen=True)
class Read:
    """How a parameter is read: recipe, shape and dtype of the weight, its tensors, and the stored weight of these."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: str
    specs: Specs
    build: Callable[[Tensors], Quantized]
    input_scales: Callable[[Tensors], Scales | None] = lambda tensors: None


def plain(value: Any) -> Any:
    """An attribute without the wrapping {"_type", "_data"} of dtypes and enumerations."""
    return value["_data"] if isinstance(value, dict) and set(value) == {"_type", "_data"} else value


def block_of_size(size: Any, shape: tuple[int, ...]) -> Block:
    """The block of a record for a block_size of torchao: lengths of a block along each axis."""
    good = isinstance(size, list) and len(size) == len(shape) and all(type(n) is int and n > 0 for n in size)
    if not good:
        raise ValueError(
            f"block_size has a positive length for each axis of shape {shape}, got {shown(size)}"
        )
    if all(n == 1 for n in size[:-1]):
        return -1 if size[-1] == shape[-1] else int(size[-1])
    if tuple(size) == shape:
        return "tensor"
    if len(size) == 2:
        return (int(size[0]), int(size[1]))
    raise ValueError(f"blocks of {size} of a tensor of shape {shape} are in no scheme; {WAY_OUT}")


def refuse(given: Given, *names: str) -> None:
    """ValueError for attributes and tensors that no scheme says."""
    for name in names:
        if name in given.specs or given.data.get(name):
            raise ValueError(f"{name} is in no scheme of ao_lab; {WAY_OUT}")


# Integers.


def int8_scheme(block: Block, zero: bool) -> Scheme:
    """torchao's Int8Tensor in any block."""
    return int8_record(block, "_asymmetric" if zero else "")


def intx_scheme(bits: int, block: Block, storage: torch.dtype, zero: bool) -> Scheme:
    """torchao's IntxUnpackedToInt8Tensor in any block, its scales stored in any dtype."""
    if storage not in STORAGE:
        raise ValueError(f"scales are float32, bfloat16 or float16, got {storage}")
    return intx_record(bits, block, "_asymmetric" if zero else "", STORAGE[storage])


def read_int8(given: Given) -> Read:
    """Int8Tensor: a byte an element, scales in float32 and zero points (all zero where it is symmetric)."""
    refuse(given, "act_pre_scale", "reduce_range")
    storage = given.specs["scale"].dtype
    if storage != torch.float32:
        raise ValueError(f"scales of an Int8Tensor are float32, got {storage}; {WAY_OUT}")
    return _integers(given, 8, int8_inputs(given), int8_scheme)


def read_intx(given: Given) -> Read:
    """IntxUnpackedToInt8Tensor: a byte an element, of which the lowest bits count."""
    name = given.dtype("target_dtype")
    if name not in [f"int{bits}" for bits in range(2, 9)]:
        raise ValueError(f"target_dtype is int2 to int8, got {shown(name)}; {WAY_OUT}")
    wanted = plain(given.data.get("activation_quantization"))
    if wanted not in (None, "int8_asym_per_token", "INT8_ASYM_PER_TOKEN"):
        raise ValueError(f"activation_quantization {shown(wanted)} is not known; {WAY_OUT}")
    inputs = None if wanted is None else SCHEMES["torchao.intx8_rowwise_asymmetric"]
    bits, storage = int(name.removeprefix("int")), given.specs["scale"].dtype
    return _integers(given, bits, inputs, lambda block, zero: intx_scheme(bits, block, storage, zero))


def _integers(
    given: Given, bits: int, inputs: Scheme | None, scheme_of: Callable[[Block, bool], Scheme]
) -> Read:
    """scheme_of: the record of a block, with zero points or without."""
    shape = given.shape
    block = block_of_size(given.data.get("block_size"), shape)
    scheme = scheme_of(block, True)
    # torchao stores an axis for each axis of the tensor, also where one scale is for all of it.
    size = plain(given.data["block_size"])
    counts = tuple(n // b for n, b in zip(shape, size, strict=True))
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    specs = {"qdata": Spec(torch.int8, shape), "scale": Spec(given.specs["scale"].dtype, counts)}
    if "zero_point" in given.specs:
        specs["zero_point"] = Spec(torch.int8, counts)
    for name, kind in (("act_quant_scale", torch.float32), ("act_quant_zero_point", torch.int8)):
        if name in given.specs:
            specs[name] = Spec(kind, given.specs[name].shape)
            if given.specs[name].bytes != kind.itemsize or inputs is None:
                raise ValueError(
                    f"{name} is one number for quantized inputs, got {given.specs[name]}; {WAY_OUT}"
                )
    if "act_quant_zero_point" in specs and (inputs is None or inputs.zero is None):
        raise ValueError(f"act_quant_zero_point belongs to asymmetric inputs; {WAY_OUT}")

    def build(tensors: Tensors) -> Quantized:
        codes = tensors["qdata"].view(torch.uint8) & ((1 << bits) - 1)
        stored = tensors["scale"]
        scale = (stored if stored.dtype == torch.float32 else stored.view(torch.uint16)).reshape(blocks)
        zero = tensors["zero_point"].reshape(blocks) if "zero_point" in tensors else None
        # Symmetric weights have zero points too, all of them 0.
        zero = zero if zero is not None and bool(zero.any()) else None
        record = scheme if zero is not None else scheme_of(block, False)
        return packed(Quantized(codes, scale, None, zero, shape, len(shape) - 1, record))

    return Read(
        Recipe(weight=scheme, activation=inputs), shape, given.dtype("dtype"), specs, build, static_scales
    )


def static_scales(tensors: Tensors) -> Scales | None:
    """Scales of the layer's input, found beforehand."""
    if "act_quant_scale" not in tensors:
        return None
    zero = tensors.get("act_quant_zero_point")
    return Scales(tensors["act_quant_scale"].reshape(()), None, None if zero is None else zero.reshape(()))


def int8_inputs(given: Given) -> Scheme | None:
    """The scheme of the inputs of an Int8Tensor."""
    kwargs = plain(given.data.get("act_quant_kwargs"))
    if kwargs is None:
        return None
    if not isinstance(kwargs, dict) or kwargs.get("reduce_range"):
        raise ValueError(f"act_quant_kwargs {shown(kwargs)} are in no scheme; {WAY_OUT}")
    mapping = plain(kwargs.get("mapping_type"))
    return int8_scheme(granularity(kwargs.get("granularity")), mapping == "ASYMMETRIC")


def granularity(value: Any) -> Block:
    """The block of an input's granularity."""
    kind, fields = (value.get("_type"), value.get("_data")) if isinstance(value, dict) else (None, None)
    dim = fields.get("dim", -1) if isinstance(fields, dict) else -1
    if kind not in ("PerRow", "PerTensor") or dim != -1:
        raise ValueError(f"inputs are quantized PerRow or PerTensor, got {shown(value)}; {WAY_OUT}")
    return -1 if kind == "PerRow" else "tensor"


# Floats.


def read_float8(given: Given) -> Read:
    """Float8Tensor: scales in float32."""
    element = str(given.specs["qdata"].dtype).removeprefix("torch.")
    shape = given.shape
    size = given.data.get("block_size") or list(shape)
    scheme = float8_scheme(element, block_of_size(size, shape))
    kwargs = plain(given.data.get("act_quant_kwargs"))
    inputs = None
    if kwargs is not None:
        if not isinstance(kwargs, dict) or kwargs.get("hp_value_lb") or kwargs.get("hp_value_ub"):
            raise ValueError(f"act_quant_kwargs {shown(kwargs)} are in no scheme; {WAY_OUT}")
        inputs = float8_scheme(str(plain(kwargs.get("float8_dtype"))), granularity(kwargs.get("granularity")))
    counts = given.specs["scale"].shape
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    if Spec(torch.float32, counts).bytes != Spec(torch.float32, blocks).bytes:
        raise ValueError(f"scales of {scheme.name} have shape {blocks}, got {counts}")
    specs = {"qdata": Spec(getattr(torch, element), shape), "scale": Spec(torch.float32, counts)}

    def build(tensors: Tensors) -> Quantized:
        scale = tensors["scale"].reshape(blocks)
        return Quantized(tensors["qdata"].view(torch.uint8), scale, None, None, shape, len(shape) - 1, scheme)

    return Read(Recipe(weight=scheme, activation=inputs), shape, given.dtype("dtype"), specs, build)


def float8_scheme(element: str, block: Block) -> Scheme:
    """torchao's float8 of its inference path, in any block."""
    if element not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(f"elements are float8_e4m3fn or float8_e5m2, got {shown(element)}; {WAY_OUT}")
    return float8_record(element, block)


def read_mx(given: Given) -> Read:
    """MXTensor: floats in blocks of 32, fp6 a byte each, e8m0 scales plain or tiled."""
    element = MX_ELEMENTS.get(given.dtype("elem_dtype"), "")
    if not element or given.data.get("block_size") != 32:
        raise ValueError(f"elements are {', '.join(MX_ELEMENTS)} in blocks of 32; {WAY_OUT}")
    kwargs = plain(given.data.get("act_quant_kwargs"))
    # The mode of the scales is not stored for weights; it changes no value of what is stored.
    mode = str(plain(kwargs.get("scaling_mode"))).lower() if isinstance(kwargs, dict) else "rceil"
    scheme = mx_scheme(element, mode)
    inputs = None
    if isinstance(kwargs, dict):
        inputs = mx_scheme(MX_ELEMENTS.get(str(plain(kwargs.get("elem_dtype"))), ""), mode)
    half = element == "float4_e2m1fn"
    shape = (*given.shape[:-1], given.shape[-1] * 2) if half else given.shape
    byte = torch.uint8 if scheme.format.bits < 8 else getattr(torch, element)
    specs = {
        "qdata": Spec(byte, given.shape),
        "scale": _block_scales(given, scheme, shape, torch.float8_e8m0fnu),
    }
    return _in_blocks(given, scheme, inputs, shape, specs, half)


def mx_scheme(element: str, mode: str) -> Scheme:
    """torchao's MX record of an element and a mode of scales."""
    if not element or mode not in MX_MODES:
        raise ValueError(
            f"MX floats {shown(element)} with scales by {shown(mode)} are in no scheme; {WAY_OUT}"
        )
    return mx_record(element, mode)


def read_nvfp4(given: Given) -> Read:
    """NVFP4Tensor: pairs of floats in blocks of 16, e4m3 scales plain or tiled, with or without a scale of the tensor."""
    refuse(given, "act_per_tensor_scale")
    outer = "per_tensor_scale" in given.specs
    scheme = SCHEMES["torchao.nvfp4" if outer else "torchao.nvfp4_single_level"]
    if given.data.get("block_size") != 16:
        raise ValueError(f"NVFP4 has blocks of 16; {WAY_OUT}")
    kwargs = plain(given.data.get("act_quant_kwargs"))
    inputs = None
    if isinstance(kwargs, dict):
        two_levels = kwargs.get("use_dynamic_per_tensor_scale")
        inputs = SCHEMES["torchao.nvfp4" if two_levels else "torchao.nvfp4_single_level"]
    stored = given.specs["qdata"].dtype
    shape = (*given.shape[:-1], given.shape[-1] * 2)
    specs = {
        "qdata": Spec(stored if stored == PAIRS else torch.uint8, given.shape),
        "scale": _block_scales(given, scheme, shape, torch.float8_e4m3fn),
    }
    if outer:
        specs["per_tensor_scale"] = Spec(torch.float32, ())
    return _in_blocks(given, scheme, inputs, shape, specs, True)


def _in_blocks(
    given: Given, scheme: Scheme, inputs: Scheme | None, shape: tuple[int, ...], specs: Specs, pairs: bool
) -> Read:
    """Floats in blocks whose scales are bytes; `pairs`: two codes a byte."""
    tiled = given.data.get("is_swizzled_scales") is True
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape

    def build(tensors: Tensors) -> Quantized:
        flat = tensors["scale"].contiguous().view(torch.uint8).reshape(-1)
        scale = untile_scales(flat, (blocks[0], blocks[1])) if tiled else flat.reshape(blocks)
        codes, outer = tensors["qdata"].view(torch.uint8), tensors.get("per_tensor_scale")
        q = Quantized(codes, scale, outer, None, shape, len(shape) - 1, scheme, pairs)
        return q if pairs else packed(q)

    return Read(Recipe(weight=scheme, activation=inputs), shape, given.dtype("orig_dtype"), specs, build)


def _block_scales(given: Given, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """What block scales are: of any shape with as many bytes as there should be."""
    counts = given.specs["scale"].shape
    blocks = Blocks.of(shape, scheme.scale, -1).scale_shape
    if given.data.get("is_swizzled_scales") is True:
        if len(blocks) != 2:
            raise ValueError(f"tiled scales are those of a matrix, got shape {shape}; {WAY_OUT}")
        blocks = (tiled_size((blocks[0], blocks[1])),)
    if Spec(dtype, counts).bytes != Spec(dtype, blocks).bytes:
        raise ValueError(
            f"scales of {scheme.name} of shape {shape} are {Spec(dtype, blocks).bytes} bytes, got shape {counts}"
        )
    return Spec(dtype, counts)


READERS: dict[str, Callable[[Given], Read]] = {
    "Int8Tensor": read_int8, "IntxUnpackedToInt8Tensor": read_intx, "Float8Tensor": read_float8, "MXTensor": read_mx,
    "NVFP4Tensor": read_nvfp4,
}  # fmt: skip


DENSE = "Tensor"


def read_torchao_records(folder: Folder) -> Records:
    """The checked description of a folder that torchao (or transformers with it) wrote."""
    where = f"{TORCHAO_KEY} in the metadata of {folder.path}"
    names = parsed(folder.metadata[TORCHAO_KEY], where)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} is a list of names, got {shown(names)}; fetch the folder again")
    weights = {}
    for name in names:
        entry = parsed_object(
            folder.metadata.get(name, ""), f"the description of {shown(name)} in {folder.path}"
        )
        if entry.get("_type") != DENSE:
            weights[name] = weight_of(name, entry, folder)
    dense = dense_names(weights, folder)
    # Names without a tensor are left to the model: weights that it ties are stored once.
    odd = [name for name in dense if name not in names]
    if odd:
        raise ValueError(
            f"{where} does not name {shown(odd[0])}, which is in the files; fetch the folder again"
        )
    return Records(weights, dense, {})


def weight_of(name: str, entry: Mapping[str, Any], folder: Folder) -> Weight:
    """One parameter; every error names the folder and the parameter."""
    where = f"{shown(name)} in {folder.path}"
    path, _, leaf = name.rpartition(".")
    prefix = f"{path}._{leaf}_"
    parts, data = entry.get("_tensor_data_names"), entry.get("_data")
    if (
        not isinstance(parts, list)
        or not all(isinstance(part, str) for part in parts)
        or not isinstance(data, dict)
    ):
        raise ValueError(
            f"{where} is described by _type, _data and _tensor_data_names; fetch the folder again"
        )
    names = {part: prefix + part for part in parts}
    lost = [full for full in names.values() if full not in folder.specs]
    if lost or "qdata" not in names:
        raise ValueError(
            f"{folder.path} lacks tensor {shown((lost or [prefix + 'qdata'])[0])}; fetch the folder again"
        )
    kind = entry.get("_type")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    try:
        if reader is None:
            raise ValueError(f"{shown(kind)} cannot be read, these can: {', '.join(READERS)}; {WAY_OUT}")
        read = reader(Given(data, {part: folder.specs[full] for part, full in names.items()}))
        if read.dtype not in WEIGHT_DTYPES:
            known = ", ".join(WEIGHT_DTYPES)
            raise ValueError(f"the weight's dtype is one of {known}, got {shown(read.dtype)}")
        dtype = WEIGHT_DTYPES[read.dtype]
        _check_parts(read.specs, folder, names)
        meta = Meta(read.recipe, -1, dtype)
        check_recipe(meta, read.shape)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}; if it is damaged, fetch it again") from error
    return Weight(meta, read.shape, names, read.specs, partial(_whole, read, dtype), "torchao", str(kind))


def _whole(read: Read, dtype: torch.dtype, tensors: Tensors) -> QuantizedTensor:
    q = read.build(tensors)
    return from_quantized(q, replace(read.recipe, weight=q.scheme), dtype, read.input_scales(tensors))


def _check_parts(specs: Specs, folder: Folder, names: Mapping[str, str]) -> None:
    """The tensors are those that the description asks for."""
    if set(specs) != set(names):
        raise ValueError(f"its tensors are {', '.join(specs)}, got {shown(list(names))}; {WAY_OUT}")
    for part, spec in specs.items():
        got = folder.specs[names[part]]
        if got != spec:
            raise ValueError(f"tensor {shown(names[part])} is {spec}, got {got}")


@reader("torchao")
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; `given` is not looked at: the metadata of the files say more."""
    if TORCHAO_KEY not in folder.metadata:
        raise ValueError(
            f"{folder.path} says that torchao wrote it, but its files have no {TORCHAO_KEY}: pickled tensors are not read; "
            "save the model with safetensors (torchao 0.15 or later)"
        )
    return read_torchao_records(folder)
