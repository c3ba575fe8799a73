"""Integer sums on a CPU are exact, with and without VNNI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fast.cpu import int8

ROOT = Path(__file__).resolve().parents[3]
LIMITED = """
import torch
from fast.cpu.int8 import integer_sums
a, b = torch.full((32, 2048), 127, dtype=torch.int8), torch.full((2048, 48), 127, dtype=torch.int8)
print(bool((integer_sums(a, b) == 2048 * 127 * 127).all()))
"""


def bytes_of(*shape, seed):
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@pytest.mark.parametrize("has_vnni", [int8.HAS_VNNI, False])
@pytest.mark.parametrize("shape", [(1, 8, 3), (9, 1024, 16), (32, 1025, 48), (5, 4096, 7), (3, 0, 2)])
def test_sums_are_exact(has_vnni, shape, monkeypatch):
    monkeypatch.setattr(int8, "HAS_VNNI", has_vnni)
    rows, length, columns = shape
    lowest = [torch.full(part, -128, dtype=torch.int8) for part in ((rows, length), (length, columns))]
    for a, b in ((bytes_of(rows, length, seed=1), bytes_of(length, columns, seed=2)), lowest):
        got = int8.integer_sums(a, b)
        assert got.dtype == torch.int32
        assert torch.equal(got.to(torch.float64), a.double() @ b.double())


@pytest.mark.parametrize(
    "isa", ["AVX2", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("SSE41", "AVX512_CORE"))]
)
def test_sums_are_exact_where_users_take_vnni_away(isa):
    """Then `torch._int_mm` saturates, and torch does not say so."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
