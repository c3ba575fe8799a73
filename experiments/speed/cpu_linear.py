"""Experiment `speed`: a linear layer on a CPU with one row of inputs, weights quantized by a scheme, over the same layer dense.

A 2048 x 2048 layer in float32 and in bfloat16, eager and compiled. The target of a scheme is the fraction of the dense layer's
speed that it is to reach: 1/1.5 for 8-bit integers with one scale a row, 1/2.5 for 4-bit integers, 1/6 for all others.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import torch

import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.tensor.quantized_tensor import quantized
from experiments.harness.compiled import compiled_runs
from experiments.speed.baselines import Comparison, Pair

SIZE = 2048
#: Longest time by scheme, in times of the dense layer.
LIMITS = {
    "int8_rowwise": 1.5,
    "int4_g32": 2.5,
    "int4_g128_asymmetric": 2.5,
    "int8_g32_asymmetric": 6.0,
    "ternary_rowwise": 6.0,
    "int2_g32": 6.0,
    "int3_g32": 6.0,
    "int5_g32": 6.0,
    "int6_g32": 6.0,
    "fp8_rowwise": 6.0,
    "mxfp8_e4m3": 6.0,
    "mxfp6_e2m3": 6.0,
    "mxfp4": 6.0,
    "nvfp4": 6.0,
    "nf4": 6.0,
}
COMPILED = ("int8_rowwise", "int4_g32", "int6_g32", "fp8_rowwise", "mxfp4", "nvfp4", "nf4")


def layer_pair(x: np.ndarray, scheme: str, dtype: torch.dtype, compiled: bool) -> Pair:
    """A layer with quantized weights, and the dense one; the check compares ours with `reference.linear_error_bound`."""
    elements = torch.from_numpy(x.reshape(-1)[: SIZE * (SIZE + 1)].copy()).to(dtype)
    dense = torch.nn.Linear(SIZE, SIZE, bias=False).to(dtype).requires_grad_(False)
    dense.weight.copy_(elements[: SIZE * SIZE].view(SIZE, SIZE))
    row = elements[SIZE * SIZE :].view(1, SIZE)
    quantized_layer = copy.deepcopy(dense)
    weight = quantized(dense.weight, Recipe(weight=named(scheme) or reference.SCHEMES[scheme]))
    quantized_layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    ours, theirs = (torch.compile(layer) if compiled else layer for layer in (quantized_layer, dense))

    def check() -> None:
        for layer in (ours, theirs):
            layer(row)
            with compiled_runs(compiled):
                layer(row)
        q = weight.quantized
        exact = row.double() @ reference.dequantize(q).double().t()
        error = (ours(row).double() - exact).abs()
        if not bool((error <= reference.linear_error_bound(row, q)).all()):
            raise ValueError(
                f"the output of a layer in {scheme} exceeds its error bound; a wrong result is not timed"
            )

    return Pair(lambda: ours(row), lambda: theirs(row), check)


def _comparison(scheme: str, dtype: torch.dtype, compiled: bool) -> Comparison:
    name = f"one row, {scheme}, {str(dtype).removeprefix('torch.')}{', compiled' if compiled else ''}"
    build = partial(layer_pair, scheme=scheme, dtype=dtype, compiled=compiled)
    return Comparison(name, "the dense layer", 1 / LIMITS[scheme], "torch", build, "torch")


LAYERS = tuple(
    _comparison(scheme, dtype, compiled)
    for compiled in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
    for scheme in (COMPILED if compiled else LIMITS)
)

__all__ = ["COMPILED", "LAYERS", "LIMITS", "layer_pair"]
