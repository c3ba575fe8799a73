"""Kernels for tokens sorted by expert in Triton's interpreter: which rows go where, which become zero, and words; and those of
`hadamard`, in one process.

TRITON_INTERPRET=1 python tests/emulator/programs/grouped.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import triton

import reference
from ao_lab.training.grouped import products
from ao_lab.training.grouped.layout import layout_of
from fast.kernels.encode.random_words import random_words
from fast.kernels.grouped import gather, zero
from fast.layers.gather import _gather
from tests.emulator import quick_interpreter
from tests.emulator.programs.training import hadamard

#: Ends of groups among rows: groups without rows at both ends and between, all rows in one, none at all, rows of no group.
CASES = (
    (90, (7, 7, 60, 83)),
    (90, (0, 90, 90, 90)),
    (90, (0, 0, 0)),
    (64, (64,)),
    (130, (1, 2, 3, 130)),
    (33, (0, 33)),
)
NAN = float("nan")


def compare_gather(rows: int, ends: torch.Tensor) -> None:
    """Bits of the columns, with NaN in rows of no group, for widths that fill tiles and that do not."""
    for width, step, dtype in ((64, 16, torch.bfloat16), (40, 32, torch.float32), (130, 16, torch.float16)):
        x = torch.randn(rows, width).to(dtype)
        x[int(ends[-1]) :] = NAN
        source = layout_of(ends, rows, step).source
        found = gather.gather_transposed(x, source)
        assert torch.equal(found, _gather(x, source))
        assert found.isfinite().all()


def compare_zeros(rows: int, ends: torch.Tensor) -> None:
    """What is written, and that the rest stays, for widths of one tile, of more and of a part."""
    for width, dtype in ((1024, torch.bfloat16), (1500, torch.float32), (3, torch.bfloat16)):
        y = torch.full((rows, width), NAN, dtype=dtype)
        wanted = products._with_zeros(y, ends, rows=True)
        zero.zero_tail_(y, ends)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.nan_to_num(1), wanted.nan_to_num(1))
    for size in ((40, 30), (150, 120)):
        dw = torch.full((ends.shape[0], *size), NAN)
        wanted = products._with_zeros(dw, ends, rows=False)
        zero.zero_empty_(dw, ends)
        assert torch.equal(dw.nan_to_num(1), wanted.nan_to_num(1))


def compare_words() -> None:
    """Random words of tiles and of parts of them, for seeds and streams of all lengths."""
    for count, seed, stream in (
        (7, 3, 0),
        (4291, 2**63 - 5, 4),
        (2048, 2**32 + 1, 2),
        (5, 2**64 - 1, 2**32 - 1),
    ):
        found = random_words((count,), seed, stream, torch.device("cpu"))
        wanted = torch.from_numpy(reference.random_bits(count, seed=seed, stream=stream))
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def main() -> None:
    """Compare all cases."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    for rows, ends in CASES:
        offsets = torch.tensor(ends, dtype=torch.int32)
        compare_gather(rows, offsets)
        compare_zeros(rows, offsets)
        print(rows, *ends, flush=True)
    compare_words()
    hadamard.compare_all()
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
