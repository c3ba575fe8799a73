"""Where a program puts its buffers."""

from itertools import pairwise
from math import prod

import pytest
import torch

from fast.launch.program import APART, allocations

CODES, SCALE, Y = ((5, 48), torch.uint8, ()), ((5, 1), torch.float32, ()), ((5, 3), torch.bfloat16, ())
LARGEST = ((), torch.int32, (0,))
CASES = {
    "one": ([Y], (0,)),
    "codes and scales": ([CODES, SCALE, Y], (2,)),
    "one start": ([LARGEST, CODES, SCALE, Y], (3,)),
    "all are results": ([CODES, SCALE], (0, 1)),
    "results in another order": ([SCALE, CODES, Y], (1, 0)),
    "parts": ([((4, 5, 3), torch.float32, ()), Y], (1,)),
}


@pytest.mark.parametrize("case", CASES)
def test_buffers_lie_apart(case):
    """Results, and what starts with a fill, alone; all others in one allocation of bytes, each at a multiple of APART."""
    buffers, kept = CASES[case]
    sizes, spots = allocations(buffers, kept)
    used = {at: [] for at in range(len(sizes))}
    for number, ((shape, dtype, fill), (at, begin)) in enumerate(zip(buffers, spots, strict=True)):
        end = begin + prod(shape) * dtype.itemsize
        if number in kept or fill:
            assert (sizes[at][0], sizes[at][2], begin) == (shape, dtype, 0)
        else:
            assert sizes[at][1:] == ((1,), torch.uint8)
            assert begin % APART == 0
            assert end <= sizes[at][0][0]
        used[at].append((begin, end))
    for ranges in used.values():
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert all(used.values())
