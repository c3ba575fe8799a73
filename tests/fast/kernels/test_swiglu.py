"""The kernels of `fast.swiglu` without a GPU: all 65,536 gates in Triton's interpreter, and the code made for Hopper."""

import pytest

from fast.kernels.layers.swiglu import ELEMENTS, place_of, swiglu_kernel
from fast.kernels.quantize.plan import _block_length
from reference import SCHEMES
from tests.emulator.interpreter_process import printed_by
from tests.fast.kernels.compiling.compiled_kernels import compiled, output_arguments

# Issue slots for a byte at the rate of a copy on an H200: 132 multiprocessors, 4 slots a clock of 32 lanes, 4.28 TB/s.
SLOTS_PER_BYTE = 7


def swiglu_code(name, dtype):
    """Machine code for rows of 4096."""
    shape = (16384, 4096)
    block = None if name is None else _block_length(SCHEMES[name], shape)
    place = place_of(16384, max(ELEMENTS, block or 1), block, 4096)
    arguments = {"gate": dtype, "up": dtype, "gate_stride": 4096, "up_stride": 4096, **place.arguments,
                 **output_arguments(name, dtype)}  # fmt: skip
    return compiled(swiglu_kernel, arguments, place.warps), place


def test_bits_in_the_interpreter():
    """All gates of both dtypes with two kinds of up, with bad reciprocals; shapes, schemes, halves of a matrix; gradients."""
    (count,) = printed_by("tests/emulator/programs/producers.py", "swiglu")
    assert int(count) >= 37 + 49


@pytest.mark.parametrize(
    ("name", "dtype", "moved"), [(None, "bfloat16", 6), ("fp8_rowwise", "bfloat16", 5), (None, "float16", 6)]
)
def test_code_for_hopper(name, dtype, moved):
    """Wide loads and stores, nothing in local memory, and no more instructions than memory leaves time for."""
    machine, place = swiglu_code(name, dtype)
    assert machine.local == 0
    assert machine.widths("LDG") == {"128"}
    assert machine.widths("STG") <= {"128", "32"}
    # A twentieth more is allowed: the clock is above its nominal rate.
    assert machine.slots() <= 1.05 * SLOTS_PER_BYTE * moved * place.elements_per_thread
