"""Several measurements at once: what is lost where a process dies, and that a training gives the same rows in any process."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from ao_lab.cli.app import main
from experiments.fp8_training import convergence
from experiments.fp8_training.methods import PAIRED, Plan
from experiments.harness import measuring
from experiments.harness.measuring import Deadline, measure_each
from experiments.harness.rows import Journal
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import Budget, Size
from tests.experiments.harness import tiny, works
from tests.support.runs import fresh_processes


@pytest.fixture(params=fresh_processes.CONTEXTS)
def quick(request, monkeypatch):
    """Processes that need not import torch anew, and by night as a run starts them."""
    monkeypatch.setattr(measuring, "SPAWN", fresh_processes.context(request.param))
    return request.param


def gather(found):
    return lambda name, rows: found.update({name: [row.value for row in rows]})


def test_one_worker_is_this_process():
    found = {}
    measure_each("x", {"a": works.process, "b": works.process}, 1, Deadline(None), gather(found))
    assert found == {"a": [os.getpid()], "b": [os.getpid()]}
    with pytest.raises(ValueError, match="no such thing"):
        measure_each("x", {"a": works.fail}, 1, Deadline(None), gather(found))


def test_what_dies_or_fails_loses_itself_alone(quick, monkeypatch, capfd):
    given = {
        "dies": works.die,
        "first": works.process,
        "fails": works.fail,
        "second": works.threads,
        "third": works.process,
    }
    found, before = {}, torch.get_num_threads()
    monkeypatch.setattr(measuring, "LOST", [])
    torch.set_num_threads(1)
    try:
        measure_each("x", given, 2, Deadline(None), gather(found))
    finally:
        torch.set_num_threads(before)
    assert set(found) == {"first", "second", "third"}
    assert sorted(measuring.LOST) == ["dies", "fails"]
    assert found["second"] == [1]
    assert os.getpid() not in (*found["first"], *found["third"])
    err = capfd.readouterr().err
    assert "lost: dies: its process ended with exit code 3; the next run goes on with it" in err
    assert "lost: fails: ValueError: no such thing" in err
    # What forks writes where it wrote when it began, in an earlier test perhaps.
    assert quick == fresh_processes.FORKSERVER or "Traceback" in err


def test_a_run_that_lost_something_publishes_and_fails(monkeypatch, capsys):
    def run(*names, **options):
        measuring.LOST[:] = lost
        return [("rows", "a file")]

    monkeypatch.setattr("experiments.runs.run.reproduce", run)
    lost = ["dense, seed 0", "dense, seed 1"]
    assert main(["reproduce", "formats"]) == 1
    out, err = capsys.readouterr()
    assert "a file" in out
    assert "2 measurements were lost, dense, seed 0 first" in err
    assert main(["reproduce", "formats", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"written": [{"what": "rows", "where": "a file"}]}
    lost = []
    assert main(["reproduce", "formats"]) == 0


def test_nothing_starts_after_the_limit():
    found = {}
    measure_each("x", {"a": works.process}, 2, Deadline(-1.0), gather(found))
    assert found == {}


@pytest.mark.usefixtures("quick")
def test_what_does_not_end_in_time_is_stopped_and_told_of(tmp_path, monkeypatch, capfd):
    """One that ends is kept, one that lasts ten minutes is named and ends with the run."""
    monkeypatch.setattr(measuring, "GRACE", 0.0)
    monkeypatch.setattr(measuring, "TELL", 1.0)
    found, given = {}, {"short": works.process, "long": partial(works.slow, tmp_path)}
    started = time.perf_counter()
    measure_each("x", given, 2, Deadline(6.0), gather(found))
    assert time.perf_counter() - started < 60
    assert set(found) == {"short"}
    err = capfd.readouterr().err
    assert "under way: long, " in err
    assert "stopped, as the end has come: long, " in err
    assert not any(is_alive(one.name) for one in tmp_path.iterdir())


def is_alive(number):
    """Whether a process runs; one that has ended and was waited for is gone."""
    return Path(f"/proc/{number}").exists()


@pytest.mark.usefixtures("quick")
def test_a_stop_ends_the_processes(tmp_path, monkeypatch):
    def stopped(pipes, seconds):
        while len(begun := list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        assert all(is_alive(one.name) for one in begun)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "wait", stopped)
    given = {name: partial(works.slow, tmp_path) for name in "abc"}
    with pytest.raises(KeyboardInterrupt):
        measure_each("x", given, 2, Deadline(None), gather({}))
    assert len(begun := list(tmp_path.iterdir())) == 2
    assert not any(is_alive(one.name) for one in begun)


@pytest.fixture
def plan(monkeypatch):
    model = ModelSettings(width=32, layers=1, heads=2, kv_heads=2, feed_forward=64, context=16)
    monkeypatch.setattr(
        "experiments.fp8_training.methods.KNOWN_SIZES", {"micro": Size(model, batch=4, rate=1e-2)}
    )
    return Plan(paired="micro", budget=Budget(bytes=4 * 64), seeds=2, recipes=("mxfp4",), evaluated=64)


@pytest.mark.parametrize("method", fresh_processes.CONTEXTS)
def test_a_training_gives_the_same_rows_in_another_process(method, plan, tmp_path, monkeypatch):
    """Seeds, threads and stochastic rounding: bit for bit; without times where it is not alone."""
    monkeypatch.setattr(measuring, "SPAWN", fresh_processes.context(method))
    found = []
    for count in (1, 2):
        journal, settings = Journal(), tiny.replace(tiny.settings(tmp_path), workers=count)
        convergence.run(settings, journal, plan, (PAIRED,), Deadline(None))
        # The code may have been edited in between: each process names the commit of what it imported.
        found.append({row.key: tiny.replace(row, date="", commit="") for row in journal.rows})
    alone, beside = found
    missing = {key[4] for key in alone.keys() - beside.keys()}
    assert missing == {"time of steps", "tokens a second"}
    assert beside == {key: row for key, row in alone.items() if key[4] not in missing}
    assert {(row.method, row.seed) for row in beside.values() if row.metric == "steps"} == {
        (name, seed) for name in ("float32", "mxfp4") for seed in (0, 1)
    }


def test_trainings_of_seconds_share_nothing(plan, tmp_path):
    settings = tiny.replace(tiny.settings(tmp_path), workers=4)
    timed = plan.trial(PAIRED, "micro", "bf16", Budget(seconds=1.0), 0)
    counted = plan.trial(PAIRED, "micro", "bf16", Budget(bytes=64), 0)
    assert [convergence.shares_device(settings, one) for one in (timed, counted)] == [False, True]
    assert not convergence.shares_device(tiny.replace(settings, workers=1), counted)


def test_a_gpu_that_is_lost_ends_the_run_with_a_reason(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: device-side assert triggered\nand more")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lost)
    with pytest.raises(
        OSError,
        match=r"process \(CUDA error: device-side assert triggered\); what was measured before is kept",
    ):
        measuring.attempt(lambda: {"time": (1.0, "ms")})
