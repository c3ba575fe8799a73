"""MXFP4 experts as gpt-oss publishes them (`quant_method` "mxfp4"), as transformers dequantizes them.

For each weight X of the experts two tensors of bytes: X_blocks (experts, out, in / 32, 16), two e2m1 codes a byte, the even
one in the low bits, and X_scales (experts, out, in / 32), e8m0. That is MXFP4 with blocks along `in`; the model's parameter
is its transposition, (experts, in, out). Source: `transformers.integrations.mxfp4.convert_moe_packed_tensors`, whose values
`QuantizedTensor.dequantize` gives bit for bit. Inputs are not quantized there, nor here.
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
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference import SCHEMES

METHOD, BLOCKS, SCALES = "mxfp4", "_blocks", "_scales"
#: Bytes of 32 codes.
BLOCK_BYTES = 16
NAN_SCALE = 255
#: Products that leave float32 become infinite there.
SCHEME = replace(SCHEMES["mxfp4"], name="gpt_oss.mxfp4", dequantize="ieee")


@reader(METHOD)
def read(folder: Folder, given: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError where blocks and scales do not fit each other, or there are none."""
    names = [name.removesuffix(BLOCKS) for name in folder.specs if name.endswith(BLOCKS)]
    if not names:
        raise ValueError(
            f"{folder.path} says that its experts are MXFP4, but has no tensor *{BLOCKS}; fetch it again"
        )
    dtype = model_dtype(folder)
    return Records({name: _weight(name, folder, dtype) for name in names}, (), {})


def _weight(name: str, folder: Folder, dtype: torch.dtype) -> Weight:
    blocks = folder.specs[name + BLOCKS]
    if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK_BYTES:
        raise ValueError(
            f"tensor {shown(name + BLOCKS)} of {folder.files[name + BLOCKS]} is bytes (experts, out, in / 32, {BLOCK_BYTES}), "
            f"got {blocks}; fetch it again"
        )
    experts, out, groups, _ = blocks.shape
    meta = Meta(Recipe(weight=SCHEME), -1, dtype, transposed=True)
    shape = (experts, groups * 2 * BLOCK_BYTES, out)
    specs = {"codes": blocks, "scale": Spec(torch.uint8, (experts, out, groups))}

    def build(tensors: Tensors) -> QuantizedTensor:
        if bool((tensors["scale"] == NAN_SCALE).any()):
            raise ValueError(f"a scale is {NAN_SCALE}, which is no number in e8m0")
        codes = tensors["codes"].reshape(experts, out, groups * BLOCK_BYTES)
        return QuantizedTensor({"codes": codes, "scale": tensors["scale"]}, meta, shape)

    return Weight(meta, shape, {"codes": name + BLOCKS, "scale": name + SCALES}, specs, build, METHOD)
