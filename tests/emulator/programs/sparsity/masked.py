"""Masked weights compressed in both directions, inline assembly included, on CPU tensors against `reference` and `arrange`.

    TRITON_INTERPRET=1 python tests/emulator/programs/sparsity/masked.py

Instructions are emulated (`ptx_interpreter`). Prints what agreed, a line for each dtype; raises at the first difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import triton

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sparse_mm.masked_host import compress_masked
from fast.sparsity.compress_masked import COMPRESS_MASKED, DTYPES
from tests.emulator import ptx_interpreter
from tests.gpu.sparsity.training.masked_weights import SHAPES, weights


def compare_full(w: torch.Tensor) -> None:
    """Of more than two the first two stay, which no product needs, but which is said."""
    first = torch.tensor([True, True, False, False] * (w.shape[1] // 4)).expand(w.shape)
    for one, other in zip(
        compress_masked(w, torch.ones_like(first), False),
        compress_masked(w, first.contiguous(), False),
        strict=True,
    ):
        assert_same_bits(one, other)


def main() -> None:
    """Install the emulator, and compare."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    for dtype in DTYPES:
        for shape in SHAPES[1:4]:
            for turned in (False, True):
                for w, mask in weights(shape, dtype, turned):
                    made = compress_masked(w, mask, turned)
                    for one, other in zip(
                        made, COMPRESS_MASKED.reference(None, (turned,), (w, mask)), strict=True
                    ):
                        assert_same_bits(one, other)
        compare_full(next(weights((16, 16), dtype, False))[0])
        print(dtype, flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
