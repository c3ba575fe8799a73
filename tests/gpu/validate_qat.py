"""On a GPU: gradients of layers in training against `fake_quantize_vjp` of the same products, bit for bit, and their speed.

    PYTHONPATH=. python tests/gpu/validate_qat.py [--device cpu]

A mask of the blocks that saturate (`fast.quantize.fake_quantize`) stands in for a look at every gradient; here both are made,
called twice, so that remembered calls are compared too. After it, where there is a GPU, bytes a second of each pass at the
sizes of Llama-3-8B beside those of a copy. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fast
from ao_lab.config.recipe import Recipe, named
from ao_lab.qat.forward import Given, Rule, gradients
from fast.quantize import fake_quantize

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
PLACES = ((DYNAMIC, 8192, 4096), (DYNAMIC, 8192, 14336), (WEIGHTS, 14336, 4096), ("int4_g32", 14336, 4096))
ROUNDS = 50


def same(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in their bits."""
    view = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(view) != b.contiguous().view(view)).sum())


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


def compare(device: str) -> int:
    """Elements that differ, over all cases and dtypes."""
    total = 0
    for inputs, weights, rows, length, outputs in CASES:
        # On a CPU both are the reference's, and the program itself is what is tried.
        along = min(length, 512) if device == "cpu" else length
        recipe = Recipe(weight=named(weights), activation=named(inputs))  # type: ignore[arg-type]
        rule = Rule.of(recipe, -1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, w = numbers((rows, along), dtype, device), numbers((outputs, along), dtype, device)
            g = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            right = expected(g, x, w, inputs, weights)
            different = 0
            for _ in range(2):
                dx, dw, *_ = gradients(g, x, w, Given(), rule, (True, True, False, False, False, False))
                different += same(dx, right[0]) + same(dw, right[1])
            total += different
            print(f"{inputs} x {weights} {rows}x{along}x{outputs} {dtype}: {different} different", flush=True)
    return total


def microseconds(call: Callable[[], object]) -> float:
    """Of one of many calls in a row."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ROUNDS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / ROUNDS * 1e3


def passes(scheme: str, rows: int, columns: int) -> None:
    """What the passes of one operand take, and bytes a second of those that read and write it once."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    g, y = torch.randn_like(x), torch.empty_like(x)
    _, mask = fake_quantize.fake_quantize_with_mask(x, scheme)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: y.copy_(x),
        "fake_quantize": lambda: fast.fake_quantize(x, scheme),
        "fake_quantize_vjp": lambda: fast.fake_quantize_vjp(g, x, scheme),
    }
    if mask is not None:
        calls["fake_quantize_with_mask"] = lambda: fake_quantize.fake_quantize_with_mask(x, scheme)
        calls["mask_gradient"] = lambda: fake_quantize.mask_gradient(g, x, mask, scheme)
        print(f"{scheme} {rows}x{columns}: {mask.float().mean():.2%} of the blocks saturate", flush=True)
    for name, call in calls.items():
        took = microseconds(call)
        rate = 2 * x.nbytes / took / 1e6
        print(f"{scheme} {rows}x{columns} {name}: {took:.1f} us, {rate:.2f} TB/s if once", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args(arguments).device
    different = compare(device)
    for place in PLACES if device == "cuda" else ():
        passes(*place)
    print("agreed" if not different else f"{different} different", flush=True)
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
