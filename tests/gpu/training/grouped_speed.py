"""Times of linear layers of experts: forward and backward beside torch's bfloat16 product, and each part of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ao_lab.training.grouped import autograd, products
from ao_lab.training.grouped.autograd import grouped_linear, layout_of
from fast.layers.gather import gather_transposed
from reference.training import RECIPES
from reference.training.grouped import group_step

#: T, K, N and E: Mixtral-8x7B's up and down projections, many small experts (DeepSeek, Qwen), Llama 4 Scout's.
SHAPES = ((16384, 4096, 14336, 8), (16384, 14336, 4096, 8), (32768, 2048, 1536, 64), (16384, 5120, 8192, 16))
RECIPE_NAMES = ("rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8")
ROUNDS = 15


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians, one call after the other in each round, so that clocks are the same for all."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn > 1:
                found[name].append(begin.elapsed_time(end))
    return {name: median(times) for name, times in found.items()}


def tensors(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Normal numbers; groups of unlike lengths, no multiples of anything."""
    rows, k, n, experts = shape
    x, g = (torch.randn(rows, length, device="cuda", dtype=torch.bfloat16) for length in (k, n))
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) / 50
    ends = torch.sort(torch.randint(rows, (experts,), device="cuda")).values.to(torch.int32)
    ends[-1] = rows
    return x.requires_grad_(), w.requires_grad_(), g, ends


def both_ways(layer: Callable[..., torch.Tensor], x: Any, w: Any, g: Any) -> Callable[[], Any]:
    """Forward and both gradients."""
    return lambda: torch.autograd.grad(layer(x, w), (x, w), g)


def steps_of(x: Any, w: Any, g: Any, ends: Any) -> dict[str, Callable[[], Any]]:
    """A training step by torch in bfloat16, by each recipe, and by torchao where it is."""
    made = {
        "torch bf16": both_ways(lambda x, w: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends), x, w, g)
    }
    for name in RECIPE_NAMES:
        recipe = RECIPES[name]
        made[name] = both_ways(lambda x, w, recipe=recipe: grouped_linear(x, w, ends, recipe), x, w, g)
    return made


def parts_of(name: str, x: Any, w: Any, g: Any, ends: Any) -> dict[str, Callable[[], Any]]:
    """Each cast and each product of a recipe."""
    recipe, x, w = RECIPES[name], x.detach(), w.detach()
    layout = layout_of(ends, x.shape[0], group_step(recipe))
    rows, weight = (
        autograd.rows_operand(x, recipe.output.a, layout),
        autograd.weight_operand(w, recipe.output.b),
    )
    g_rows = autograd.rows_operand(g, recipe.input_grad.a, layout, 0, 2)
    w_columns = autograd.weight_columns(w, recipe.input_grad.b, recipe.output.b)
    g_columns = autograd.columns_operand(g, recipe.weight_grad.a, layout, 0, 4)
    x_columns = autograd.columns_operand(x, recipe.weight_grad.b, layout)
    bf16 = torch.bfloat16
    made = {
        "layout": lambda: layout_of(ends, x.shape[0], group_step(recipe)),
        "x rows": lambda: autograd.rows_operand(x, recipe.output.a, layout),
        "x columns": lambda: autograd.columns_operand(x, recipe.weight_grad.b, layout),
        "w rows": lambda: autograd.weight_operand(w, recipe.output.b),
        "w columns": lambda: autograd.weight_columns(w, recipe.input_grad.b, recipe.output.b),
        "g rows": lambda: autograd.rows_operand(g, recipe.input_grad.a, layout, 0, 2),
        "g columns": lambda: autograd.columns_operand(g, recipe.weight_grad.a, layout, 0, 4),
        "output": lambda: products.rows_product(rows, weight, ends, recipe.output, bf16),
        "input gradient": lambda: products.rows_product(g_rows, w_columns, ends, recipe.input_grad, bf16),
        "weight gradient": lambda: products.columns_product(
            g_columns, x_columns, layout.ends, recipe.weight_grad, bf16
        ),
    }
    if layout.source is not None:
        made["x gathered"] = lambda: gather_transposed(x, layout.source)
    return made


def main() -> None:
    """Print a table of steps and of parts."""
    for shape in SHAPES:
        given = tensors(shape)
        rows, k, n, experts = shape
        floor = 6 * rows * k * n / 1e9
        print(f"T {rows} K {k} N {n} E {experts}", flush=True)
        for name, time in milliseconds(steps_of(*given)).items():
            print(f"  {name:24} {time:8.3f} ms  {floor / time:7.0f} TFLOP/s", flush=True)
        for name in ("rowwise", "mxfp8"):
            times = milliseconds(parts_of(name, *given))
            print(f"  {name}: " + ", ".join(f"{part} {time:.3f}" for part, time in times.items()), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
