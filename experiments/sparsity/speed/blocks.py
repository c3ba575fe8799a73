"""The linear layers of a block of Llama-3.1-8B at the rows of decoding, 1 to 16: int4 in 2:4 storage beside int4 alone.

A call multiplies by all seven weights, as CUDA graphs over blocks that exceed the L2 cache; layers are `ao_lab`'s, by the
kernels that they choose themselves, fp8 in 2:4 storage by those that `ao_lab.tune` chooses. What stands between layers is left
out, so ratios are those of the layers. "speed over dense" is over bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from experiments.harness.outcome import Wrong
from experiments.harness.timing import Call, Plan, cache_bytes, input_sets
from experiments.models.llama import LlamaConfig
from experiments.models.llama_shapes import LLAMA_3_1_8B
from experiments.sparsity.methods import PATTERN
from experiments.sparsity.speed.decode import choose_kernels, fp8, int4
from experiments.sparsity.speed.sides import DENSE, Side, Table

KIND = "blocks"
ROWS = (1, 16, 4, 2, 8)
#: Beside one row, those that kernels are chosen for by timing; others follow the nearest.
TUNED = (16,)
INT4, SPARSE_INT4, FP8, SPARSE_FP8 = "int4", "int4 + 2:4", "fp8", "fp8 + 2:4"
SETTING = "all linear layers of a block, bfloat16 inputs, CUDA graph"
PLAN = Plan(rounds=9, warmup=1, seconds=4.0, span=1e-3, most_calls=16)
#: Largest difference of a layer's output to that of its weight's values in float32, relative to its norm: 8 bits of inputs.
LIMIT = 6e-2
#: Bytes of an element of the smallest storage: 4 bits, half of them kept, a quarter of their places.
LEAST = 0.375
Convert = Callable[[nn.Module], object]


def tables(
    device: str, seed: int, config: LlamaConfig = LLAMA_3_1_8B, rows: tuple[int, ...] = ROWS
) -> list[Table]:
    """A table for each number of rows."""
    made = partial(calls, shapes_of(config), device, seed)
    elements = sum(k * n for k, n in shapes_of(config))
    return [
        Table(
            KIND, f"{config.name}, {count} rows", SETTING,
            tuple(Side(name, partial(made, count, convert)) for name, convert in CONVERSIONS.items()),
            PLAN, operations=2.0 * count * elements, graph=device == "cuda", needed=25.0,
        )
        for count in rows
    ]  # fmt: skip


def shapes_of(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of a block's layers; queries, keys and values are one, and so are gate and up."""
    width, inner = config.width, config.feed_forward
    head = width // config.heads
    return (
        (width, width + 2 * config.kv_heads * head), (width, width), (width, 2 * inner), (inner, width),
    )  # fmt: skip


def calls(
    shapes: tuple[tuple[int, int], ...], device: str, seed: int, rows: int, convert: Convert
) -> list[Call]:
    """A call for each block; `Wrong` where a layer of the first computes something else than its weight says."""
    generator = torch.Generator(device).manual_seed(seed)
    least = int(LEAST * sum(k * n for k, n in shapes))
    count = input_sets(least, cache_bytes()) if device == "cuda" else 1
    inputs = {k: torch.randn(rows, k, generator=generator, device=device).bfloat16() for k, _ in shapes}
    blocks = [layers_of(shapes, device, generator, convert) for _ in range(count)]
    for layer in blocks[0]:
        check(layer, inputs[layer.in_features])
    return [partial(multiply, block, inputs) for block in blocks]


def layers_of(
    shapes: tuple[tuple[int, int], ...], device: str, generator: torch.Generator, convert: Convert
) -> list[nn.Linear]:
    """The layers of a block with random weights, converted one by one."""
    found = []
    for k, n in shapes:
        layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        layer.weight.normal_(std=k**-0.5, generator=generator)
        convert(holder := nn.Sequential(layer))
        found.append(holder[0])
    return found


@torch.no_grad()
def multiply(block: list[nn.Linear], inputs: dict[int, Tensor]) -> list[Tensor]:
    """All products."""
    return [layer(inputs[layer.in_features]) for layer in block]


@torch.no_grad()
def check(layer: nn.Linear, x: Tensor) -> None:
    """`Wrong` for an output that is not the weight's."""
    weight: Any = layer.weight
    values = weight.dequantize() if isinstance(weight, ao_lab.QuantizedTensor) else weight
    exact = x.float() @ values.float().t()
    error = float((layer(x).float() - exact).norm() / exact.norm())
    if not error <= LIMIT:
        raise Wrong(f"the layer {tuple(weight.shape)} differs by {error:.1e} of its size")


def plain(config: Callable[..., Any], model: nn.Module) -> None:
    """Quantize."""
    ao_lab.quantize_(model, config())


def sparse(config: Callable[..., Any], model: nn.Module) -> None:
    """Prune by magnitude, then quantize in 2:4 storage."""
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), every_layer)
    ao_lab.quantize_(model, config(sparsity=PATTERN))


def tuned(config: Callable[..., Any], model: nn.Module) -> None:
    """The same, and its kernels chosen by timing, where that was not done for the shape before."""
    sparse(config, model)
    choose_kernels(model, TUNED)


def every_layer(module: nn.Module, name: str) -> bool:
    """All linear layers."""
    return isinstance(module, nn.Linear)


CONVERSIONS: dict[str, Convert] = {
    DENSE: lambda model: None,
    INT4: partial(plain, int4),
    SPARSE_INT4: partial(sparse, int4),
    FP8: partial(plain, fp8),
    SPARSE_FP8: partial(tuned, fp8),
}

__all__ = ["INT4", "KIND", "SPARSE_INT4", "tables"]
