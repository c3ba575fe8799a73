"""FP8 with a scale for each block of a weight, as DeepSeek publishes it (`quant_method` "fp8").

A weight T is float8_e4m3fn beside T_scale_inv, which multiplies it: a number for each block of `weight_block_size` (128, 128),
where the last block of an axis may be short; one for the whole weight where there is no block size. Scales are float32 or
bfloat16, or powers of two as e8m0 (`scale_fmt` "ue8m0"), also as plain bytes. A value is code * scale in float32, rounded once.
Sources: `weight_dequant` of DeepSeek-V3's inference/kernel.py; `Fp8Dequantize` of transformers.integrations.finegrained_fp8,
which does not read short last blocks (it refuses them, or divides the axis evenly).

Inputs stay as they are, whatever `activation_scheme` says: DeepSeek's own code multiplies so by default (`gemm_impl = "bf16"`
in inference/model.py), and so does transformers where it dequantizes, as it does without a GPU. Kernels that round inputs as
well, for each 128 of a row or by a static `activation_scale`, give other values; nothing in the files says which kernel is
meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ao_lab.checkpoint.formats import model_dtype, reader
from ao_lab.checkpoint.io.shards import Folder, Spec, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.recipe import Recipe, block_name
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from reference import SCHEMES, Quantized, Scheme
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Block

METHOD, SCALE, INPUT = "fp8", "_scale_inv", "activation_scale"
INPUTS = "scales of inputs, which stay as they are"
ELEMENT = torch.float8_e4m3fn
E8M0, NAN_SCALE = "float8_e8m0fnu", 255
#: How scales are stored, by the dtype of their tensor.
STORAGE = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e8m0fnu: E8M0, torch.uint8: E8M0,
}  # fmt: skip
WAY_OUT = "fetch the folder again, or quantize the original model with ao_lab"


def block_of(fields: Mapping[str, Any], where: str) -> Block:
    """The blocks that `quantization_config` names; ValueError for others than transformers' FineGrainedFP8Config takes."""
    size = fields.get("weight_block_size", [128, 128])
    pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if size is not None and not pair:
        raise ValueError(f"{where}: weight_block_size is two counts or null, got {shown(size)}; {WAY_OUT}")
    return "tensor" if size is None else (size[0], size[1])


@reader(METHOD)
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError where a weight has no scales, or others than its blocks need."""
    block, dtype = block_of(given, f"the quantization of {folder.path}"), model_dtype(folder)
    names = [name for name, spec in folder.specs.items() if spec.dtype == ELEMENT]
    for name in folder.specs:
        weight = name.removesuffix(SCALE)
        if weight != name and weight not in names:
            what = folder.specs.get(weight, "nowhere")
            raise ValueError(
                f"{folder.path}: {shown(name)} are scales of a weight in {ELEMENT}, but {shown(weight)} is {what}; {WAY_OUT}"
            )
    if not names:
        raise ValueError(f"{folder.path} is marked as FP8, but has no weight in {ELEMENT}; {WAY_OUT}")
    left = {name: INPUTS for name in folder.specs if name.endswith(INPUT)}
    return Records({name: _weight(name, folder, block, dtype) for name in names}, (), {}, left_out=left)


def _weight(name: str, folder: Folder, block: Block, dtype: torch.dtype) -> Weight:
    spec = folder.specs[name]
    found = folder.specs.get(name + SCALE)
    if found is None or found.dtype not in STORAGE or len(spec.shape) not in (2, 3):
        raise ValueError(
            f"weight {shown(name)} of {folder.files[name]} is {spec}, its scales {shown(name + SCALE)} are "
            f"{'nowhere' if found is None else found}; it is a matrix or a batch of them, scales are "
            f"{', '.join(map(str, STORAGE))}; {WAY_OUT}"
        )
    scheme = weight_scheme(block, STORAGE[found.dtype])
    blocks = Blocks.of(spec.shape, scheme.scale, -1).scale_shape
    # One number is written with or without an axis.
    stored = Spec(found.dtype, (1,) if blocks == () and found.shape == (1,) else blocks)
    recipe = Recipe(weight=scheme)

    def build(tensors: Tensors) -> QuantizedTensor:
        scale = tensors["scale"]
        if scale.dtype == torch.uint8 and bool((scale == NAN_SCALE).any()):
            raise ValueError(f"a scale is {NAN_SCALE}, which is no number in e8m0")
        bits = scale if scale.dtype == torch.float32 else scale.view(_BITS[scale.itemsize])
        codes = tensors["weight"].view(torch.uint8)
        q = Quantized(codes, bits.reshape(blocks), None, None, spec.shape, len(spec.shape) - 1, scheme)
        return from_quantized(q, recipe, dtype)

    names = {"weight": name, "scale": name + SCALE}
    return Weight(
        Meta(recipe, -1, dtype), spec.shape, names, {"weight": spec, "scale": stored}, build, METHOD
    )


_BITS = {1: torch.uint8, 2: torch.uint16}


def weight_scheme(block: Block, storage: str) -> Scheme:
    """e4m3 in these blocks, a short last one allowed, scales stored as `storage`; products that overflow become infinite."""
    base = SCHEMES["fp8_128x128"]
    scale = replace(base.scale, block=block, storage=storage)
    if storage == E8M0:
        scale = replace(scale, rule="rceil", floor=None)
    suffix = "" if storage == "float32" else f"_{storage}"
    return replace(base, name=f"finegrained_fp8.{block_name(block)}{suffix}", scale=scale, dequantize="ieee")
