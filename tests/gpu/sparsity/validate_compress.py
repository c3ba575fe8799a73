"""On a GPU: the kernels of 2:4 bit for bit, then their times beside a copy of the same bytes; see `frame`.

    PYTHONPATH=. python tests/gpu/sparsity/validate_compress.py [--device cpu] [--fraction 1]

Graphs of `compress` without "2:4" leave out that the host waits for one number, which no graph can hold. Exits with 1 on any
difference.
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


def calls(shape: tuple[int, int]) -> Calls:
    """What is timed."""

    def dense(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.randn(shape, device="cuda").to(dtype)

    def sparse(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: (lambda w: (w * fast.prune(w)).to(dtype))(torch.randn(shape, device="cuda"))

    def stored(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: fast.compress(sparse(dtype)())

    scale = torch.full((shape[0], 1), 0.01, device="cuda")
    return {
        "compress bf16 2:4": (dense(torch.bfloat16), lambda w: fast.compress(w, "2:4"), 3.125),
        "compress bf16": (sparse(torch.bfloat16), fast.compress, 3.125),
        "compress e4m3": (sparse(torch.float8_e4m3fn), fast.compress, 1.625),
        "compress int8 2:4": (
            lambda: torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8),
            lambda w: fast.compress(w, "2:4"),
            1.625,
        ),
        "compress float32 2:4": (dense(torch.float32), lambda w: fast.compress(w, "2:4"), 6.125),
        "quantize_compressed bf16": (
            dense(torch.bfloat16),
            lambda w: fast.quantize_compressed(w, "fp8_rowwise", scale),
            2.625,
        ),
        "prune bf16": (dense(torch.bfloat16), fast.prune, 3.0),
        **{
            f"prune bf16 {pattern}": (
                dense(torch.bfloat16),
                lambda w, pattern=pattern: fast.prune(w, pattern=pattern),
                3.0,
            )
            for pattern in ("1:4", "4:8", "8:16", "1:2")
        },
        "prune float32 4:8": (dense(torch.float32), lambda w: fast.prune(w, pattern="4:8"), 5.0),
        "decompress bf16": (stored(torch.bfloat16), lambda c: fast.decompress(*c), 3.125),
        "decompress e4m3": (stored(torch.float8_e4m3fn), lambda c: fast.decompress(*c), 1.625),
    }


if __name__ == "__main__":
    raise SystemExit(command(__doc__, sparsity.jobs, calls))
