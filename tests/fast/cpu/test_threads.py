"""Ranges of rows on torch's threads: all of them once, errors, and other threads where torch has no OpenMP runtime of GNU's.

What the CPU has, as torch was left it: the environment decides in a fresh process.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch

from fast.cpu import threads
from fast.cpu.capability import CpuCapability, cpu_capability
from tests.support.runs import forks

ELEMENTS = 8 * threads.WORTH


@pytest.fixture(params=["OpenMP", "pool"])
def two(request, monkeypatch):
    """Two threads, of either kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("torch has no libgomp here")
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 1001])
def test_every_row_once(two, rows):
    seen, lock = [0] * rows, threading.Lock()

    def work(first, last):
        with lock:
            seen[first:last] = [count + 1 for count in seen[first:last]]

    threads.in_parts(work, rows, ELEMENTS)
    assert seen == [1] * rows


def test_more_than_one_thread_works(two):
    """Each waits for the other."""
    barrier, names = threading.Barrier(2, timeout=60), set()

    def work(first, last):
        names.add(threading.get_ident())
        if first < 2:
            barrier.wait()

    threads.in_parts(work, 2, ELEMENTS)
    assert len(names) == 2


@pytest.mark.parametrize("error", [ValueError("row"), KeyboardInterrupt()])
def test_an_error_of_a_range_is_raised(two, error):
    def work(first, last):
        if first >= 4:
            raise error

    with pytest.raises(type(error)):
        threads.in_parts(work, 8, ELEMENTS)


def test_small_matrices_stay_here(two):
    names = set()
    threads.in_parts(lambda first, last: names.add(threading.get_ident()), 100, threads.WORTH)
    assert names == {threading.get_ident()}


FORK = """
import os, torch
from fast.cpu import threads

torch.set_num_threads(2)
found = threads._openmp()
threads.in_parts(lambda first, last: None, 8, 8 * threads.WORTH)
child = os.fork()
if child == 0:
    seen = []
    threads.in_parts(lambda first, last: seen.extend(range(first, last)), 8, 8 * threads.WORTH)
    os._exit(0 if sorted(seen) == list(range(8)) and threads._openmp() is None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_threads_of_its_own():
    """GNU's runtime would wait for the parent's."""
    done = forks.python("-c", FORK, server="interpreter")
    assert done.returncode == 0, done.stderr


CODE = "from fast.cpu.capability import cpu_capability; print(cpu_capability())"


def printed(**environment):
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.nightly
def test_this_machine():
    assert printed() == str(cpu_capability())


def test_instructions_that_users_take_away_are_not_there():
    found = printed(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    assert found.startswith(("DEFAULT", "NO AVX"))
    if not cpu_capability().instructions.startswith("SVE"):
        assert found.endswith("no AMX; not for bfloat16, float16, int8")


def test_a_line_for_people():
    have = CpuCapability(instructions="AVX512", bfloat16=True, float16=False, int8=True, amx=False)
    assert str(have) == "AVX512, no AMX; instructions for matmuls in bfloat16, int8; not for float16"
