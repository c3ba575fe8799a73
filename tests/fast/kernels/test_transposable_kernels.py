"""Transposable masks: the reference's bits under an emulator of their instructions, and what they compile to for Hopper."""

import platform

import pytest
import torch

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import fast
from fast import dispatch
from fast.kernels.sparsity import transposable as host
from tests.fast.kernels.compiling.kernel_compiler import launched


def dense(dtype, shape=(1024, 1024)):
    return torch.zeros(shape).to(dtype)


#: Calls, and the most instructions of a tile on the way without NaN and infinities; see `transposable` for the time there is.
HOT = {
    "mask bf16": (lambda: host.prune_transposable(dense(torch.bfloat16), None, "exact"), 365),
    "both bf16": (lambda: host.compress_transposable(dense(torch.bfloat16)), 465),
    "both float32": (lambda: host.compress_transposable(dense(torch.float32)), 500),
}


@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_bits_are_those_of_the_reference(part):
    lines = lines_of("sparsity", "transposable", *part.split())
    assert len(lines) == len(host.FLOATS)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.nightly] * one.startswith("both")) for one in HOT]
)
def test_nothing_leaves_a_thread(name):
    """No stack, no shared memory, no exchange but one maximum over a warp; twelve warps of a multiprocessor."""
    call, most = HOT[name]
    (machine,) = launched(call)
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    assert machine.registers <= host.REGISTERS
    assert machine.named("REDUX") == 1
    assert set(machine.accesses("LDG")) == {16}
    # What is skipped lies between the first branch after the maximum and the next.
    order = [each.split(".")[0] for each in machine.order if each != "NOP"]
    first = order.index("BRA", order.index("REDUX"))
    skipped = order.index("BRA", first + 1) - first
    assert skipped > 800
    assert len(order) - skipped <= most * machine.elements / 16


@pytest.mark.nightly
def test_edges_stay_in_registers():
    (machine,) = launched(lambda: host.compress_transposable(dense(torch.bfloat16, (8, 24))))
    assert (machine.local, machine.stack) == (0, 0)


def test_what_the_reference_does():
    """Greedy masks, lengths that eight does not divide, other dtypes and shapes, batches in both orientations, nothing."""
    w = dense(torch.bfloat16, (64, 64))
    for given in ((w, None, "greedy"), (w[:12], None, "exact"), (w[:, :12], None, "exact"), (w.double(), None, "exact"),
                  (w, w[:8], "exact"), (w[0], None, "exact"), (w[:0], None, "exact"), (w, w.double(), "exact")):  # fmt: skip
        assert host.prune_transposable(*given) is None
    for given in (w[None], w[:12], w.double(), w[:0]):
        assert host.compress_transposable(given) is None


def test_calls_are_remembered(monkeypatch):
    """The public functions reach the kernel, and their results have the shapes of both orientations."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)

    def both():
        made = fast.compress_transposable(dense(torch.bfloat16))
        shapes = [tuple(part.shape) for pair in made for part in pair]
        assert shapes == 2 * [(1024, 512), (1024, 128)]
        return fast.prune_transposable(dense(torch.bfloat16))

    assert [machine.kernel for machine in launched(both)] == 2 * ["transposable_kernel"]
