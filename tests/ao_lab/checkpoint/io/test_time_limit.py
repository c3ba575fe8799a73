"""Code on data of others ends in time, and only then is it stopped."""

import contextlib
import threading
import time

import pytest

from ao_lab.checkpoint import model_builder
from ao_lab.checkpoint.model_builder import limited_time


def count(most):
    done = 0
    while done < most:
        with contextlib.suppress(Exception):  # as libraries do
            done += 1
    return done


def test_what_takes_too_long_is_stopped():
    started = time.thread_time()
    with pytest.raises(ValueError, match="far too large"), limited_time(0.1, ValueError("far too large")):
        count(10**12)
    assert time.thread_time() - started < 1
    assert count(10**5) == 10**5  # nothing arrives afterwards


def test_waiting_costs_nothing():
    """A machine that is busy with others is no reason."""
    with limited_time(0.05, ValueError("too long")):
        time.sleep(0.2)


def test_other_errors_pass_and_threads_end():
    before = threading.active_count()
    with pytest.raises(KeyError), limited_time(10, ValueError("too long")):
        raise KeyError
    time.sleep(0.12)
    assert threading.active_count() <= before


@pytest.mark.parametrize("seconds", [0.0501, 0.0499])
def test_an_end_at_the_limit_is_either(seconds):
    for _ in range(3):
        with contextlib.suppress(ValueError), limited_time(seconds, ValueError("too long")):
            started = time.thread_time()
            while time.thread_time() - started < 0.05:
                pass
    assert count(10**5) == 10**5


@pytest.mark.parametrize("seconds", [10, 1e-9], ids=["in time", "too late"])
def test_the_interpreter_is_left_as_it_was(monkeypatch, seconds):
    """An asynchronous error that is taken back leaves CPython looking for one before each step: some code never ends."""
    given, raising = [], model_builder.ctypes.pythonapi.PyThreadState_SetAsyncExc

    def raised(thread, error):
        given.append(error)
        return raising(thread, error)

    monkeypatch.setattr(model_builder.ctypes.pythonapi, "PyThreadState_SetAsyncExc", raised)
    with contextlib.suppress(ValueError), model_builder.limited_time(seconds, ValueError("too long")):
        count(10**6 if seconds < 1 else 10)
    assert all(error is not None for error in given)
