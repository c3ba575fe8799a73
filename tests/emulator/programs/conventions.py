"""Records of other projects on ordinary blocks, by the sequences, and on all blocks, by the sequences or the general rules.

    TRITON_INTERPRET=1 python tests/emulator/programs/conventions.py PART/PARTS [NAME or DTYPE...]

Emulated as in `fast_codes`. Every record whose ordinary blocks go by a sequence (`scheme.ordinary_blocks`) is compared, in
every dtype for which it does: codes, packed codes, scales, zero points, and fake quantization. PART/PARTS: every PARTS-th
record, from the PART-th. It prints what agreed, one line each, and raises at the first difference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import triton

import reference
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.geometry import power_above
from fast.kernels.quantize.plan import first_level
from fast.kernels.scheme.constants import constants_of, is_two_level
from fast.kernels.scheme.fast_path_rules import bounds, has_zero_blocks, outer_bounds
from reference import SCHEMES, Scheme
from reference.arrays.torch_bridge import to_torch
from tests.emulator import ptx_interpreter
from tests.emulator.programs.fast_codes import compare, inputs, one_tile, two_tiles
from tests.gpu.harness.inputs import DTYPES, NUMPY, WIDTH, Array

#: Inputs that are tried of each record: edge blocks, and blocks at halves of steps and with all patterns of 16 bits.
KINDS = ("edges", "halfway", "patterns", "ladders", "normals", "sparse")


def codes_of(scheme: Scheme) -> Scheme:
    """The record that makes the codes: of scales that are quantized themselves, the one before that."""
    return first_level(scheme) if is_two_level(scheme) and scheme.codes_from == "exact" else scheme


def has_same(scheme: Scheme, dtype: str) -> bool:
    """Whether ordinary blocks of a record go by a sequence."""
    return bool(constants_of(codes_of(scheme), dtype).has_same)


def quotients(dtype: str, size: int) -> Array:
    """Blocks of all significands of 8 bits under all maxima of 8 bits, twelve binades and both signs."""
    top = np.arange(128)[:, None]
    rest = np.arange(12 * 128)
    count = -(-len(rest) // (size - 1))
    rest = np.resize(rest, count * (size - 1)).reshape(1, count, size - 1)
    below = (1 + rest % 128 / 128) * np.exp2(-(rest // 128)) * np.where(rest % 3, 1, -1)
    tops = np.broadcast_to((1 + top / 128)[:, :, None], (128, count, 1))
    # No element above the maximum.
    below = np.where(np.abs(below) > tops, below / 2, below)
    x = np.concatenate([tops, below], -1).reshape(128 * count, size)
    return (x * np.exp2(np.arange(len(x)) % 9 - 4)[:, None]).astype(NUMPY[dtype])


def ordinary(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The rows all of whose blocks are ordinary, as many as a power of two, and none where there are none."""
    least, most = bounds(codes_of(scheme), str(x.dtype).removeprefix("torch."))
    block = scheme.scale.block
    size = block if isinstance(block, int) and 0 < block < x.shape[1] else x.shape[1]
    largest = x.float().abs().reshape(len(x), -1, size).amax(-1)
    fit = (largest >= least) & (largest <= most)
    if has_zero_blocks(codes_of(scheme)):
        fit |= largest == 0
    rows = x[fit.all(-1) & x.isfinite().all(-1)]
    return rows[torch.arange(power_above(len(rows))) % max(len(rows), 1)] if len(rows) else rows


def has_ordinary_outer(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether the outer scale of a tensor is ordinary."""
    if scheme.outer is None or is_two_level(scheme):
        return True
    least, most = outer_bounds(scheme)
    return bool(least <= float(reference.choose_scales(x, scheme).outer) <= most)


def compare_record(scheme: Scheme, dtype: str) -> None:
    """Ordinary blocks, then all."""
    block = scheme.scale.block
    size = block if isinstance(block, int) and 0 < block <= WIDTH else WIDTH
    made: dict[str, Any] = {"quotients": to_torch(quotients(dtype, size).reshape(-1, WIDTH))}
    others = inputs(scheme, dtype, 0.02)
    made |= {label: x for label, x in others if label in KINDS}
    for label, x in made.items():
        # A scale over all elements takes passes in parts: one part.
        x = x[:: max(1, len(x) // 64)][:64] if scheme.outer is not None else x[: 1 << 11]
        rows = ordinary(x, scheme)
        if is_two_level(scheme) and len(rows) % 64:
            # Groups of 256 scales are whole.
            rows = rows[:0]
        if len(rows):
            if not has_ordinary_outer(rows, scheme):
                rows = ordinary(
                    rows[(rows.float().abs().amax(-1) < 1024) & (rows.float().abs().amax(-1) > 1e-3)], scheme
                )
            compare(rows, scheme)
        if label != "quotients":
            compare(x[:256], scheme)
        print(scheme.name, dtype, label, len(rows), flush=True)


def main(part: str, names: list[str]) -> None:
    """Compare some records."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    passes.geometry, passes._place = one_tile(passes.geometry), two_tiles(passes._place)
    first, every = map(int, part.split("/"))
    schemes = [name for name in names if name not in DTYPES]
    chosen = [s for s in SCHEMES.values() if not schemes or s.name in schemes]
    chosen = [s for s in chosen if any(has_same(s, dtype) for dtype in DTYPES)]
    with np.errstate(all="ignore"):
        for scheme in chosen[first::every]:
            for dtype in [d for d in DTYPES if d in names] or DTYPES:
                if has_same(scheme, dtype):
                    compare_record(scheme, dtype)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
