"""AutoGPTQ's and GPTQModel's checkpoints (`quant_method: gptq`), format gptq (version 1) or gptq_v2.

A layer of K inputs and N outputs with b bits in groups of g (-1: K) has

    qweight  int32 (ceil(K b / 32), N)          codes of a column, one after the other in a little-endian stream of bits
    qzeros   int32 (ceil(K / g), ceil(N b / 32)) zero points of a group, likewise along the outputs
    scales   float16 (ceil(K / g), N)
    g_idx    int32 (K)                          the group of each input; may be missing where that is input // g

Where act-order (desc_act) has scattered the groups, scales are stored again for runs of neighbours of a group, where these are.

Version 1 stores zero points less one. One is added to them as GPTQModel does: to all fields of a word in one addition (for 3
bits to each field, modulo 8), so that its own files, which it wrote by one subtraction, give their zero points back; AutoGPTQ
adds it to each field, which is the same wherever no stored field is 2**b - 1.

Sources: auto_gptq 0.7.1, nn_modules/qlinear/qlinear_cuda_old.py; gptqmodel 7.7.0, nn_modules/qlinear/__init__.py
(dequantize_weight), utils/model.py (convert_gptq_v1_to_v2_format_module), quantization/config.py.
"""

from __future__ import annotations

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
    regrouped,
    row_bytes,
    run_length,
    scale_dtype,
    spec_of,
    unpacked_rows,
    width_and_group,
    words_of,
)
from ao_lab.checkpoint.io.shards import Folder, Spec, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.records import Records
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference import Scale, Scheme, Zero

LIBRARY = "GPTQModel"
BITS = (2, 3, 4, 8)
#: By checkpoint_format: whether zero points are stored less one, and for which bits.
FORMATS = {"gptq": (True, BITS), "gptq_v2": (False, BITS), "gptq_p": (False, (2, 4, 8))}
#: What version 1 adds to a word of zero points; 3 bits cross words and go field by field.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
WAY_OUT = f"load the folder with {LIBRARY}, or quantize the original model with ao_lab"

# auto_gptq 0.7.1, quantization/quantizer.py, find_params: the range is widened to hold 0, or to be symmetric; its codes come
# from GPTQ, which rounds to this grid but not to the nearest point of it. A group of zeros has scale 1 here and 2 / 15 there.
_SCALE = Scale(block=-1, statistic="absmax", target=7.5, floor=("zero", 1.0), storage="float16")
RECORDS = Models(
    Scheme(
        name="gptq.int4", element="int4", scale=_SCALE, apply="divide", nan="ieee", dequantize="ieee",
        deviations=("the largest positive value clips", "scales are rounded to float16"),
    ),
    Scheme(
        name="gptq.int4_asymmetric", element="int4", zero=Zero(), apply="divide", nan="ieee", dequantize="ieee",
        scale=Scale(block=-1, statistic="minmax_with_zero", target=15.0, floor=("zero", 1.0), storage="float16"),
        deviations=("scales are rounded to float16",),
    ),
)  # fmt: skip


@reader("gptq")
def read_gptq_records(folder: Folder, config: Mapping[str, Any]) -> Records:
    """The records of a folder; ValueError for other formats, words, bits and shapes, and for groups of scattered inputs.

    Of all tensors only g_idx is read here, before any weight.
    """
    less_one, able = _format(folder, config)
    found = {}
    for path in layers(folder, LIBRARY):
        integers = _integers(path, folder, config, able)
        specs = _specs(integers, f"{path}g_idx" in folder.specs)
        grouped = _grouped(path, integers, folder)
        found[path] = PackedLayer(grouped, specs, partial(_weight, grouped, less_one), "gptq")
    return records_of(found, "gptq", config.get("sym") is True)


def _format(folder: Folder, config: Mapping[str, Any]) -> tuple[bool, tuple[int, ...]]:
    """Whether zero points are stored less one, and which bits there may be."""
    name = config.get("checkpoint_format") or config.get("format") or "gptq"
    name = "marlin" if config.get("is_marlin_format") is True else str(name).lower()
    if name not in FORMATS:
        raise ValueError(
            f"checkpoint_format {shown(name)} of {folder.path} cannot be read, these can: {', '.join(FORMATS)}; {WAY_OUT}"
        )
    if config.get("rotation"):
        raise ValueError(
            f"rotation {shown(config['rotation'])} of {folder.path} turns the inputs of its layers, which no scheme describes; "
            f"{WAY_OUT}"
        )
    return FORMATS[name]


def _integers(path: str, folder: Folder, config: Mapping[str, Any], able: tuple[int, ...]) -> Integers:
    """How a layer is stored: bits and group as the configuration says, or as shapes show where it has exceptions (dynamic)."""
    words, outputs = spec_of(folder, f"{path}qweight").shape
    groups = spec_of(folder, f"{path}scales").shape[0]
    listed = f"{path}g_idx" in folder.specs
    inputs = spec_of(folder, f"{path}g_idx", 1).shape[0] if listed else 0
    if config.get("dynamic"):
        fitting = [bits for bits in able if words_of(inputs, bits) == words]
        if len(fitting) != 1 or inputs % groups:
            raise ValueError(
                f"bits and group of {shown(path)} in {folder.path} do not follow from qweight, g_idx and scales, and dynamic "
                f"says that they differ between layers; {WAY_OUT}"
            )
        bits, group = fitting[0], inputs // groups
    else:
        bits, group = width_and_group(config, folder, able, WAY_OUT)
    shape = (outputs, inputs or words * 32 // bits)
    return Integers(RECORDS, bits, group, shape, scale_dtype(folder, f"{path}scales"))


def _specs(integers: Integers, listed: bool) -> dict[str, Spec]:
    (outputs, inputs), bits, groups = integers.shape, integers.bits, integers.groups
    result = {
        "qweight": Spec(torch.int32, (words_of(inputs, bits), outputs)),
        "qzeros": Spec(torch.int32, (groups, words_of(outputs, bits))),
        "scales": Spec(integers.dtype, (groups, outputs)),
    }
    return {**result, "g_idx": Spec(torch.int32, (inputs,))} if listed else result


def _grouped(path: str, integers: Integers, folder: Folder) -> Integers:
    """The layer with groups of neighbours, as blocks are: its own, or shorter runs where desc_act has scattered the inputs.

    Every run has a scale and a zero point (24 bits). ValueError where these take a weight beyond what it takes dense.
    """
    name, inputs = f"{path}g_idx", integers.shape[1]
    if name not in folder.specs:
        return integers
    listed = folder.read([name])[name]
    group = inputs if integers.group == -1 else integers.group
    if torch.equal(listed, (torch.arange(inputs) // group).to(listed.dtype)):
        return integers
    try:
        run = run_length(listed, integers.groups)
    except ValueError as error:
        raise ValueError(f"{shown(name)} of {folder.files[name]}: {error}; fetch it again") from error
    if integers.bits + 24 / run >= 16:
        raise ValueError(
            f"{shown(name)} of {folder.files[name]}: inputs of a group are not contiguous (desc_act, act-order), "
            f"but in runs of {run}, and a scale for each of these takes more than the dense weight; {WAY_OUT}. Checkpoints "
            "without desc_act, or with static groups, can be read"
        )
    return replace(integers, group=run)


def _weight(integers: Integers, less_one: bool, tensors: Tensors) -> QuantizedTensor:
    bits, (outputs, inputs) = integers.bits, integers.shape
    stream = row_bytes(tensors["qweight"].t())[:, : -(-inputs * bits // 8)]
    zeros = zero_points(tensors["qzeros"], bits, outputs, less_one).t()
    scales = tensors["scales"].t()
    if scales.shape[1] != integers.groups:
        zeros, scales = regrouped(tensors["g_idx"], integers.group, zeros, scales)
    return integers.weight(stream.contiguous(), zeros.contiguous(), scales)


def zero_points(words: torch.Tensor, bits: int, count: int, less_one: bool) -> torch.Tensor:
    """Unsigned zero points (groups, outputs) of words; `less_one`: version 1, as the module says."""
    if less_one and bits in ONES:
        words = words + torch.tensor(ONES[bits], dtype=torch.int32)
    zeros = unpacked_rows(words, bits, count)
    return (zeros + 1) & ((1 << bits) - 1) if less_one and bits not in ONES else zeros
