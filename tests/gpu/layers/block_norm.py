"""On a GPU: the FP8 product with block norm, hard swish and codes in its epilogue, bit for bit with the reference.

    PYTHONPATH=. python tests/gpu/layers/block_norm.py [--out FOLDER]

Cases of tests/support/block_norm.py, whose sums are exact: a line each, and rows in FOLDER/block_norm.csv (else $OUT); 1 where
bits differ. Its times are a part of the experiment: `ao-lab reproduce loka --scale full --only speed`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from tests.gpu.harness.lines import differs, on_gpu, say, write_rows
from tests.support.block_norm import CASES, operands


def bits() -> None:
    """Values that differ."""
    for case in CASES:
        _, activation, scheme, dtype, _ = case
        x, w, gain, bias = operands(case)
        options = {"activation": activation, "scheme": scheme or None, "dtype": dtype}
        expected = reference.linear_block_norm(x, w, gain, bias=bias, **options)
        found = fast.linear_block_norm(
            on_gpu(x), on_gpu(w), gain.cuda(), bias=None if bias is None else bias.cuda(), **options
        )
        pairs = (
            [(found.codes, expected.codes), (found.scale, expected.scale)] if scheme else [(found, expected)]
        )
        wrong = sum(int((one.cpu() != other).sum()) for one, other in pairs)
        say("bits", str(case), wrong, "differ")


def main() -> int:
    """All cases; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    try:
        bits()
    finally:
        write_rows("block_norm.csv", options.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
