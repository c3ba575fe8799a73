"""Transposable masks and both compressed orientations, inline assembly included, on CPU tensors against `reference`.

    TRITON_INTERPRET=1 python tests/emulator/programs/sparsity/transposable.py [day]

day: of float16 and float32, which have keys of their own, arbitrary bits and infinite scores alone.
Instructions are emulated (`ptx_interpreter`). Prints what agreed, a line for each dtype; raises at the first difference.
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
from fast.kernels.sm90_sparse24_gemm.bits import pack_bits, packed_shape
from fast.kernels.sparsity import transposable as host
from tests.emulator import ptx_interpreter
from tests.gpu.kernels.sparsity import KINDS, TILE_SHAPES, tiles


def compare(w: torch.Tensor) -> None:
    """The mask, and of matrices both orientations."""
    mask = host.prune_transposable(w, None, "exact")
    assert_same_bits(mask, reference.prune_transposable(w))
    out = torch.rand(w.shape) < 0.5
    assert host.prune_transposable(w, None, "exact", None, out) is out
    assert_same_bits(out, mask)
    bits = torch.randint(0, 256, packed_shape(w.shape), dtype=torch.uint8)
    assert host.prune_transposable(w, None, "exact", None, bits) is bits
    assert_same_bits(bits, pack_bits(mask))
    made = host.compress_transposable(w)
    if w.dim() != 2:
        assert made is None
        return
    assert made is not None
    for pair, wanted in zip(made, reference.compress_transposable(w), strict=True):
        for one, other in zip(pair, wanted, strict=True):
            assert_same_bits(one, other)


def compare_scores(dtype: torch.dtype) -> None:
    """Of w only the shape matters; one infinity sends all of a program to the careful keys."""
    scores = tiles(dtype, (64, 128), "normal")
    for place in (0, 8 * 128 - 1):
        scores.view(-1)[place] = torch.inf
        mask = host.prune_transposable(torch.zeros(64, 128), scores, "exact")
        assert_same_bits(mask, reference.prune_transposable(scores))


def main(by_day: bool) -> None:
    """Install the emulator, and compare."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    with np.errstate(all="ignore"):
        for dtype in host.FLOATS:
            few = by_day and dtype != torch.bfloat16
            for kind in KINDS[:1] if few else KINDS:
                compare(tiles(dtype, (32, 64), kind))
            for shape in () if few else TILE_SHAPES["cut"][:3]:
                compare(tiles(dtype, shape, "patterns"))
            compare_scores(dtype)
            print(dtype, "tiles", flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["day"])
