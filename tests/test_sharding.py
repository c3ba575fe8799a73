"""`QuantizedTensor` under FSDP2: two ranks on this machine give the bits of one."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ao_lab import quantized
from ao_lab.sharding import gathered_parts, whole_weight
from tests.quantized_weights import KINDS, same, weight

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2


@pytest.mark.parametrize("scheme", KINDS)
def test_shards_make_the_weight_again(scheme):
    t = quantized(weight(256, 256), scheme)
    shards = [shard.clone() for shard in t.chunk(RANKS)]
    sent = [gathered_parts(shard, SimpleNamespace(size=lambda: RANKS), (256, 256)) for shard in shards]
    outputs = tuple(torch.cat(parts) for parts in zip(*(parts for parts, _ in sent), strict=True))
    whole = whole_weight(shards[1], outputs, sent[0][1], torch.float32)
    assert torch.equal(whole, t)
    assert same(whole.dequantize(), t.dequantize())
    whole.fsdp_post_all_gather(tuple(part * 0 for part in outputs), sent[0][1], torch.float32, out=whole)
    assert not whole.codes.any()
    whole.fsdp_post_all_gather(outputs, sent[0][1], torch.float32, out=whole)
    assert torch.equal(whole, t)


def test_unequal_shards_are_refused():
    t = quantized(weight(9, 64), "int8_rowwise")
    with pytest.raises(ValueError, match="divides 9"):
        gathered_parts(t[:5], SimpleNamespace(size=lambda: 2), (9, 64))


def test_one_axis_and_back():
    t = quantized(weight(32, 64), "int4_g32_asymmetric")
    flat = t.view(-1)
    assert flat.shape == (2048,)
    assert same(flat.dequantize(), t.dequantize().view(-1))
    assert torch.equal(flat.view(32, 64), t)
    for refused in (
        lambda: flat[:64],
        lambda: flat[torch.tensor([1])],
        lambda: torch.cat([flat, flat]),
    ):
        with pytest.raises(ValueError, match="shows one axis"):
            refused()


def test_two_ranks():
    """Adapters train beside frozen quantized weights; outputs and gradients are those of one process."""
    script = str(ROOT / "tests" / "fsdp_ranks.py")
    done = subprocess.run(
        [sys.executable, script, str(RANKS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
