"""Values and codes of both axes from one read, inline assembly included, on CPU tensors against `reference`, bit for bit.

    TRITON_INTERPRET=1 python tests/emulator/programs/training/values.py [day | SCHEME ...]

day: each scheme in one dtype, the next one in the other.

Instructions are emulated (`ptx_interpreter`). Edge blocks, neighbours of every tie and patterns of 16 bits lie along rows, and
then along columns; programs of the size that runs are tried on a matrix that they do not fill.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import numpy as np
import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels import both_axes
from reference import SCHEMES, Scheme
from tests.emulator import ptx_interpreter
from tests.emulator.programs import fast_codes

#: Every element, and every rule that training uses.
NAMES = ("mxfp8_e4m3_rceil", "mxfp8_e5m2", "mxfp6_e2m3_rceil", "mxfp6_e3m2", "mxfp4_rceil")
DTYPES = ("bfloat16", "float16")
#: Columns of a program: few operations of the interpreter on many elements.
WIDE = 1 << 14


def compare(x: torch.Tensor, scheme: Scheme) -> None:
    """Both outputs of both calls."""
    assert both_axes.covers(x, scheme)
    along = [reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0)]
    for made, wanted in zip(both_axes.both_values(x, scheme), along, strict=True):
        assert_same_bits(made, wanted)
    values, q = both_axes.values_and_codes(x, scheme)
    assert_same_bits(values, along[0])
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))


def compare_blocks(scheme: Scheme, dtype: str) -> None:
    """Blocks that are hard to quantize, a strip of them along rows and one along columns."""
    made = [x.reshape(-1, 32) for _, x in fast_codes.inputs(scheme, dtype, 0.1)]
    blocks = torch.cat(made)
    blocks = torch.cat([blocks, blocks[: -len(blocks) % (WIDE // 32 * 32)]])
    with mock.patch.object(both_axes, "COLUMNS", WIDE):
        compare(blocks.reshape(32, -1), scheme)
        compare(blocks.t().contiguous(), scheme)


def compare_places(scheme: Scheme, dtype: str) -> None:
    """Programs as they run: some not filled, one alone."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((96, 160), (32, 32), (64, 128)):
        x, spread = (torch.randn(shape, generator=generator) for _ in range(2))
        compare((x * torch.exp(3 * spread)).to(getattr(torch, dtype)), scheme)


def compare_all(names: tuple[str, ...] = NAMES, by_day: bool = False) -> None:
    """Compare some schemes, a line for each and a dtype."""
    with mock.patch.object(both_axes, "interpreted", return_value=False):
        for at, name in enumerate(names):
            for dtype in DTYPES[at % 2 :][:1] if by_day else DTYPES:
                compare_blocks(SCHEMES[name], dtype)
                print(name, dtype, "both axes", flush=True)
        for dtype in ("bfloat16", "float16"):
            compare_places(SCHEMES[names[0]], dtype)
            print(dtype, "places", flush=True)


def main(names: tuple[str, ...]) -> None:
    """Install the emulator, and compare."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    with np.errstate(all="ignore"):
        by_day = names == ("day",)
        compare_all(NAMES if by_day else names or NAMES, by_day)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
