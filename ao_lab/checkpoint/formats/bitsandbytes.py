"""bitsandbytes' 4-bit checkpoints (`quant_method: bitsandbytes`, load_in_4bit): NF4, with or without double quantization.

A weight of n elements, counted row by row and in blocks of b, is

    NAME                                      two codes a byte, the first one in the high nibble, shape (n / 2, 1), in the dtype
                                              bnb_4bit_quant_storage (uint8, or any other of which the bytes are taken)
    NAME.absmax                               float32 (n / b), the maximum of each block; with double quantization uint8
    NAME.quant_map                            float32 (16), the codebook
    NAME.quant_state.bitsandbytes__nf4        JSON as uint8: quant_type, blocksize, shape, dtype; nested_blocksize, ..._offset
    NAME.nested_absmax, NAME.nested_quant_map float32 (n / b / nested_blocksize) and (256), with double quantization

An element is quant_map[code] * absmax in float32, rounded once to dtype. With double quantization absmax is
nested_quant_map[code] * nested_absmax + nested_offset, each operation rounded to float32. No record has a codebook for scales,
so they are read as what they stand for: float32, 4 bytes a block where the file has one. Elements keep their codes, and the
dequantized weight its bits. Blocks run along the rows where these are multiples of b, and over the flattened weight elsewhere.

Source: bitsandbytes 0.50.2, functional.py (QuantState, dequantize_4bit), backends/default/ops.py (dequantize_4bit,
dequantize_blockwise), nn/modules.py (Params4bit).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fast
from ao_lab.checkpoint.formats import reader
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import check_value, parsed_object, shown
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import Quantized, Scale, Scheme
from reference.schemes.schemes import FLOOR, Block

STATE = ".quant_state.bitsandbytes__"
#: What `bitsandbytes.functional.dequantize_4bit` takes.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Fields of the state, and those that double quantization adds.
FIELDS: dict[str, Any] = {"quant_type": str, "blocksize": int, "dtype": str, "shape": tuple[int, ...]}
NESTED: dict[str, Any] = {"nested_blocksize": int, "nested_offset": float, "nested_dtype": str}
LARGEST_STATE = 4096
WAY_OUT = "load the folder with bitsandbytes, or quantize the original model with ao_lab"

#: backends/default/ops.py, quantize_4bit; a block of zeros has the smallest scale of the default schemes here, and 0 there.
RECORD = Scheme(
    name="bitsandbytes.nf4", element="nf4", nan="ieee", dequantize="ieee",
    scale=Scale(block="flat:64", target=1.0, floor=FLOOR, partial=True),
    deviations=("a NaN anywhere in a block makes its scale NaN, and quantized values of other elements stay",),
)  # fmt: skip
#: The records of quant_type.
RECORDS = {"nf4": RECORD}


@dataclass(frozen=True)
class State:
    """What the JSON of a weight says."""

    quant_type: str
    blocksize: int
    dtype: torch.dtype
    shape: tuple[int, int]
    #: (nested_blocksize, nested_offset); None: maxima are float32.
    nested: tuple[int, float] | None

    @property
    def blocks(self) -> int:
        """Blocks of the weight, the last perhaps short."""
        return math.ceil(math.prod(self.shape) / self.blocksize)

    @property
    def scheme(self) -> Scheme:
        """The record of its elements in its blocks."""
        model, size = RECORDS[self.quant_type], self.blocksize
        rows = self.shape[1] % size == 0
        block: Block = size if rows else f"flat:{size}"
        name = f"{model.name}_{'g' if rows else 'flat'}{size}"
        return replace(model, name=name, scale=replace(model.scale, block=block, partial=not rows))


@reader("bitsandbytes")
def read_bitsandbytes_records(folder: Folder, config: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError for 8 bits, for a state that says something else, and for other shapes.

    Of all tensors only the states, some hundred bytes each, are read here.
    """
    if config.get("load_in_8bit") is True:
        raise ValueError(
            f"{folder.path} has load_in_8bit: bitsandbytes multiplies int8 values by their row's maximum and then by 1 / 127, "
            f"rounded twice, which no scheme describes; {WAY_OUT}"
        )
    names = [name for name in folder.specs if STATE in name]
    if not names:
        raise ValueError(
            f"{folder.path} has no tensor named *{STATE}nf4, which bitsandbytes writes for every 4-bit weight; {WAY_OUT}"
        )
    weights = {}
    for full in names:
        name = full.partition(STATE)[0]
        weights[name] = _weight(name, full, folder)
    return Records(weights, (), {})


def _weight(name: str, full: str, folder: Folder) -> Weight:
    state = _state(full, folder)
    specs = _specs(name, full, state, folder)
    names = {part: name + part for part in specs}
    meta = Meta(Recipe(weight=state.scheme), -1, state.dtype)
    return Weight(
        meta, state.shape, names, specs, partial(_quantized_weight, state), "bitsandbytes", state.quant_type
    )


def _state(full: str, folder: Folder) -> State:
    """The checked state; ValueError that names the tensor."""
    where, spec = f"{shown(full)} of {folder.files[full]}", folder.specs[full]
    if spec.dtype != torch.uint8 or len(spec.shape) != 1 or spec.bytes > LARGEST_STATE:
        raise ValueError(
            f"{where} is JSON as uint8, at most {LARGEST_STATE} bytes, got {spec}; fetch it again"
        )
    given = parsed_object(bytes(folder.read([full])[full].tolist()), where)
    nested = "nested_offset" in given
    try:
        for field, hint in (FIELDS | NESTED if nested else FIELDS).items():
            check_value(given.get(field), hint, field)
        _check_state(given, full.partition(STATE)[2], nested)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {WAY_OUT}, or if it is damaged, fetch it again") from error
    rows, columns = given["shape"]
    double = (given["nested_blocksize"], float(given["nested_offset"])) if nested else None
    return State(given["quant_type"], given["blocksize"], DTYPES[given["dtype"]], (rows, columns), double)


def _check_state(given: Mapping[str, Any], named: str, nested: bool) -> None:
    """ValueError where a state is of no known type, block, dtype or shape."""
    if given["quant_type"] not in RECORDS or given["quant_type"] != named:
        raise ValueError(
            f"quant_type is that of the tensor's name, one of {', '.join(RECORDS)}; got {shown(given['quant_type'])}"
        )
    if given["blocksize"] not in BLOCKS:
        raise ValueError(f"blocksize is one of {', '.join(map(str, BLOCKS))}, got {given['blocksize']}")
    if given["dtype"] not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, got {shown(given['dtype'])}")
    if len(given["shape"]) != 2 or min(given["shape"]) < 1:
        raise ValueError(f"shape is that of a matrix, got {shown(given['shape'])}")
    if nested and (given["nested_blocksize"] < 1 or given["nested_dtype"] != "float32"):
        raise ValueError(
            f"maxima are quantized in blocks of n > 0, from float32; got {given['nested_blocksize']}, "
            f"{shown(given['nested_dtype'])}"
        )


def _specs(name: str, full: str, state: State, folder: Folder) -> Specs:
    """What its tensors are, by the ends of their names."""
    stored = folder.specs[name].dtype if name in folder.specs else torch.uint8
    if stored not in STORAGE:
        raise ValueError(
            f"{shown(name)} of {folder.files[name]} stores quantized values in one of {', '.join(map(str, STORAGE))}, got "
            f"{stored}; fetch it again"
        )
    pairs = math.ceil(math.prod(state.shape) / 2)
    if pairs % stored.itemsize:
        raise ValueError(
            f"{shown(name)} of {folder.files[name]} has {pairs} bytes of quantized values, not a whole number of {stored}; "
            "fetch it again"
        )
    result = {
        "": Spec(stored, (pairs // stored.itemsize, 1)),
        ".absmax": Spec(torch.float32 if state.nested is None else torch.uint8, (state.blocks,)),
        ".quant_map": Spec(torch.float32, (16,)),
        full.removeprefix(name): folder.specs[full],
    }
    if state.nested is None:
        return result
    groups = math.ceil(state.blocks / state.nested[0])
    return {
        **result,
        ".nested_absmax": Spec(torch.float32, (groups,)),
        ".nested_quant_map": Spec(torch.float32, (256,)),
    }


def _quantized_weight(state: State, tensors: Tensors) -> QuantizedTensor:
    scheme = state.scheme
    table = torch.tensor(scheme.format.values)
    if not torch.equal(tensors[".quant_map"], table):
        raise ValueError(
            f"quant_map is another codebook than that of {state.quant_type}, which bitsandbytes would take instead; {WAY_OUT}"
        )
    absmax = maxima(tensors, state)
    scale = absmax if state.shape[1] % state.blocksize else absmax.reshape(state.shape[0], -1)
    codes = packed_codes(tensors[""], state.shape)
    q = Quantized(codes, scale, None, None, state.shape, 1, scheme, packed=True)
    return from_quantized(q, Recipe(weight=scheme), state.dtype)


def maxima(tensors: Tensors, state: State) -> torch.Tensor:
    """The float32 maximum of each block, in the library's order of operations."""
    absmax = tensors[".absmax"]
    if state.nested is None:
        return absmax
    size, offset = state.nested
    groups = tensors[".nested_absmax"][torch.arange(absmax.numel()) // size]
    product = tensors[".nested_quant_map"][absmax.to(torch.int64)] * groups
    return product + torch.tensor(offset, dtype=torch.float32)


def packed_codes(stored: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Codes as `reference.pack` stores them, of pairs whose first is in the high nibble."""
    pairs = stored.contiguous().view(torch.uint8).reshape(-1)
    if shape[1] % 2 == 0:
        return (pairs >> 4 | pairs << 4).reshape(shape[0], shape[1] // 2)
    codes = torch.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[: math.prod(shape)]
    return fast.pack(codes.reshape(shape), "uint4")
