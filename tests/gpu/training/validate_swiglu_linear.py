"""On a GPU: SwiGLU with the layer behind it as one step has the bits of its two parts, and keeps what it says it keeps.

    PYTHONPATH=. python tests/gpu/training/validate_swiglu_linear.py

For every recipe, eager and compiled: output and gradients of `swiglu_linear` beside those of `fast.swiglu` followed by the
layer. Prints the step that each recipe takes. Exits with 1 on any difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
import fast
from ao_lab.training.fused_modules import swiglu_linear
from reference.training import RECIPES

#: Rows, inputs, outputs: whole tiles; and fewer rows than a tile.
SHAPES = ((512, 1024, 256), (128, 256, 384))


def compare(name: str, shape: tuple[int, int, int], compiled: bool) -> bool:
    """Whether all bits agree."""
    m, k, n = shape
    torch.manual_seed(0)
    down = nn.Sequential(nn.Linear(k, n, bias=True, device="cuda", dtype=torch.bfloat16))
    ao_lab.convert_for_training_(down, name)
    layer = down[0]
    gate, up = (torch.randn(2, m // 2, k, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    g = torch.randn(2, m // 2, n, device="cuda").bfloat16()
    leaves = [gate, up, layer.weight, layer.bias]
    run = torch.compile(swiglu_linear, fullgraph=True, dynamic=False) if compiled else swiglu_linear
    made = run(gate, up, layer), layer(fast.swiglu(gate, up))
    results = [[y.detach(), *torch.autograd.grad(y, leaves, g)] for y in made]
    kind = type(made[0].grad_fn).__name__
    same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    print(
        f"{name:20} {m}x{k}x{n} {'compiled' if compiled else 'eager':8} {kind:32} {'ok' if all(same) else same}"
    )
    return all(same)


def main() -> int:
    """Compare all; 1 where a bit differs."""
    plain = [name for name, recipe in RECIPES.items() if not recipe.is_stochastic]
    eager = [compare(name, shape, False) for name in plain for shape in SHAPES]
    names = ("rowwise", "rowwise_with_gw_hp", "mxfp8")
    return 0 if all([*eager, *(compare(name, SHAPES[0], True) for name in names)]) else 1


if __name__ == "__main__":
    sys.exit(main())
