"""The kernels of `fast.layers.gradients` and `fast.layers.rotary`: their code for Hopper; `test_swiglu` compares their bits."""

import pytest

from fast.kernels.layers.rms_norm_gradient import PIECE, add_pieces_kernel, norm_gradient_kernel
from fast.kernels.layers.rotary import rotary_kernel
from fast.kernels.layers.swiglu import place_of
from fast.kernels.layers.swiglu_gradient import swiglu_gradient_kernel
from tests.fast.kernels.compiling.compiled_kernels import compiled
from tests.fast.kernels.test_swiglu import SLOTS_PER_BYTE

BF16 = "bfloat16"


def norm_code(length, warps):
    """Machine code of the gradient for bfloat16 rows."""
    arguments = dict.fromkeys(("g", "x", "weight", "dx"), BF16)
    numbers = {"more": None, "sums": "float32", "eps": 1e-6, "rows": 16384, "length": length, "DTYPE": BF16}
    constants = {
        "MASKED": False,
        "WIDE": False,
        "SIZE": length,
        "PIECE": PIECE,
        "EARLY": True,
        "HAS_PTX": True,
    }
    return compiled(norm_gradient_kernel, {**arguments, **numbers, **constants}, warps)


@pytest.mark.parametrize(("length", "warps"), [(4096, 8), pytest.param(8192, 16, marks=pytest.mark.nightly)])
def test_rows_stay_in_registers(length, warps):
    """Wide loads and stores, nothing in local memory, no product added unrounded; two programs of 4096 on a multiprocessor."""
    machine = norm_code(length, warps)
    assert machine.local == 0
    assert machine.ptx.count("fma.rn") == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
    assert machine.registers * 32 * warps <= 65536 * length // 8192


def test_sums_of_pieces():
    arguments = {"sums": "float32", "out": BF16, "parts": 1024, "length": 4096, "column_tiles": 256}
    constants = {"DTYPE": BF16, "WIDE": False, "PARTS": 512, "COLUMNS": 16, "HAS_PTX": False}
    assert compiled(add_pieces_kernel, arguments | constants, 4).local == 0


def test_swiglu_keeps_up_with_memory():
    """As `test_swiglu` says; five tensors of 2 bytes are moved."""
    place = place_of(16384, 4096, None, 4096)
    tensors = dict.fromkeys(("g", "gate", "up", "dgate", "dup"), BF16)
    strides = {"gate_stride": 4096, "up_stride": 4096, "DTYPE": BF16, "HAS_PTX": True}
    machine = compiled(swiglu_gradient_kernel, {**tensors, **strides, **place.arguments}, place.warps)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
    assert machine.slots() <= 1.05 * SLOTS_PER_BYTE * 10 * place.elements_per_thread


def test_rotary_moves_wide_words():
    strides = {
        "batch_stride": 8192 * 4096,
        "head_stride": 128,
        "stride": 4096,
        "cosine_batch": 0,
        "sine_batch": 0,
    }
    sizes = {"cosine_stride": 128, "sine_stride": 128, "length": 8192, "heads": 32, "width": 128, "tiles": 1}
    constants = {"INVERSE": True, "DTYPE": BF16, "WIDE": False, "HEADS": 32, "HALF": 64, "HAS_PTX": True}
    tensors = dict.fromkeys(("x", "cosine", "sine", "y"), BF16)
    machine = compiled(rotary_kernel, tensors | strides | sizes | constants, 8)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
