"""Quantized inputs of compressed-tensors' layers: their record, and the static scales that a folder brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ao_lab.checkpoint.formats.compressed_tensors.weights import like
from ao_lab.checkpoint.io.safetensors_header import Spec
from ao_lab.checkpoint.io.weight_specs import Specs
from ao_lab.config.compressed_tensors.activations import reader_activation
from reference import Scales, Scheme
from reference.quantize.blocks import Blocks

SCALE, ZERO, OUTER = "input_scale", "input_zero_point", "input_global_scale"
PARTS = (SCALE, ZERO, OUTER)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def inputs_of(arguments: Mapping[str, Any] | None, found: Specs, length: int) -> tuple[Scheme | None, Specs]:
    """The record of a layer's inputs of this length (None: not quantized) and its static tensors; ValueError for others."""
    scheme = None if arguments is None else reader_activation(arguments)
    if scheme is not None:
        Blocks.of((1, length), scheme.scale, -1)
    specs: Specs = {}
    if arguments is not None and scheme is not None and arguments.get("dynamic", False) is not True:
        part = SCALE if scheme.outer is None else OUTER
        if part not in found:
            raise ValueError(f"static inputs have a {part}, which the files lack; fetch the folder again")
        specs[part] = Spec(found[part].dtype, like(found[part].shape, (1,)))
        if found[part].dtype not in FLOATS:
            raise ValueError(f"{part} is a float, got {found[part]}; fetch the folder again")
        if ZERO in found and part == SCALE:
            # Symmetric inputs of earlier versions have one, which is 0.
            specs[ZERO] = Spec(found[ZERO].dtype, like(found[ZERO].shape, (1,)))
    if more := [part for part in found if part in PARTS and part not in specs]:
        raise ValueError(
            f"{more[0]} belongs to static inputs, which its group does not have; fetch the folder again"
        )
    return scheme, specs


def static_scales(tensors: Mapping[str, torch.Tensor]) -> Scales | None:
    """The static scales of a layer's input; ValueError where a zero point is not that of symmetric inputs."""
    if ZERO in tensors and bool((tensors[ZERO].to(torch.float32) != 0).any()):
        raise ValueError(f"symmetric inputs have an {ZERO} that is not 0; fetch the folder again")
    for part in (SCALE, OUTER):
        if part in tensors:
            stored = tensors[part].to(torch.float32).reshape(())
            return Scales(stored) if part == SCALE else Scales(None, stored)
    return None


__all__ = ["PARTS", "inputs_of", "static_scales"]
