"""`compress_masked`: what the reference compresses by a mask, in the order of the product's kernel, and its errors."""

import platform

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits, restore
from fast.sparsity import compress as module
from fast.sparsity.compress import DTYPES, compress_masked, masked
from tests.gpu.sparsity.cases import masked_weights


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_weights_come_back(dtype, turned):
    for w, mask in masked_weights((80, 48), dtype, turned):
        values, metadata = compress_masked(w, mask, turned)
        for one, other in zip(compress_masked(w, pack_bits(mask), turned), (values, metadata), strict=True):
            assert_same_bits(one, other)
        sides = [t.t().contiguous() if turned else t for t in (w, mask)]
        canonical = restore(metadata, 16, (values.shape[0], values.shape[1] // 4))
        for made, wanted in zip((values, canonical), reference.compress(*sides), strict=True):
            assert_same_bits(made, wanted)
        assert_same_bits(
            fast.decompress(values, canonical), torch.where(sides[1], sides[0], torch.zeros_like(sides[0]))
        )


def test_products_take_it():
    w, x = torch.ones(16, 32, dtype=torch.float16), torch.ones(3, 32, dtype=torch.float16)
    made = compress_masked(w, torch.tensor([True, False, True, False] * 8).expand(16, 32))
    assert torch.equal(fast.linear_sparse(x, *made), torch.full((3, 16), 16.0, dtype=torch.float16))


@pytest.mark.parametrize(
    ("w", "mask", "error", "text"),
    [
        (torch.ones(8, 8), torch.ones(8, 8) > 0, TypeError, "got torch.float32 and torch.bool"),
        (torch.ones(8, 8).half(), torch.ones(8, 8), TypeError, "got torch.float16 and torch.float32"),
        (torch.ones(8, 12).half(), torch.ones(8, 12) > 0, ValueError, r"multiples of 8, got \(8, 12\)"),
        (torch.ones(12, 8).half(), torch.ones(12, 8) > 0, ValueError, "multiples of 8"),
        (torch.ones(8, 8).half(), torch.ones(8, 16) > 0, ValueError, "a mask of its shape"),
        (torch.ones(8, 16).half(), torch.zeros(8, 16).byte(), ValueError, "or its bits, .* got .*uint8 of"),
        (torch.ones(8, 8).half(), torch.ones(8, 8) > 0, ValueError, "at most two elements of every four"),
    ],
)
def test_errors(w, mask, error, text):
    with pytest.raises(error, match=text):
        compress_masked(w, mask)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("shape", [(16, 32), (4, 20)], ids=str)
def test_masked_weights_as_they_are(shape, dtype):
    """The same bits where a mask keeps, +0 elsewhere, NaN and infinities dropped too; by a mask and by its bits."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[:2] = torch.tensor([torch.nan, -torch.inf, -0.0, 1.0] * (shape[1] // 4)).to(dtype)
    mask = torch.as_tensor(reference.prune(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
    for given in (mask, pack_bits(mask)):
        made, own, other = masked(w, given), w.clone(), torch.empty_like(w)
        assert_same_bits(made[mask], w[mask])
        assert_same_bits(made[~mask], torch.zeros_like(made[~mask]))
        before = own._version
        assert masked(own, given, own) is own
        assert own._version > before
        assert masked(w, given, other) is other
        assert_same_bits(own, made)
        assert_same_bits(other, made)


@pytest.mark.parametrize(
    "mask", [torch.zeros(4, 8).byte(), torch.zeros(4, 8)], ids=["of another length", "no mask"]
)
def test_masks_that_are_none(mask):
    with pytest.raises(
        ValueError, match=r"a bool mask of the weight's shape \(4, 16\), or uint8 of \(4, 2\)"
    ):
        masked(torch.ones(4, 16), mask)


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_a_kernel_masks_by_bits(monkeypatch):
    """One launch, in place too; torch's operators where a mode listens, and for memory that the kernel cannot write."""
    from tests.fast.kernels.compiling.kernel_compiler import launched

    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    w = torch.ones(64, 64, dtype=torch.bfloat16)
    bits = torch.zeros(64, 8, dtype=torch.uint8)

    def kernels(*given):
        return [one.kernel for one in launched(lambda: masked(*given))]

    assert kernels(w, bits) == kernels(w, bits, w) == ["keep_kernel"]
    monkeypatch.setattr(module, "execute", lambda *_: pytest.fail("a kernel"))
    turned = torch.ones(64, 64, dtype=torch.bfloat16).t()
    assert masked(w, bits, turned) is turned
    assert not turned.any()
    assert not masked(w[:, :20], torch.zeros(64, 3, dtype=torch.uint8)).any()
    with FlopCounterMode(display=False):
        assert not masked(w, bits).any()
