"""Masked weights in the kernel's order: the reference's bits under an emulator, and what they compile to for Hopper."""

import platform

import pytest
import torch

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast import dispatch
from fast.kernels.sparse_mm.masked_host import compress_masked
from fast.sparsity import compress_masked as public
from tests.fast.kernels.compiling.kernel_compiler import launched


def test_bits_are_those_of_the_reference():
    assert len(lines_of("tests/emulator/programs/sparsity/masked.py")) == len(public.DTYPES)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1024, 1024), (16, 48)], ids=["whole", "padded"])
def test_nothing_leaves_a_thread(shape, turned):
    """No stack and no shared memory; octets are read whole."""
    w = torch.zeros(shape, dtype=torch.float16)
    (machine,) = launched(lambda: compress_masked(w, w != 0, turned))
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    assert machine.registers <= 80
    assert machine.accesses("LDG") == {16: 8, 8: 8}
    assert machine.accesses("STG") == {8: 8, 1: 8}


def test_the_function_reaches_the_kernel(monkeypatch):
    """Results have the shapes of a product's operands: values, and metadata filled up to 64 rows and 128 columns."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w = torch.zeros(80, 144, dtype=torch.bfloat16)
    shapes = []

    def both():
        for turned in (False, True):
            shapes.append([tuple(part.shape) for part in public.compress_masked(w, w != 0, turned)])
        return shapes

    assert [machine.kernel for machine in launched(both)] == 2 * ["masked_kernel"]
    assert shapes == [[(80, 72), (2, 4, 512)], [(144, 40), (3, 2, 512)]]
