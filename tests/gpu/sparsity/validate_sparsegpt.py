"""On a GPU: `fast.sparsegpt` against the reference, then its times at the sizes of layers of Llama-3.1-8B.

    PYTHONPATH=. python tests/gpu/sparsity/validate_sparsegpt.py [--device cpu] [--quick]

Exact sums first (integers within a unit triangular factor): bits are the reference's. Then a usual Hessian: masks and weights
that differ are counted, and the loss; rounding alone decides these, so only more than one weight in 10,000 is a failure. Times
are those of one call after another of the same shape. Exits with 1 on any difference that is none of rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import reference
from fast.sparsity.sparsegpt import sparsegpt_on_device
from reference.arrays.torch_bridge import to_numpy, to_torch
from tests.gpu.sparsity.frame import say

#: Outputs and inputs.
TIMED = ((4096, 4096), (4096, 14336))
#: Share of weights that may differ where sums are rounded in another order.
FEW = 1e-4
OPTIONS = {"pattern": "2:4", "block": 128}


def exact(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of small integers and a Hessian whose factors are integers."""
    rng = np.random.default_rng(1)
    upper = np.eye(columns)
    upper[np.arange(columns - 1), np.arange(1, columns)] = rng.integers(-1, 2, columns - 1) * (
        np.arange(columns - 1) % 8 != 7
    )
    inverse = np.linalg.inv(upper).round()
    w = torch.from_numpy(rng.integers(-8, 9, (rows, columns)).astype(np.float32))
    return w, torch.from_numpy(inverse @ inverse.T)


def usual(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights, and inputs that depend on each other."""
    torch.manual_seed(2)
    x = torch.randn(2 * columns, columns, device=device)
    x = x + x.roll(1, 1) * 0.5 + torch.randn(2 * columns, 1, device=device)
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16), x.T @ x


def differing(w: torch.Tensor, hessian: torch.Tensor, damping: float, device: str) -> float:
    """The share of weights or elements of the mask that are not the reference's."""
    wanted = reference.sparsegpt(to_numpy(w.cpu()), hessian.cpu().numpy(), damping=damping, **OPTIONS)
    made = sparsegpt_on_device(w.to(device), hessian.to(device), damping=damping, **OPTIONS)
    other = (made.weights.cpu() != to_torch(wanted.weights)) | (made.mask.cpu() != to_torch(wanted.mask))
    share = float(other.double().mean())
    say(
        f"{tuple(w.shape)} {w.dtype} damping {damping}: {share:.2e} of weights differ, loss {made.loss} {wanted.loss}"
    )
    return share


def timed(rows: int, columns: int, device: str) -> None:
    """Seconds of two calls."""
    w, hessian = usual(rows, columns, device)
    for call in ("first", "again"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = sparsegpt_on_device(w, hessian, damping=0.01, **OPTIONS)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() / 2**30
        say(f"{rows}x{columns} 2:4 {call}: {took:.2f} s, {memory:.1f} GiB at most, loss {made.loss:.6g}")


def main() -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = 256 if options.quick else 1024
    wrong = differing(*exact(64, size), 0.0, options.device) > 0
    wrong |= differing(*usual(256, size, "cpu"), 0.01, options.device) > FEW
    say("agreed" if not wrong else "differences")
    if options.device == "cuda":
        say(torch.cuda.get_device_name())
        for shape in TIMED:
            timed(*shape, options.device)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
