"""`column_sums` in Triton's interpreter: integers exactly, the bits of the model of its order, its bound, every edge.

    TRITON_INTERPRET=1 python tests/emulator/programs/training/column_sums.py

Prints a line for each case, and "agreed" at last.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import numpy as np
import torch

from fast.kernels.layers.column_sums import Plan, column_sums, plan_of
from tests.emulator import quick_interpreter
from tests.gpu.sparsity.cases import sum_bound, sum_model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Rows and columns: chunks that end within a step, columns that fill no program, one chunk, three axes.
SHAPES = ((203, 528), (77, 1024), (5, 256), (2, 50, 272))
#: A plan that is none of `plan_of`: chunks of three steps, the last one short.
FEW = Plan(256, 1, 3, 9, 24)


def planned(shape: tuple[int, ...]) -> list[Plan]:
    """The plan of a shape, and another one where that is for it."""
    rows, length = int(np.prod(shape[:-1])), shape[-1]
    return [plan_of(rows, length), *([FEW] if (rows, length) == (203, 528) else [])]


def compare(g: torch.Tensor, dtype: torch.dtype, plan: Plan, label: str) -> None:
    """The bits of the model rounded once; ValueError where they differ, or the model leaves its bound."""
    made = column_sums(g, dtype, None, plan)
    wide = g.float().reshape(-1, g.shape[-1]).numpy()
    right = sum_model(wide, plan.parts, plan.chunk)
    if made is None or made.dtype != dtype or not torch.equal(made, torch.from_numpy(right).to(dtype)):
        raise ValueError(f"{label}: other bits")
    if (np.abs(right - wide.astype(np.float64).sum(0)) > sum_bound(wide, plan.parts, plan.chunk)).any():
        raise ValueError(f"{label}: beyond the bound")
    print(label)


def special(dtype: torch.dtype) -> None:
    """NaN, infinities of one and of both signs, sums beyond a dtype, subnormals, zeros of either sign."""
    info = torch.finfo(dtype)
    g = torch.zeros((16, 256), dtype=dtype)
    g[3, 0], g[4, 1], g[5:7, 2] = torch.nan, torch.inf, torch.tensor([torch.inf, -torch.inf])
    g[0:16, 3], g[0:3, 4], g[:, 5] = info.max, info.smallest_normal * info.eps, -0.0
    with np.errstate(over="ignore", invalid="ignore"):
        made = column_sums(g, dtype, None, plan_of(16, 256))
    wanted = [torch.nan, torch.inf, torch.nan, torch.inf, 3 * info.smallest_normal * info.eps, 0.0]
    right = torch.tensor(wanted, dtype=dtype)
    if not torch.equal(made[:6].nan_to_num(7.0), right.nan_to_num(7.0)) or torch.signbit(made[5:]).any():
        raise ValueError(f"special numbers in {dtype}: {made[:6]}")
    print(f"special {dtype}")


def main() -> None:
    """Every case."""
    quick_interpreter.install()
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        special(dtype)
        for shape in SHAPES:
            for plan in planned(shape):
                integers = torch.randint(-8, 9, shape, generator=generator).to(dtype)
                exact = integers.double().reshape(-1, shape[-1]).sum(0)
                if not torch.equal(column_sums(integers, torch.float32, None, plan).double(), exact):
                    raise ValueError(f"integers {dtype} {shape}")
                g = torch.randn(shape, generator=generator).mul(1.5).exp().to(dtype)
                g *= torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(dtype)
                for out in dict.fromkeys((dtype, torch.float32, torch.bfloat16)):
                    compare(g, out, plan, f"{dtype} {shape} {out} {plan}")
    turned = torch.randn(512, 64, generator=generator).t()
    compare(turned, torch.float32, plan_of(64, 512), "a transpose")
    if column_sums(turned.double(), torch.float32) is not None:
        raise ValueError("float64 is torch's")
    print("agreed")


if __name__ == "__main__":
    main()
