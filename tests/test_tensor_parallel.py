"""`QuantizedTensor` in DTensors: two ranks on this machine give the bits of one process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2


def test_two_ranks(tmp_path):
    """Placements, products, models and their states, compiled and beside FSDP2; what is refused is refused on both."""
    script = str(ROOT / "tests" / "tensor_parallel_ranks.py")
    done = subprocess.run(
        [sys.executable, script, str(RANKS), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"


def test_hashes_are_completed_once():
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor import DTensor

    from ao_lab.compiled_shards import HASH, hash_local_tensors
    from ao_lab.tensor import QuantizedTensor

    hash_local_tensors(QuantizedTensor)
    first = getattr(DTensor, HASH, None)
    hash_local_tensors(QuantizedTensor)
    assert getattr(DTensor, HASH, None) is first
