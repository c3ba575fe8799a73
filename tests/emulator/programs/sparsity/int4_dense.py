"""The dense weight of 4-bit integers in 2:4 storage on CPU tensors against `reference.dequantize`, bit for bit.

    TRITON_INTERPRET=1 python tests/emulator/programs/sparsity/int4_dense.py

Prints what agreed, a line for each dtype and storage of scales; raises at the first difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import numpy as np
import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.triton_sparse24_small_m import host
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator import ptx_interpreter
from tests.gpu.sparsity.cases import as_tensors, random_case, zero_points

#: Programs that are not filled, filled and followed by another.
SHAPES = ((5, 96, 32), (16, 256, 256), (3, 4096, 128))


def compare(dtype: torch.dtype, storage: str) -> None:
    """Usual scales, and those that overflow, underflow and are not numbers, with zero points and without."""
    for rows, length, group in SHAPES:
        case = random_case(1, rows, length, group, storage=storage)
        _, codes, metadata, scale, _ = as_tensors(case)
        zeros = (None, torch.from_numpy(zero_points(case)))
        hard = torch.tensor([1e-40, 3e38, float("nan"), float("inf"), -1.0, 7e4]).to(scale.dtype)
        for given in (scale, hard[torch.arange(scale.numel()) % len(hard)].view(scale.shape)):
            for zero in zeros:
                made = host.sparse_int4_dense(codes, metadata, given, dtype, group, None, zero)
                w = sparse_int4_weight(codes, metadata, given, zero)
                assert_same_bits(made, reference.dequantize(w, str(dtype).removeprefix("torch.")))
    pattern = given.view(torch.uint16) if storage == "bfloat16" else given
    again = host.sparse_int4_dense(codes, metadata, pattern, dtype, group, None, zeros[1])
    assert_same_bits(again, made)


def main() -> None:
    """Compare all."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    with np.errstate(all="ignore"):
        for dtype in host.INPUTS:
            for storage in ("float32", "bfloat16"):
                compare(dtype, storage)
                print(dtype, storage, flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
