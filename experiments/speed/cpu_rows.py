"""Experiment `speed`: a quantized linear layer on a CPU with several rows of inputs over the same layer dense.

A 2048 x 2048 layer, eager, as `ao_lab.quantize_` makes it of each configuration of experiment `linear`. The target is the
fraction of the dense layer's speed that it is to reach: 1/1.5 for weights alone in 8 or 4-bit integers, 1/3 for all others.
"""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from experiments.linear.layers import checked
from experiments.linear.methods import ACTIVATIONS, WEIGHTS, Method
from experiments.speed.baselines import Comparison, Pair

SIZE = 2048
#: Configurations that people run on CPUs, which are measured in both dtypes; longest times in times of the dense layer.
COMMON = ("int4 g128", "int4 g32", "int4 g128, zero points", "int8", "int8 g128")
LIMIT, LIMIT_OF_OTHERS = 1.5, 3.0
ROWS, ROWS_OF_OTHERS = (2, 4, 16, 64, 512), (2, 16, 512)


@lru_cache(maxsize=1)
def layers(method: Method, dtype: torch.dtype, size: int) -> tuple[Any, Any]:
    """The quantized layer and the dense one."""
    generator = torch.Generator().manual_seed(size)
    dense = torch.nn.Linear(size, size, bias=False).to(dtype).requires_grad_(False)
    dense.weight.copy_(torch.randn(size, size, generator=generator) * size**-0.5)
    return method.quantize(copy.deepcopy(dense)), dense


def layer_pair(x: np.ndarray, method: Method, rows: int, dtype: torch.dtype) -> Pair:
    """Both with some rows of x; the check is experiment `linear`'s."""
    ours, dense = layers(method, dtype, SIZE)
    inputs = torch.from_numpy(x.reshape(-1)[: rows * SIZE].reshape(rows, SIZE).copy()).to(dtype)

    def check() -> None:
        checked(method, ours, ours(inputs), inputs, dense.weight)

    return Pair(partial(ours, inputs), partial(dense, inputs), check)


def comparisons(method: Method, dtype: torch.dtype) -> list[Comparison]:
    """Those of a configuration, fewest rows first."""
    common = method.name in COMMON
    target = 1 / (LIMIT if common else LIMIT_OF_OTHERS)
    word = str(dtype).removeprefix("torch.")
    return [
        Comparison(
            f"{rows} rows, {method.name}, {word}",
            "the dense layer",
            target,
            "torch",
            partial(layer_pair, method=method, rows=rows, dtype=dtype),
            "torch",
        )
        for rows in (ROWS if common else ROWS_OF_OTHERS)
    ]


LAYERS = tuple(
    comparison
    for dtype in (torch.bfloat16, torch.float32)
    for method in (*WEIGHTS, *ACTIVATIONS)
    if dtype == torch.bfloat16 or method.name in COMMON
    for comparison in comparisons(method, dtype)
)

__all__ = ["LAYERS", "layer_pair"]
