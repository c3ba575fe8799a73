"""On a GPU: blocks mixed, rounded by words drawn in place and quantized, bit for bit; and training steps on values, with times.

    PYTHONPATH=. python tests/gpu/training/validate_mixed.py [--no-speed]

Compared with the reference: every operand of `mxfp4` and `nvfp4` that a Hadamard transform or stochastic rounding makes, as
values and as codes, and the transform alone; both axes of one read (`both_axes`); then a step of `DequantizedLinear` with one
of `TrainingLinear`. Times are beside torch's bfloat16 step and the steps of `TrainingLinear`. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import reference
from ao_lab.training import autograd
from ao_lab.training.autograd import training_linear
from fast.kernels import hadamard as host
from reference.schemes.schemes import Scheme
from reference.training import RECIPES, hadamard
from tests.emulator.programs.training.hadamard import SEED, STREAM, along
from tests.gpu.training import both_axes
from tests.gpu.training.grouped_speed import milliseconds

M, K, N = 16384, 4096, 14336
NAMES = ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "blockwise")
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Recipe, operand's product and side, axis of the matrix that it runs along.
OPERANDS = (
    ("mxfp4", "input_grad", "a", 1),
    ("mxfp4", "weight_grad", "a", 0),
    ("nvfp4", "input_grad", "a", 1),
    ("nvfp4", "weight_grad", "a", 0),
    ("nvfp4", "weight_grad", "b", 0),
)


def matrix(kind: int) -> torch.Tensor:
    """Numbers of many sizes, of all, and with NaN, infinities and subnormals."""
    generator = torch.Generator().manual_seed(kind)
    x, spread = (torch.randn(64, 1024, generator=generator) for _ in range(2))
    x = x * torch.exp(spread * (30 if kind == 1 else 3))
    x[0], x[:, 3] = 0, 0
    if kind == 2:
        x[5, 7], x[40, 9], x[9], x[60] = float("nan"), float("inf"), 1e-40, 3e38
    return x.bfloat16()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether bits are the same."""
    view = VIEWS[found.element_size()]
    return torch.equal(found.cpu().view(view), wanted.contiguous().view(view))


def check_operand(scheme: Scheme, length: int, axis: int, kind: int) -> list[str]:
    """Codes, scales and values of the reference."""
    x, rule = matrix(kind), host.Rule(scheme, length, axis)
    mixed = hadamard(along(x, axis), length) if length else along(x, axis)
    words = None
    if scheme.rounding == "stochastic":
        words = torch.from_numpy(reference.random_bits(tuple(mixed.shape), seed=SEED, stream=STREAM))
    wanted = reference.quantize(mixed, scheme, random_bits=words)
    found = host.quantized(x.cuda(), rule, SEED, STREAM)
    values = host.quantized_values(x.cuda(), rule, SEED, STREAM)
    agree = {
        "codes": same(found.codes, along(wanted.codes, axis)),
        "scales": same(found.scale, along(wanted.scale, axis)),
        "outer": wanted.outer is None or same(found.outer, wanted.outer),
        "values": same(values, along(reference.dequantize(wanted, "bfloat16"), axis)),
    }
    return [
        f"{scheme.name} {length} along {axis}, case {kind}: {name}" for name, ok in agree.items() if not ok
    ]


def check_transform() -> list[str]:
    """The transform alone, along both axes."""
    wrong = []
    for axis, length in ((0, 32), (1, 32), (0, 16), (1, 128)):
        x = matrix(2)
        wanted = along(hadamard(along(x, axis), length), axis)
        if not same(host.mixed(x.cuda(), host.Rule(None, length, axis)), wanted):
            wrong.append(f"transform of {length} along {axis}")
    return wrong


def step(name: str, kernel: str, x: Any, w: Any, g: Any) -> list[torch.Tensor]:
    """y, dx and dw."""
    y = training_linear(x, w, None, RECIPES[name], kernel, tuned=False)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def step_of_codes(name: str, kernel: str, x: Any, w: Any, g: Any) -> list[torch.Tensor]:
    """The same by `TrainingLinear`."""
    serves = autograd.serves
    autograd.serves = lambda *call: False
    try:
        return step(name, kernel, x, w, g)
    finally:
        autograd.serves = serves


def check_step(name: str) -> list[str]:
    """The same output and, but for the order of sums, gradients as `TrainingLinear` on dequantized operands."""
    x, w, g = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((1024, 512), (768, 512), (1024, 768))
    )
    x, w = x.requires_grad_(), w.requires_grad_()
    found, wanted = step(name, "dequantize", x, w, g), step_of_codes(name, "dequantize", x, w, g)
    far = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, wanted, strict=True)
    ]
    return [f"{name}: a step differs by {far}"] if max(far) > 2e-3 else []


def speed() -> None:
    """Steps beside torch's, by values and as before."""
    x, w, g = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, K), (N, K), (M, N)))
    x, w = x.requires_grad_(), (w.detach() / 50).requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), g)
    }
    for name in NAMES:
        calls[f"{name} by values"] = lambda name=name: step(name, "dequantize", x, w, g)
        calls[name] = lambda name=name: step_of_codes(name, "auto", x, w, g)
    for name, time in milliseconds(calls).items():
        print(f"{name:24} {time:8.3f} ms", flush=True)


def main() -> int:
    """Run all parts, print what fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-speed", action="store_true")
    options = parser.parse_args()
    autograd.new_seed = lambda recipe: 7
    wrong = check_transform()
    for name, product, side, axis in OPERANDS:
        operand = getattr(getattr(RECIPES[name], product), side)
        for kind in range(3):
            wrong += check_operand(operand.scheme, operand.hadamard, axis, kind)
        print(name, product, side, "compared", flush=True)
    for name in both_axes.NAMES:
        for dtype in both_axes.DTYPES:
            wrong += both_axes.check(name, dtype)
            print(name, dtype, "both axes compared", flush=True)
    for name in NAMES:
        wrong += check_step(name)
    print("\n".join(wrong) or "all agree", flush=True)
    if not options.no_speed:
        both_axes.speed()
        speed()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
