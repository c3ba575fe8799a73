"""What `linear_skinny` takes, what becomes of a variant that does not load, and contexts of threads."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from fast.kernels.linear_skinny import host, launch
from fast.kernels.linear_skinny.select import gains
from fast.kernels.linear_skinny.variants import Form, Variant
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sparse_mm import driver

INT4 = Form("int4", 128, False, False, "bfloat16")
NF4 = Form("nf4", 64, False, False, "bfloat16")
LARGE, SMALL = (14336, 4096), (4096, 4096)


@pytest.mark.parametrize(
    ("form", "rows", "shape", "gained"),
    [
        (INT4, 2, LARGE, True), (INT4, 3, LARGE, False), (INT4, 4, SMALL, True), (INT4, 5, SMALL, False),
        (INT4._replace(element="int8"), 1, SMALL, False), (INT4._replace(element="e4m3"), 1, SMALL, False),
        (NF4, 16, LARGE, True), (NF4, 16, SMALL, True), (NF4, 17, LARGE, False),
        (NF4._replace(element="e2m1", group=16), 16, LARGE, True), (NF4._replace(element="e4m3_mx", group=32), 16, SMALL, True),
    ],
)  # fmt: skip
def test_rows_that_gain(form, rows, shape, gained):
    assert gains(form, rows, *shape) == gained


def test_a_variant_that_does_not_load_is_left_out_with_a_warning(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(host, "is_taken", lambda *_: True)
    monkeypatch.setattr(launch, "cached_cubin", refuse)
    w = ArrangedWeight(
        torch.empty(2, 4, 512, dtype=torch.int32), torch.empty(2, 128), None, (128, 256), "int4", 128
    )
    variant = Variant(8, 1, 4, 1, 4)
    launch.is_loadable.cache_clear()
    with pytest.warns(UserWarning, match="no kernel image"):
        assert host.launch_for(w, 1, torch.bfloat16, torch.bfloat16, variant) is None
    # Once: the next call says nothing.
    assert host.launch_for(w, 1, torch.bfloat16, torch.bfloat16, variant) is None
    launch.is_loadable.cache_clear()


@pytest.mark.parametrize(("current", "made"), [(0, ["retained", "set"]), (77, [])])
def test_a_thread_without_a_context_gets_the_device_s(monkeypatch, current, made):
    seen = []

    def get(place):
        ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))[0] = current
        return 0

    library = SimpleNamespace(
        cuCtxGetCurrent=get,
        cuDevicePrimaryCtxRetain=lambda *_: seen.append("retained") or 0,
        cuCtxSetCurrent=lambda *_: seen.append("set") or 0,
    )
    monkeypatch.setattr(driver, "driver", lambda: library)
    driver.ensure_context(0)
    assert seen == made
