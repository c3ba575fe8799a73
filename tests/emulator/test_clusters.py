"""Clusters that run at the same time in the emulator of a device: what one has written another sees, by a mark."""

import numpy as np
import pytest

from fast.kernels.hopper import nvrtc
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import Memory
from tests.fast.kernels.sparse_mm.examples import require_nvrtc

THREADS = 128
#: The second program gives numbers to the first one, behind a mark.
SOURCE = """
struct Given { int* numbers; unsigned* mark; int* found; };
extern "C" __global__ __launch_bounds__(128, 1) void given(const __grid_constant__ Given p) {
  const int thread = threadIdx.x;
  if (blockIdx.x == 1) {
    p.numbers[thread] = 1 + thread;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.mark), "r"(1) : "memory");
    return;
  }
  if (thread == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.mark) : "memory");
    while (seen == 0);
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  p.found[thread] = *reinterpret_cast<volatile int*>(p.numbers + thread);
}
"""
BARRIER = 'asm volatile("bar.sync 1, 128;" ::: "memory");'
#: Without the barrier of the one that writes, and of the one that reads.
FAULTS = {
    "the mark is set before all have written": SOURCE.replace(BARRIER, "", 1),
    "numbers are read before all know of them": BARRIER.join(SOURCE.split(BARRIER)[:2]) + SOURCE.split(BARRIER)[2],
}  # fmt: skip


def found(source, seed, at_once=2):
    """What the first program reads."""
    require_nvrtc()
    ptx = nvrtc.compile_source(source, {}, ("--gpu-architecture=sm_90a",), ptx=True)[0].decode().rstrip("\0")
    memory, arrays = Memory(), [np.zeros(4 * THREADS, np.uint8) for _ in range(3)]
    arguments = [np.array([memory.give(one) for one in arrays], np.int64).view(np.uint8)]
    machine = Machine(ptx, memory, arguments, {}, threads=THREADS, shared=0, early=True, seed=seed)
    machine.run(2, 1, at_once)
    return arrays[2].view(np.int32).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_waits_for_another(seed):
    assert found(SOURCE, seed) == list(range(1, THREADS + 1))


@pytest.mark.parametrize("fault", FAULTS)
def test_races_are_seen(fault):
    """Slow warps see to it that some seed shows them."""
    assert any(found(FAULTS[fault], seed) != list(range(1, THREADS + 1)) for seed in range(6))


def test_one_after_the_other_it_waits_for_ever():
    with pytest.raises(RuntimeError, match="no thread can go on"):
        found(SOURCE, 0, at_once=1)
