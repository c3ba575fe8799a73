"""Launches of kernels in CUDA C++ by the driver: what it is given."""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest

from fast.launch import driver

LAYOUT, FIRST = struct.Struct("=4sQ2i"), 4


def given(place, function, places):
    """Function, grid, block, shared memory, stream, attributes, and the bytes of both arguments."""
    config = place._obj
    arguments = [
        ctypes.string_at(at, size) for at, size in zip(places, (FIRST, LAYOUT.size - FIRST), strict=True)
    ]
    shape = tuple(config.grid), tuple(config.block), config.shared
    return function.value, *shape, config.stream, config.attributes, config.count, b"".join(arguments)


def test_each_thread_launches_what_it_has_filled_in(monkeypatch):
    """A launch fills in memory that was made before: another thread's would be overwritten before the driver looks at it."""
    both, seen = threading.Barrier(2), {}

    def launched(place, function, places, nothing):
        both.wait(timeout=30)  # both threads have filled theirs in
        seen[place._obj.stream] = given(place, function, places)
        return 0

    monkeypatch.setattr(driver, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    run = driver.launcher(ctypes.c_void_p(9), 256, 1000, LAYOUT, FIRST)
    threads = [threading.Thread(target=run, args=(10 * at, at, b"maps", at, 1, at)) for at in (5, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for at in (5, 6):
        packed = LAYOUT.pack(b"maps", at, 1, at)
        assert seen[at] == (9, (10 * at, 1, 1), (256, 1, 1), 1000, at, None, 0, packed)


def test_a_launch_repeats_with_other_values(monkeypatch):
    seen = []
    library = SimpleNamespace(cuLaunchKernelEx=lambda *one: seen.append(given(*one[:3])) or 0)
    monkeypatch.setattr(driver, "driver", lambda: library)
    run = driver.launcher(ctypes.c_void_p(9), 256, 0, LAYOUT, FIRST)
    run(3, 7, b"abcd", 1, 2, 3)
    run(4, 0, b"efgh", 4, 5, 6)
    assert [one[1] for one in seen] == [(3, 1, 1), (4, 1, 1)]
    assert [one[4] for one in seen] == [7, None]
    assert [one[-1] for one in seen] == [LAYOUT.pack(b"abcd", 1, 2, 3), LAYOUT.pack(b"efgh", 4, 5, 6)]


@pytest.mark.parametrize("status", [driver.NO_CONTEXT, 700])
def test_a_launch_that_fails(monkeypatch, status):
    """Without a context it is made and the launch repeated; all else is an error."""
    left, made = [status], []
    library = SimpleNamespace(
        cuLaunchKernelEx=lambda *_: left.pop() if left else 0, cuGetErrorString=lambda *_: 0
    )
    monkeypatch.setattr(driver, "driver", lambda: library)
    monkeypatch.setattr(driver, "ensure_context", made.append)
    monkeypatch.setattr(driver.torch.cuda, "current_device", lambda: 2)
    run = driver.launcher(ctypes.c_void_p(9), 256, 0, LAYOUT, FIRST)
    if status == driver.NO_CONTEXT:
        run(3, 7, b"abcd", 1, 2, 3)
        assert made == [2]
        return
    with pytest.raises(RuntimeError, match="launching a product: CUDA error 700"):
        run(3, 7, b"abcd", 1, 2, 3)
