"""Gradients of layers in training against `fake_quantize_vjp` of the same products, bit for bit.

A mask of the blocks that saturate (`fast.quantize.saturation`) stands in for a look at every gradient; here both are made,
called twice, so that remembered calls are compared too. On a CPU both are the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import fast
from ao_lab.config.recipe import Recipe, named
from ao_lab.qat.linear import Given, Rule, gradients
from tests.gpu.harness.subject import Asked, Check, Subject, same_bits

DYNAMIC, WEIGHTS = "int8_rowwise_asymmetric", "int4_g128_asymmetric"
#: (scheme of inputs, of weights, rows, inputs, outputs): either operand the larger, rows that fill no tile.
CASES = (
    (DYNAMIC, "int4_g32", 256, 512, 384),
    (DYNAMIC, WEIGHTS, 64, 14336, 128),
    (DYNAMIC, "int4_g32_asymmetric", 512, 96, 32),
    (None, WEIGHTS, 128, 4096, 256),
    ("int8_rowwise", "int8_rowwise", 64, 200, 96),
    ("mxfp8_e4m3", "mxfp4", 64, 256, 96),
)


def numbers(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal numbers; every third row as long below zero as above, so that its ends may round beyond the codes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x[::3, ::2] = 3.75
    x[::3, 1::2] = -3.75
    return x.to(device, dtype)


def expected(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, inputs: str | None, weights: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dW by the public functions alone."""
    rounded = x if inputs is None else fast.fake_quantize(x, inputs)
    dx = torch.mm(g, fast.fake_quantize(w, weights))
    dw = torch.mm(g.t(), rounded)
    if inputs is not None:
        dx = fast.fake_quantize_vjp(dx, x, inputs)[0]
    return dx, fast.fake_quantize_vjp(dw, w, weights)[0]


def wrong_of(case: tuple[str | None, str, int, int, int], dtype: torch.dtype, device: str) -> Iterator[str]:
    """What differs, the first time and again."""
    inputs, weights, rows, length, outputs = case
    # On a CPU the program itself is what is tried.
    along = min(length, 512) if device == "cpu" else length
    rule = Rule.of(Recipe(weight=named(weights), activation=named(inputs)), -1)  # type: ignore[arg-type]
    x, w = numbers((rows, along), dtype, device), numbers((outputs, along), dtype, device)
    g = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    right = expected(g, x, w, inputs, weights)
    for call in ("first", "again"):
        made = gradients(g, x, w, Given(), rule, (True, True, False, False, False, False))
        yield from (
            f"{name} {call} differs"
            for name, one, other in zip(("dx", "dw"), made[:2], right, strict=True)
            if not same_bits(one, other)
        )


def checks(asked: Asked) -> Iterator[Check]:
    """All cases and dtypes."""
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield f"{case} {dtype}", partial(wrong_of, case, dtype, asked.device)


SUBJECTS = (Subject("qat", "gradients of layers in quantization-aware training", checks, on_cpu=True),)
