"""On a GPU: transposable masks and both compressed orientations bit for bit, then their times beside a copy; see `frame`.

    PYTHONPATH=. python tests/gpu/sparsity/validate_transposable.py [--device cpu] [--fraction 1] [--seconds 45]
        [--times 30]

The last times are those of inputs with an infinity in every thousandth element, which nearly every warp then reads again.
Exits with 1 on any difference, with 2 where not all was compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from tests.gpu.kernels import sparsity
from tests.gpu.sparsity.frame import Calls, command

#: Bytes of metadata of an element in both orientations; its values are read once, and half of them written twice.
METADATA = 0.25


def calls(shape: tuple[int, int]) -> Calls:
    """What is timed."""

    def dense(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.randn(shape, device="cuda").to(dtype)

    def infinite() -> Any:
        w = torch.randn(shape, device="cuda").bfloat16()
        w.view(-1)[::1000] = torch.inf
        return w

    made: Calls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
        made[f"prune_transposable {name}"] = (dense(dtype), fast.prune_transposable, size + 1.0)
        made[f"compress_transposable {name}"] = (
            dense(dtype),
            fast.compress_transposable,
            2.0 * size + METADATA,
        )
    made["compress_transposable bfloat16 with infinities"] = (
        infinite,
        fast.compress_transposable,
        4.0 + METADATA,
    )
    return made


if __name__ == "__main__":
    raise SystemExit(command(__doc__, sparsity.tile_jobs, calls))
