"""What `sm90_w4a16_gemv` takes, what becomes of a variant that does not load, and contexts of threads."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemv import host, launch
from fast.kernels.sm90_w4a16_gemv.launch import ARGUMENTS
from fast.kernels.sm90_w4a16_gemv.select import choose, gains
from fast.kernels.sm90_w4a16_gemv.variants import Direct, Form, Variant
from fast.launch import driver

INT4 = Form("int4", 128, False, False, "bfloat16")
NF4 = Form("nf4", 64, False, False, "bfloat16")
E2M1, MXFP8 = NF4._replace(element="e2m1", group=16), NF4._replace(element="e4m3_mx", group=32)
INT8 = Form("int8", 0, False, False, "bfloat16")
LARGE, SMALL, LEAST = (14336, 4096), (4096, 4096), (1024, 4096)
WAVE, LONG, PAIR = (6144, 4096), (4096, 14336), (28672, 4096)


@pytest.mark.parametrize(
    ("form", "rows", "shape", "gained"),
    [
        (INT4, 8, LARGE, True), (INT4, 9, LARGE, False), (INT4, 8, SMALL, True),
        (INT4, 8, LEAST, True), (INT4, 9, LEAST, False), (INT4._replace(group=32), 3, LARGE, False),
        (INT4._replace(group=64), 8, LARGE, True), (INT4._replace(group=64), 9, LARGE, False),
        (INT4._replace(group=64), 3, PAIR, False), (INT4._replace(group=64, zero=True), 5, LEAST, False),
        (INT8, 8, LARGE, True), (INT8, 9, LARGE, False), (INT8, 2, SMALL, True), (INT8, 3, SMALL, False),
        (INT8, 8, LEAST, True), (INT8, 9, LEAST, False), (INT8._replace(zero=True), 1, LEAST, False),
        (INT8._replace(element="e4m3"), 8, LEAST, True), (INT8, 3, LEAST[::-1], False), (INT8, 1, (2048, 4096), False),
        (INT8, 4, WAVE, True), (INT8, 5, WAVE, False), (INT8, 4, LONG, True), (INT8, 5, LONG, False), (INT8, 16, PAIR, True),
        (INT8._replace(group=128), 1, LARGE, False), (INT8._replace(element="e4m3"), 4, LARGE, True),
        (NF4, 16, LARGE, True), (NF4, 16, SMALL, True), (NF4, 17, LARGE, False),
        (E2M1, 1, SMALL, False), (E2M1, 8, LEAST, True), (E2M1, 9, LEAST, False), (MXFP8, 8, LEAST, True),
        (MXFP8, 8, LARGE, True), (MXFP8, 9, LARGE, False),
        (MXFP8, 4, SMALL, True), (MXFP8, 5, SMALL, False), (MXFP8, 16, PAIR, True), (MXFP8, 4, WAVE, True),
    ],
)  # fmt: skip
def test_rows_that_gain(form, rows, shape, gained):
    assert gains(form, rows, *shape) == gained


@pytest.mark.parametrize(
    ("form", "count", "shape", "chosen"),
    [
        (MXFP8, 1, LARGE, Direct(8, 7, 4, 4)), (INT8, 4, LARGE, Variant(8, 2, 2, 1, 4, 2, True)),
        (MXFP8, 16, PAIR, Direct(16, 14, 2, 4)),
        (INT8, 1, SMALL, Direct(8, 2, 12, 4, True, True)), (INT8, 1, LONG, Direct(8, 2, 12, 4, True, True)),
        (INT8, 2, LONG, Variant(8, 1, 4, 2, 16, 1, True, ahead=True)),
        (MXFP8, 2, LONG, Direct(8, 2, 12, 4)),
        (INT8, 1, WAVE, Direct(8, 3, 5, 6, True, True)), (INT8, 2, WAVE, Variant(8, 1, 4, 1, 8, 2, True)),
        (INT4, 8, LARGE, Variant(8, 2, 2, 1, 4, 2, True)),
        (INT4, 4, SMALL, Variant(8, 1, 3, 2, 6, 2, True)), (INT4, 1, LONG, Direct(8, 2, 14, 2, True, True)),
        (INT4, 2, WAVE, Direct(8, 3, 9, 2, True, True)), (INT4, 3, WAVE, Variant(8, 1, 3, 1, 6, 2, True)),
        (INT4, 1, PAIR, Variant(8, 1, 3, 1, 6, 2, True)),
        (INT4._replace(zero=True), 1, SMALL, Variant(8, 1, 3, 2, 6, 2, True)),
        (INT8, 1, LARGE, Direct(8, 7, 3, 4, True, True)), (INT8, 8, LARGE, Direct(8, 7, 4, 4, True, True)),
        (INT4, 4, LONG, Variant(8, 1, 3, 2, 6, 2, True)), (INT4, 1, LEAST, Direct(8, 1, 24, 4)),
        (INT8, 8, LEAST, Direct(8, 1, 24, 4)), (INT4._replace(zero=True), 1, LEAST, Variant(8, 1, 4, 4, 4, 1, ahead=True)),
        (INT4._replace(group=64), 8, LARGE, Variant(8, 2, 2, 1, 8, 1, True, ahead=True)),
    ],
)  # fmt: skip
def test_programs_leave_room_or_ask_ahead(form, count, shape, chosen):
    """Two to a multiprocessor, or alone and their weight asked for before the kernel in front ends, or straight from memory."""
    assert choose(form, count, *shape) == chosen


@pytest.mark.parametrize(
    ("shape", "blocks", "splits"),
    [
        (LARGE, 2, 1), ((4096, 14336), 1, 2), (SMALL, 1, 2), ((2048, 4096), 1, 2), ((1024, 4096), 1, 4),
        ((128256, 4096), 4, 1),
    ],
)  # fmt: skip
def test_programs_of_nf4_run_at_once(shape, blocks, splits):
    """One a multiprocessor, tall where there are more blocks than those; of clusters of four 30 run at once. x by its rows."""
    for count, streamed in ((1, False), (2, False), (3, True), (16, True)):
        one = choose(NF4, count, *shape)
        assert (one.blocks, one.splits, one.at_once, one.streamed) == (blocks, splits, 1, streamed)
        assert (one.tokens, one.tabled, one.blocks * one.phases) == (8 if count <= 8 else 16, 4, 4)


@pytest.mark.parametrize(
    ("element", "inputs", "taken"),
    [("nf4", torch.float16, True), ("e2m1", torch.float16, False), ("e4m3_mx", torch.float16, False),
     ("e2m1", torch.bfloat16, True), ("e4m3_mx", torch.bfloat16, True)],
)  # fmt: skip
def test_factors_go_with_bfloat16_alone(monkeypatch, element, inputs, taken):
    monkeypatch.setattr(host, "capability", lambda index: host.HOPPER)
    monkeypatch.setattr(host, "has_compiler", lambda: True)
    monkeypatch.setattr(host, "interpreted", lambda: False)
    words = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    w = SimpleNamespace(words=words, element=element, shape=(128, 256), rows=128, columns=256)
    assert host.is_taken(w, 4, inputs, torch.float32) == taken


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


def test_threads_that_launch_at_once_have_arguments_of_their_own(monkeypatch):
    """A launch fills in memory that was made before: another thread's would be overwritten before the driver looks at it."""
    both, seen = threading.Barrier(2), {}

    def launched(place, function, arguments, nothing):
        config = place._obj
        both.wait(timeout=30)  # both threads have filled theirs in
        numbers = ARGUMENTS.unpack(ctypes.string_at(arguments[0], ARGUMENTS.size))
        attribute = ctypes.cast(config.attributes, ctypes.POINTER(driver.LaunchAttribute))[0]
        seen[config.stream] = numbers, tuple(config.grid), attribute.id, attribute.value[0]
        return 0

    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    run = launch.launcher(ctypes.c_void_p(1), 100, 256, 1000, (1, 2, 3, 0))
    threads = [threading.Thread(target=run, args=(at, [at, None, *[at] * 5])) for at in (5, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for at in (5, 6):
        assert seen[at] == ((at, 0, *[at] * 5, 1, 2, 3, 0), (100, 1, 1), launch.PROGRAMMATIC, 1)
