"""AutoAWQ's checkpoints (`quant_method: awq`), version gemm or gemv: 4-bit integers with zero points.

A layer of K inputs and N outputs in groups of g (-1: K) has, in version gemm,

    qweight  int32 (K, N / 8)      8 outputs a word; from the low nibble on: outputs 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   int32 (K / g, N / 8)  likewise
    scales   float16 (K / g, N)

and in version gemv, where nibbles are in order and rows of zero points and scales are filled up to whole words,

    qweight  int32 (N, K / 8)
    qzeros   int32 (N, w)          w: K / g / 8 rounded up to a multiple of 1, 2 or 4 for groups of 128, 64 or 32
    scales   float16 (N, 8 w)

Sources: autoawq 0.2.9, modules/linear/gemm.py and gemv.py, utils/packing_utils.py (dequantize_gemm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ao_lab.checkpoint.formats import reader
from ao_lab.checkpoint.formats.group_integers import (
    Integers,
    Models,
    PackedLayer,
    layers,
    records_of,
    row_bytes,
    scale_dtype,
    spec_of,
    unpacked_rows,
    width_and_group,
)
from ao_lab.checkpoint.io.shards import Folder, Spec, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference import Scale, Scheme, Zero

LIBRARY = "AutoAWQ"
BITS, PER_WORD = 4, 8
#: The nibble of a word that holds each of its outputs.
NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
#: Words of zero points of version gemv come in multiples of these, by the group's length; longer groups: 1.
MULTIPLES = {64: 2, 32: 4}
WAY_OUT = f"load the folder with {LIBRARY} or GPTQModel, or quantize the original model with ao_lab"

# autoawq 0.2.9, quantize/quantizer.py, pseudo_quantize_tensor, in the weight's dtype.
_SCALE = Scale(block=-1, target=7.5, compute="input", floor=("statistic", 1e-5), storage="float16")
RECORDS = Models(
    Scheme(
        name="awq.int4", element="int4", apply="divide", arithmetic="input", nan="ieee", dequantize="ieee",
        scale=_SCALE, deviations=("the largest positive value clips", "scales are rounded to float16"),
    ),
    Scheme(
        name="awq.int4_asymmetric", element="int4", zero=Zero(), apply="divide", arithmetic="input", nan="ieee",
        dequantize="ieee", scale=replace(_SCALE, statistic="minmax", target=15.0),
        deviations=("ranges need not hold 0", "scales are rounded to float16"),
    ),
)  # fmt: skip


@reader("awq")
def read_awq_records(folder: Folder, config: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError for other versions (marlin, gemv_fast, ...), bits and shapes."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version not in VERSIONS:
        raise ValueError(
            f"version {shown(version)} of {folder.path} cannot be read, these can: {', '.join(VERSIONS)}; {WAY_OUT}"
        )
    _, group = width_and_group(config, folder, (BITS,), WAY_OUT)
    found = {path: VERSIONS[version](path, folder, group) for path in layers(folder, LIBRARY)}
    for path, layer in found.items():
        inputs = layer.integers.shape[1]
        if group != -1 and inputs % group:
            raise ValueError(
                f"{shown(path)} of {folder.path} has {inputs} inputs, which groups of {group} do not divide; fetch it again"
            )
    return records_of(found, "awq", False)


def _gemm(path: str, folder: Folder, group: int) -> PackedLayer:
    inputs, words = spec_of(folder, f"{path}qweight").shape
    shape = (words * PER_WORD, inputs)
    integers = Integers(RECORDS, BITS, group, shape, scale_dtype(folder, f"{path}scales"))
    specs = {
        "qweight": Spec(torch.int32, (inputs, words)),
        "qzeros": Spec(torch.int32, (integers.groups, words)),
        "scales": Spec(integers.dtype, (integers.groups, shape[0])),
    }
    return PackedLayer(integers, specs, partial(_gemm_weight, integers), "gemm")


def _gemm_weight(integers: Integers, tensors: Tensors) -> QuantizedTensor:
    zeros = in_order(tensors["qzeros"]).t().contiguous()
    return integers.weight(packed_outputs(tensors["qweight"]), zeros, tensors["scales"].t())


def in_order(words: torch.Tensor) -> torch.Tensor:
    """The nibbles of int32 words (rows, n) as uint8 (rows, 8 n), in the order of the outputs."""
    nibbles = [(words >> 4 * place & 15).to(torch.uint8) for place in NIBBLES]
    return torch.stack(nibbles, -1).reshape(words.shape[0], -1)


def packed_outputs(words: torch.Tensor) -> torch.Tensor:
    """What `fast.pack` makes of the transposed codes of words (inputs, outputs / 8): bytes (outputs, inputs / 2).

    Two rows are joined nibble by nibble, so nothing is larger than the codes.
    """
    stored = row_bytes(words)
    even, odd = stored[0::2], stored[1::2]
    if len(odd) < len(even):
        odd = torch.nn.functional.pad(odd, (0, 0, 0, 1))
    # Place p of a word is nibble p % 2 of its byte p // 2.
    joined = [(even & 15) | odd << 4, even >> 4 | (odd & 240)]
    pairs = [joined[p % 2][:, p // 2 :: 4] for p in NIBBLES]
    return torch.stack(pairs, -1).reshape(len(even), -1).t().contiguous()


def _gemv(path: str, folder: Folder, group: int) -> PackedLayer:
    outputs, words = spec_of(folder, f"{path}qweight").shape
    shape = (outputs, words * PER_WORD)
    integers = Integers(RECORDS, BITS, group, shape, scale_dtype(folder, f"{path}scales"))
    multiple = MULTIPLES.get(group, 1)
    width = math.ceil(math.ceil(integers.groups / PER_WORD) / multiple) * multiple
    specs = {
        "qweight": Spec(torch.int32, (outputs, words)),
        "qzeros": Spec(torch.int32, (outputs, width)),
        "scales": Spec(integers.dtype, (outputs, width * PER_WORD)),
    }
    return PackedLayer(integers, specs, partial(_gemv_weight, integers), "gemv")


def _gemv_weight(integers: Integers, tensors: Tensors) -> QuantizedTensor:
    codes = row_bytes(tensors["qweight"])
    zeros = unpacked_rows(tensors["qzeros"], BITS, integers.groups)
    return integers.weight(codes, zeros, tensors["scales"][:, : integers.groups])


VERSIONS = {"gemm": _gemm, "gemv": _gemv}
