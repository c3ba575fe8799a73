"""Masked weights in the kernel's order: the reference's bits under an emulator, and what they compile to for Hopper."""

import platform
from itertools import product

import pytest
import torch

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast import dispatch
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits
from fast.kernels.sm90_sparse24_gemm.masked import compress_masked, keep
from fast.sparsity import compress as public
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.kernels.compiling.kernel_samples import by_day, named


@pytest.mark.parametrize("dtype", by_day(public.DTYPES, lambda dtype: named(size=dtype.itemsize)))
def test_bits_are_those_of_the_reference(dtype):
    assert lines_of("sparsity", "masked", str(dtype)) == [str(dtype)]


@pytest.mark.parametrize(
    ("shape", "turned", "marks"),
    by_day(
        product([(1024, 1024), (16, 48)], [False, True], ["bool", "bits"]),
        lambda case: [("whole and turned", case[:2]), ("turned by", case[1:])],
    ),
)
def test_nothing_leaves_a_thread(shape, turned, marks):
    """No stack and no shared memory; octets are read whole."""
    w = torch.zeros(shape, dtype=torch.float16)
    mask = w != 0 if marks == "bool" else pack_bits(w != 0)
    (machine,) = launched(lambda: compress_masked(w, mask, turned))
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    assert machine.registers <= 80
    assert machine.accesses("LDG") == {16: 8, 8 if marks == "bool" else 1: 8}
    assert machine.accesses("STG") == {8: 8, 1: 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_weights_by_bits_move_wide(dtype):
    """16 bytes at once in both directions, in place too; of the bits each thread reads its own once."""
    w = torch.zeros(1024, 1024, dtype=dtype)
    for out in (None, w):
        (machine,) = launched(lambda out=out: keep(w, pack_bits(w != 0), out))
        assert (machine.local, machine.stack) == (0, 0)
        wide = machine.elements * dtype.itemsize / 16
        assert machine.accesses("STG") == {16: wide}
        assert machine.accesses("LDG")[16] == wide
        assert sum(machine.accesses("LDG").values()) == wide + 1


def test_the_function_reaches_the_kernel(monkeypatch):
    """Results have the shapes of a product's operands: values, and metadata filled up to 64 rows and 128 columns."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w = torch.zeros(80, 144, dtype=torch.bfloat16)
    shapes = []

    def both():
        for mask in (w != 0, pack_bits(w != 0)):
            for turned in (False, True):
                shapes.append([tuple(part.shape) for part in public.compress_masked(w, mask, turned)])
        return shapes

    assert [machine.kernel for machine in launched(both)] == 4 * ["masked_kernel"]
    assert shapes == 2 * [[(80, 72), (2, 4, 512)], [(144, 40), (3, 2, 512)]]
