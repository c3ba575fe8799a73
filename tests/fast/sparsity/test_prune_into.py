"""`prune_into`: masks of `prune` and `prune_transposable` in memory that is there, by their kernels without a copy."""

import platform

import pytest
import torch

import reference
from fast import dispatch
from fast.kernels.sm90_sparse24_gemm.bits import pack_bits
from fast.sparsity import prune_into as module
from fast.sparsity.prune_into import prune_into


@pytest.mark.parametrize("transposable", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_the_mask_is_written(pattern, transposable):
    w = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(32, 16, dtype=torch.bool).t()
    assert prune_into(w, out, pattern=pattern, transposable=transposable) is out
    wanted = reference.prune_transposable(w) if transposable else reference.prune(w, pattern=pattern)
    assert torch.equal(out, torch.as_tensor(wanted))
    bits = torch.full((16, 4), 255, dtype=torch.uint8)
    assert prune_into(w, bits, pattern=pattern, transposable=transposable) is bits
    assert torch.equal(bits, pack_bits(torch.as_tensor(wanted)))


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_kernels_write_it(monkeypatch):
    """One launch each; other memory goes by a copy."""
    from tests.fast.kernels.compiling.kernel_compiler import launched

    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w = torch.zeros(64, 64, dtype=torch.bfloat16)
    for out in (torch.zeros(64, 64, dtype=torch.bool), torch.zeros(64, 8, dtype=torch.uint8)):
        for transposable, kernel in ((False, "mask_kernel"), (True, "transposable_kernel")):
            seen = launched(lambda t=transposable, out=out: prune_into(w, out, transposable=t))
            assert [one.kernel for one in seen] == [kernel]


def test_bits_of_other_patterns_go_by_a_copy():
    """Kernels write the bits of 2:4 of floats alone."""
    bits = torch.zeros(4, 2, dtype=torch.uint8)
    w = torch.randn(4, 16)
    assert module._in_place(w, bits, "2:4")
    assert not module._in_place(w, bits, "1:4")
    assert not module._in_place(w.to(torch.int8), bits, "2:4")
    assert not module._in_place(w, bits[:, :1], "2:4")


def test_other_memory_is_asked_about_in_every_call(monkeypatch):
    """A remembered call reads its tensors as contiguous copies, and would leave such a mask as it was."""
    monkeypatch.setattr(module, "execute", lambda *_: pytest.fail("a remembered call"))
    w, out = torch.randn(16, 32), torch.zeros(32, 16, dtype=torch.bool).t()
    assert bool(prune_into(w, out).any())
