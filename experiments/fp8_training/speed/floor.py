"""The least time of a linear layer's forward and backward: its operations at the measured matrix rate, and the bytes of its
casts at the measured copy rate.

A recipe's product runs at the rate of the units that its operands need: 8-bit floats with one scale for a row or a tensor at
that of `torch._scaled_mm`, all others (no Hopper multiplies MX blocks or dense operands otherwise) at that of bfloat16. A cast
reads each tensor once, 2 bytes an element, and writes a byte (of 4-bit formats half a byte) in each of the two layouts that
its products ask for. Nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ao_lab.training.products import is_one_scale
from experiments.fp8_training.speed.steady import steady
from experiments.harness.timing import Plan, Watch, prepare, summary
from reference.training.recipe import Operand, Product, recipe_of

#: Side of the products that say what the matrix units do, and bytes of the copy.
SIDE, COPIED = 8192, 2**30
PLAN = Plan(rounds=10, warmup=2, seconds=0.5, span=1e-3)


@dataclass(frozen=True)
class Rates:
    """What this device was measured to do: operations a second of 8-bit floats and bfloat16, bytes a second of a copy."""

    float8: float
    bfloat16: float
    copy: float


def measure_rates(watch: Watch) -> Rates:
    """Rates on random data, each of its own steady state, as layers are timed."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls: dict[str, Callable[[], object]] = {
        "float8": scaled,
        "bfloat16": lambda: a @ b.t(),
        # A kernel: the copy engines of a GPU are slower than its multiprocessors.
        "copy": lambda: torch.neg(source, out=target),
    }
    spans = {name: prepare(watch, [call], PLAN) for name, call in calls.items()}
    times = {name: summary(one).median for name, one in steady(watch, spans, PLAN).items()}
    operations = 2 * SIDE**3
    return Rates(operations / times["float8"], operations / times["bfloat16"], 2 * COPIED / times["copy"])


def floor_seconds(shape: tuple[int, int, int], recipe: str, rates: Rates) -> float:
    """Seconds of forward and backward of a layer (M, K, N) by a recipe; "" is bfloat16."""
    m, k, n = shape
    record = recipe_of(recipe or "bf16")
    products = (record.output, record.input_grad, record.weight_grad)
    work = sum(2 * m * k * n / rate_of(one, rates) for one in products)
    sizes = {"x": m * k, "w": n * k, "g": m * n}
    x, w, g, w_t, g_t, x_t = record.operands
    casts = {"x": (x, x_t), "w": (w, w_t), "g": (g, g_t)}
    return work + sum(cast_bytes(sizes[name], *pair) for name, pair in casts.items()) / rates.copy


def rate_of(product: Product, rates: Rates) -> float:
    """Operations a second of the units that a product's operands need."""
    schemes = [operand.scheme for operand in (product.a, product.b)]
    plain = all(
        one is not None and one.element.startswith("float8_") and is_one_scale(one) for one in schemes
    )
    return rates.float8 if plain else rates.bfloat16


def cast_bytes(elements: int, rows: Operand, columns: Operand) -> float:
    """Bytes of a tensor's casts: one read for both copies; none where neither is quantized."""
    made = [one.scheme.format.bits / 8 for one in (rows, columns) if one.scheme is not None]
    return elements * (2 + sum(made)) if made else 0.0


__all__ = ["Rates", "cast_bytes", "floor_seconds", "measure_rates", "rate_of"]
