"""What cuBLASLt is asked for, with its part played on the host; and what it is not asked for."""

import contextlib
import ctypes
import gc
import os

import pytest
import torch

from fast.kernels import cublaslt
from fast.kernels import cublaslt as lt
from fast.kernels.cublaslt import plan, refused, weight_and_bias_gradients
from tests.fast.kernels.cublaslt.recorded import Recorded

HALVES = (torch.float16, torch.bfloat16)


class Stream:
    cuda_stream = 5


@pytest.fixture
def asked(monkeypatch):
    """The library; plans and failures of one test are not those of the next."""
    made = lt.declared(Recorded())
    for module in (lt, cublaslt):
        monkeypatch.setattr(module, "library", lambda: made)
    monkeypatch.setattr(cublaslt, "FAILED", [])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream)
    plan.cache_clear(), lt.handle.cache_clear()
    yield made
    plan.cache_clear(), lt.handle.cache_clear()


def integers(*shape, dtype=torch.float16, seed=0):
    """At an address as those of a GPU's memory are."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    room = torch.empty(made.numel() + lt.ALIGNMENT, dtype=dtype)
    first = -room.data_ptr() % lt.ALIGNMENT // dtype.itemsize
    return room[first : first + made.numel()].view(shape).copy_(made)


def exact(g, x):
    return (g.float().t() @ x.float()).to(g.dtype), g.float().sum(0).to(g.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(40, 16, 24), (7, 64, 8), (1, 8, 8)], ids=str)
def test_both_gradients(asked, shape, dtype):
    """Operands, layouts, epilogue and addresses; a plan is made once for a shape, the stream is asked each time."""
    rows, n, k = shape
    for seed in range(3):
        g, x = integers(rows, n, dtype=dtype, seed=seed), integers(rows, k, dtype=dtype, seed=seed + 9)
        made = weight_and_bias_gradients(g, x)
        assert all(torch.equal(one, other) for one, other in zip(made, exact(g, x), strict=True))
    assert asked.calls == [5, 5, 5]
    assert plan.cache_info().misses == 1


@pytest.mark.parametrize(("count", "workspace"), [(0, 0), (1, 512)])
def test_a_product_that_the_library_does_not_have(asked, count, workspace):
    """Or has with workspace alone, of which it is given none."""
    asked.count, asked.workspace = count, workspace
    assert weight_and_bias_gradients(integers(8, 8), integers(8, 8)) is None
    assert cublaslt.FAILED == asked.calls == []


def test_a_failure_is_told_once_and_not_tried_again(asked):
    asked.status = 14
    g, x = integers(8, 8), integers(8, 8)
    with pytest.warns(
        RuntimeWarning, match=r"a kernel sums: cuBLASLt: status 14 of a weight's gradient \(8, 8\)"
    ):
        assert weight_and_bias_gradients(g, x) is None
    assert weight_and_bias_gradients(g, x) is None
    assert asked.calls == [5]
    assert "failed before" in refused(g, x)


def test_other_errors_are_not_the_librarys(asked, monkeypatch):
    """Memory that is short now may be there next time."""

    def short(*_):
        raise torch.OutOfMemoryError("short")

    g, x = integers(8, 8), integers(8, 8)
    monkeypatch.setattr(cublaslt.Plan, "__call__", short)
    with pytest.raises(torch.OutOfMemoryError):
        weight_and_bias_gradients(g, x)
    assert cublaslt.FAILED == []


def test_matrices_that_are_not_taken(asked):
    g, x = integers(32, 16), integers(32, 24)
    odd = torch.cat([g.new_zeros(1), g.view(-1)])[1:].view(32, 16)
    for one, other, text in (
        (g.float(), x.float(), "both are float16 or both bfloat16"),
        (g, x.bfloat16(), "got torch.float16 and torch.bfloat16"),
        (g[:0], x[:0], "at least 1"),
        (g[:, :8], x, "one behind the other"),
        (g, x.t().contiguous().t(), "one behind the other"),
        (g, integers(32, 25), "multiples of 8 elements"),
        (odd, x, "a multiple of 256 bytes"),
        (torch._neg_view(g), x, "one behind the other"),
    ):
        assert text in refused(one, other)
        assert weight_and_bias_gradients(one, other) is None
    assert refused(g, x) is None
    assert asked.calls == []


@pytest.mark.parametrize(
    ("version", "text"), [(None, "built without CUDA"), ("1.0", "has not loaded libcublasLt.so.1")]
)
def test_the_library_is_the_one_that_torch_has_loaded(monkeypatch, version, text):
    """Not one that the system has: what is not in the process is not loaded."""
    monkeypatch.setattr(torch.version, "cuda", version)
    lt.library.cache_clear()
    with pytest.raises(lt.LibraryError, match=text):
        lt.library()


def test_nothing_is_loaded_that_was_not(monkeypatch):
    found = Recorded()
    modes = {}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: modes.update({name: mode}) or found)
    lt.library.cache_clear()
    assert lt.library() is found
    lt.library.cache_clear()
    assert modes == {"libcublasLt.so.13": os.RTLD_NOLOAD | os.RTLD_NOW}


def test_without_the_library_a_kernel_sums(monkeypatch):
    monkeypatch.setattr(cublaslt, "FAILED", [])
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    lt.library.cache_clear(), plan.cache_clear()
    with pytest.warns(RuntimeWarning, match="built without CUDA"):
        assert weight_and_bias_gradients(integers(8, 8), integers(8, 8)) is None


def test_a_status_is_an_error():
    with pytest.raises(lt.LibraryError, match="status 7 of a thing"):
        lt.check(7, "a thing")


def test_a_plan_that_is_forgotten_leaves_nothing(asked):
    """Shapes come and go: only the handle stays."""
    g, x = integers(8, 16), integers(8, 24)
    made = cublaslt.Plan(0, 8, 16, 24, g.dtype)
    made(g, x, 0)
    assert len(asked.made) > 1
    del made
    gc.collect()
    cublaslt.plan.cache_clear()
    gc.collect()
    assert set(map(str, asked.made.values())) <= {"handle"}
