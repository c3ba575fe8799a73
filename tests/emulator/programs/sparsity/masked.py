"""Masked weights as they are and compressed in both directions, inline assembly included, on CPU tensors against `reference`.

    TRITON_INTERPRET=1 python tests/emulator/programs/sparsity/masked.py [DTYPE]

Instructions are emulated (`ptx_interpreter`). Prints what agreed, a line for each dtype; raises at the first difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import triton

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_gemm.bits import pack_bits
from fast.kernels.sm90_sparse24_gemm.masked import compress_masked, keep
from fast.sparsity.compress import COMPRESS_MASKED, DTYPES
from tests.emulator import ptx_interpreter
from tests.gpu.sparsity.cases import MASKED_SHAPES, masked_weights


def compare_full(w: torch.Tensor) -> None:
    """Of more than two the first two stay, which no product needs, but which is said."""
    first = torch.tensor([True, True, False, False] * (w.shape[1] // 4)).expand(w.shape)
    for one, other in zip(
        compress_masked(w, torch.ones_like(first), False),
        compress_masked(w, first.contiguous(), False),
        strict=True,
    ):
        assert_same_bits(one, other)


def compare_kept(dtype: torch.dtype) -> None:
    """The same bits or +0, also of 32 bits and in place; whole programs and one that is cut."""
    for shape in ((64, 64), (24, 104)):
        for w, mask in masked_weights(shape, dtype, False):
            for given in (w, w.float()):
                right = torch.where(mask, given, 0)
                assert_same_bits(keep(given, pack_bits(mask), None), right)
                own = given.clone()
                assert keep(own, pack_bits(mask), own) is own
                assert_same_bits(own, right)


def main() -> None:
    """Install the emulator, and compare."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    for dtype in DTYPES:
        if sys.argv[1:] not in ([], [str(dtype)]):
            continue
        for shape in MASKED_SHAPES[1:4]:
            for turned in (False, True):
                for w, mask in masked_weights(shape, dtype, turned):
                    wanted = COMPRESS_MASKED.reference(None, (turned,), (w, mask))
                    for given in (mask, pack_bits(mask)):
                        for one, other in zip(compress_masked(w, given, turned), wanted, strict=True):
                            assert_same_bits(one, other)
        compare_kept(dtype)
        compare_full(next(masked_weights((16, 16), dtype, False))[0])
        print(dtype, flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
