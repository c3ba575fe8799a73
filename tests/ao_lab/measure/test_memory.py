"""Peak memory on a CPU: what earlier work has left to the allocator is not taken for free."""

import pytest
import torch

from ao_lab.measure.memory import Peak, resident

#: Elements of a block that glibc takes from its heap: 64 kB.
BLOCK = 16384


@pytest.mark.skipif(resident("VmHWM") is None, reason="Linux says what is resident")
def test_what_the_allocator_kept_of_earlier_work_counts():
    blocks = [torch.ones(BLOCK) for _ in range(1000)]
    last = torch.ones(64)  # behind them, so that the heap does not shrink by itself
    del blocks
    peak = Peak(torch.device("cpu"))
    peak.begin()
    held = [torch.ones(BLOCK) for _ in range(200)]
    over = peak.over()
    assert over is not None
    assert over >= 0.8 * sum(one.nbytes for one in held)
    assert last.numel() == 64
