"""Launches of kernels in CUDA C++: what the driver is given, by each thread, with and without tensor maps; contexts; maps
kept.

Where a program puts its buffers.
"""

import ctypes
import struct
import threading
from itertools import pairwise
from math import prod
from types import SimpleNamespace

import pytest
import torch

from fast.launch import cuda, driver
from fast.launch.cuda import BIAS, CudaLaunch, Kernel, Maps
from fast.prepared import APART, allocations

MAP = b"m" * cuda.MAPS
NAMES = ("x", "w", "bias", "y")


def launch_of(maps=None, behind=None, programmatic=False, names=NAMES):
    kernel = Kernel("name", None, lambda *given: {}, programmatic=programmatic)
    return CudaLaunch(
        kernel,
        SimpleNamespace(threads=256),
        None,
        names,
        30,
        1000,
        ("2i", (7, BIAS)),
        behind=behind,
        maps=maps,
    )


def kept_maps(described=lambda *at: MAP):
    """Of x and y, x read through them alone."""
    return Maps(described, 1, (0, 3))


class Driver:
    """Keeps what it is given: arguments, grid, block, shared memory, stream and attributes."""

    def __init__(self, sizes, before=lambda: None, status=()):
        self.sizes, self.before, self.left, self.seen = sizes, before, list(status), {}

    def cuLaunchKernelEx(self, place, function, arguments, nothing):
        self.before()
        if self.left:
            return self.left.pop()
        config = place._obj
        given = b"".join(ctypes.string_at(at, size) for at, size in zip(arguments, self.sizes, strict=True))
        shape = tuple(config.grid), tuple(config.block), config.shared
        attributes = ctypes.cast(config.attributes, ctypes.POINTER(driver.LaunchAttribute))
        self.seen[config.stream] = (
            given,
            shape,
            [(attributes[at].id, attributes[at].value[0]) for at in range(config.count)],
        )
        return 0

    def cuGetErrorString(self, *given):
        return 0


KINDS = {
    "plain": ({}, "=4Q2i", lambda a: (*a, 7, 2)),
    "programmatic": ({"programmatic": True}, "=4Q2i", lambda a: (*a, 7, 2)),
    "tensor maps": ({"maps": True}, f"={cuda.MAPS}s3Q2i", lambda a: (MAP, *a[1:], 7, 2)),
    "an address behind numbers": (
        {"maps": True, "behind": ("q", (9,)), "names": (*NAMES, "ends")}, f"={cuda.MAPS}s3Q2iQq",
        lambda a: (MAP, *a[1:4], 7, 2, a[4], 9),
    ),
}  # fmt: skip


def function_of(monkeypatch, library, **options):
    if options.pop("maps", False):
        options["maps"] = kept_maps()
    monkeypatch.setattr(driver, "driver", lambda: library)
    monkeypatch.setattr(cuda, "loaded", lambda *given: ctypes.c_void_p(9))
    return launch_of(**options).function(2, 0)


def sizes_of(layout):
    size = struct.calcsize(layout)
    return (cuda.MAPS, size - cuda.MAPS) if "s" in layout else (size,)


@pytest.mark.parametrize("name", KINDS)
def test_each_thread_launches_what_it_has_filled_in(monkeypatch, name):
    """A launch fills in memory that was made before: another thread's would be overwritten before the driver looks at it."""
    options, layout, right = KINDS[name]
    both = threading.Barrier(2)
    library = Driver(
        sizes_of(layout), before=lambda: both.wait(timeout=30)
    )  # both threads have filled theirs in
    run = function_of(monkeypatch, library, **options)
    count = len(options.get("names", NAMES))
    threads = [threading.Thread(target=run, args=(at, [at, None, *[at] * (count - 2)])) for at in (5, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for at in (5, 6):
        given, shape, attributes = library.seen[at]
        assert struct.unpack(layout, given) == right((at, 0, *[at] * (count - 2)))
        assert shape == ((30, 1, 1), (256, 1, 1), 1000)
        assert attributes == ([(driver.PROGRAMMATIC, 1)] if name == "programmatic" else [])


@pytest.mark.parametrize("name", KINDS)
def test_a_launch_repeats_with_other_addresses(monkeypatch, name):
    options, layout, right = KINDS[name]
    library = Driver(sizes_of(layout))
    run = function_of(monkeypatch, library, **options)
    count = len(options.get("names", NAMES))
    for stream, first in ((1, 16), (2, 160)):
        addresses = [first + at for at in range(count)]
        run(stream, addresses)
        assert struct.unpack(layout, library.seen[stream][0]) == right(addresses)


@pytest.mark.parametrize("name", ["plain", "tensor maps"])
@pytest.mark.parametrize("status", [driver.NO_CONTEXT, 700])
def test_a_launch_that_fails(monkeypatch, status, name):
    """Without a context it is made and the launch repeated; all else is an error."""
    options, layout, _ = KINDS[name]
    made = []
    run = function_of(monkeypatch, Driver(sizes_of(layout), status=[status]), **options)
    monkeypatch.setattr(driver, "ensure_context", made.append)
    monkeypatch.setattr(cuda.torch.cuda, "current_device", lambda: 2)
    if status == driver.NO_CONTEXT:
        run(7, [1, 2, 3, 4])
        assert made == [2]
        return
    with pytest.raises(RuntimeError, match="launching name: CUDA error 700"):
        run(7, [1, 2, 3, 4])


def test_what_is_compiled_is_kept_by_the_dtype_of_the_bias(monkeypatch):
    made = []
    monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
    one = launch_of()
    monkeypatch.setattr(one, "function", lambda kind, device: made.append(kind) or (lambda *given: None))
    x = torch.zeros(8)
    for bias in (None, x, x.half(), x):
        signature = one.run([x, x, bias, x], -1)
        assert signature in one.compiled
    assert made == [0, 0, 2]


def test_tensors_at_odd_addresses_are_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
    one = launch_of()
    monkeypatch.setattr(
        one, "function", lambda kind, device: lambda stream, addresses: seen.append(addresses)
    )
    odd = torch.zeros(9)[1:]
    one.run([odd, torch.zeros(8), None, torch.zeros(8)], -1)
    assert seen[0][0] != odd.data_ptr()
    assert all(address is None or address % 16 == 0 for address in seen[0])


def test_a_launch_enters_the_device_of_its_operands(monkeypatch):
    """Where another one is current: a kernel belongs to the context of its own."""
    entered, launched = [], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *given):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 7)
    one = launch_of()
    monkeypatch.setattr(one, "function", lambda kind, device: lambda *given: launched.append(list(entered)))
    one.run([torch.zeros(8)] * 2 + [None, torch.zeros(8)], 1)
    assert launched == [[1]]


def test_tensor_maps_are_kept(monkeypatch):
    """Of the addresses that came last."""
    monkeypatch.setattr(cuda, "MOST_MAPS", 2)
    made = []
    maps = kept_maps(lambda *at: made.append(at) or MAP)
    for at in ((1, 2), (3, 4), (1, 2), (5, 6), (5, 6)):
        assert maps[at] == MAP
    assert list(maps) == [(3, 4), (5, 6)]
    assert made == [(1, 2), (3, 4), (5, 6)]


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
