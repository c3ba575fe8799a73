"""The kernels of `fast.layers.normalize` without a GPU: their bits in Triton's interpreter, and the code made for Hopper."""

import pytest

from fast.kernels.layers.rms_norm import _whole_rows, norm_kernel
from fast.kernels.quantize.plan import _block_length
from reference import SCHEMES
from tests.emulator.interpreter_process import printed_by
from tests.fast.kernels.compiling.compiled_kernels import compiled, output_arguments


def norm_code(name, length, residual):
    """Machine code for bfloat16 rows of a length."""
    shape = (16384, length)
    place = _whole_rows(*shape, length if name is None else _block_length(SCHEMES[name], shape))
    dtype = "bfloat16"
    other = dtype if residual else None
    arguments = {"x": dtype, "residual": other, "weight": dtype, "new_residual": other, "sums": None, "eps": 1e-6,
                 **place.arguments, **output_arguments(name, dtype), "SUMS": 0}  # fmt: skip
    return compiled(norm_kernel, arguments, place.warps), place


def test_bits_in_the_interpreter():
    """Many tensors: dtypes, shapes, schemes, residuals, packed codes, non-finite rows."""
    (count,) = printed_by("tests/emulator/programs/producers.py", "normalize")
    assert int(count) > 100


@pytest.mark.parametrize(("name", "length", "residual"), [(None, 4096, False), ("fp8_rowwise", 14336, True)])
def test_code_for_hopper(name, length, residual):
    """Wide loads and stores, nothing in local memory, two programs of the longest rows on a multiprocessor."""
    machine, place = norm_code(name, length, residual)
    assert machine.local == 0
    assert machine.widths("LDG") == {"128"}
    assert machine.widths("STG") <= {"128", "32"}
    assert machine.registers * place.warps * 32 * 2 <= 65536


def test_sums_are_not_contracted():
    """Every square is rounded before it is added."""
    machine, place = norm_code(None, 4096, False)
    squares = place.size // (32 * place.warps)
    assert machine.instructions["FMUL"] >= 3 * squares
    assert machine.ptx.count("fma.rn") == 0
