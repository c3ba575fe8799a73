"""Notes of blocks that reach beyond the codes, and gradients masked by them, in Triton's interpreter, bit for bit.

    TRITON_INTERPRET=1 python tests/emulator/programs/saturation.py places | sequences

Programs like `interpreted_gradients` (every place of blocks, by the rules of any record) and like `interpreted_hot` (by the
instruction sequences of a GPU, emulated). Numbers are such that ends of ranges lie half way between codes, among others.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import triton

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.quantize import host as clipping
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.host import problem_of
from reference import SCHEMES, Scheme
from reference.arrays.torch_bridge import to_torch
from tests.emulator import ptx_interpreter, quick_interpreter
from tests.emulator.programs.fast_codes import halfway, inputs, one_tile
from tests.emulator.programs.gradients import gradient_of
from tests.emulator.programs.kernels import numbers

# (scheme, fields of its scale, shape, axis).
PLACES = (
    ("int8_rowwise_asymmetric", {}, (3, 77), -1),
    ("int8_rowwise_asymmetric", {}, (70, 5), 0),
    ("int4_g32_asymmetric", {}, (66, 64), -1),
    ("int4_g32_asymmetric", {}, (64, 3), 0),
    ("int4_g32_asymmetric", {"partial": True}, (3, 45), -1),
    ("int4_g32_asymmetric", {"block": (16, 32), "partial": True}, (33, 70), 0),
    ("int4_g128_asymmetric", {}, (64, 128), -1),
)
SEQUENCES = (
    "int4_g32_asymmetric",
    "int4_g128_asymmetric",
    "int8_g64_asymmetric",
    "int8_rowwise_asymmetric",
)
#: Of which no notes are made: no zero point, one that is a number, other rules, rows in parts.
WITHOUT = (
    ("int8_rowwise", (3, 64)),
    ("mxfp4", (3, 64)),
    ("nvfp4", (3, 64)),
    ("torchao.int4_g32_tinygemm", (3, 64)),
    ("torchao.int4_g32_asymmetric", (3, 64)),
    ("int8_rowwise_asymmetric", (2, 40000)),
)


def compare(x: torch.Tensor, scheme: Scheme, axis: int) -> int:
    """Values as without notes, notes, and masked gradients; how many blocks are noted."""
    found = clipping.noted(x, scheme, axis)
    assert found is not None
    y, notes = found
    assert_same_bits(y, quantizer.fake_quantize(x, scheme, axis, None))
    g = gradient_of(x, "special")
    dx, _, _ = reference.fake_quantize_vjp(g, x, scheme, axis=axis)
    lost = reference.fake_quantize_vjp(torch.ones_like(g), x, scheme, axis=axis)[0] == 0
    mine = g.clone()
    assert clipping.clip(mine, x, notes, scheme, axis) is mine
    assert_same_bits(mine, torch.where(lost, torch.zeros_like(g), g))
    assert_same_bits(mine.nan_to_num(7.0), dx.nan_to_num(7.0))
    assert int(notes.max()) <= 1
    assert bool(notes.any()) == bool(lost.any()), "blocks are noted that lose nothing, or the other way round"
    # Without notes nothing is touched, whatever lies beyond the codes.
    untouched = g.clone()
    assert_same_bits(clipping.clip(untouched, x, torch.zeros_like(notes), scheme, axis), g)
    return int(notes.sum())


def compare_place(name: str, fields: dict, shape: tuple[int, ...], axis: int) -> None:
    """Ordinary numbers with NaN and infinities, and ranges whose ends are halfway between codes."""
    scheme = SCHEMES[name]
    scheme = replace(scheme, name=f"{name} {fields}", scale=replace(scheme.scale, **fields))
    noted = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = numbers(shape, dtype, specials=True)
        compare(x, scheme, axis)
        # As far below zero as above: halfway between the codes on both sides, in many blocks.
        pairs = torch.where(torch.arange(x.numel()).reshape(shape) % 2 == 0, 1.0, -1.0).to(dtype)
        noted += compare(pairs * numbers(shape, dtype).abs().amax(), scheme, axis)
    assert noted
    print(name, *fields.values(), "x".join(map(str, shape)), axis, flush=True)


def compare_sequences(name: str) -> None:
    """Inputs of the instruction sequences."""
    scheme = SCHEMES[name]
    noted = 0
    for dtype in ("float32", "bfloat16", "float16"):
        tried = [x for label, x in inputs(scheme, dtype, 0.02) if label != "patterns"]
        block = scheme.scale.block
        size = block if isinstance(block, int) and block > 0 else 256
        noted += sum(compare(x, scheme, -1) for x in (*tried, to_torch(halfway(scheme, dtype, size))))
        of = problem_of(tried[0], scheme, -1)
        assert of is not None
        assert of.rule.ranged, "not by the sequences"
        print(name, dtype, flush=True)
    assert noted


def compare_without() -> None:
    """Nothing is noted where the rule does not hold."""
    for name, shape in WITHOUT:
        assert clipping.noted(numbers(shape, torch.bfloat16), name, -1) is None
    print("without notes", flush=True)


def main(group: str) -> None:
    """Compare one group."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    if group == "places":
        for case in PLACES:
            compare_place(*case)
        compare_without()
    else:
        ptx_interpreter.install()
        passes.geometry, passes.MASK_TILE = one_tile(passes.geometry), 1 << 14
        with np.errstate(all="ignore"):
            for name in SEQUENCES:
                compare_sequences(name)
    print("agreed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
