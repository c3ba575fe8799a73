"""A training run that is killed goes on where it was and ends with the same bits."""

import multiprocessing
import random
import signal

import pytest
import torch

from experiments.models import train
from experiments.models.training_checkpoint import Checkpoint, Run
from tests.experiments.harness import tiny
from tests.experiments.models.killed_training import SETTINGS, main


class StoppedHere(Exception):
    """Stands for a kill between two steps."""


class Stopping(Checkpoint):
    """Keeps every step, and stops after some."""

    def __init__(self, path, after):
        super().__init__(path, seconds=0.0)
        self.after = after

    def reached(self, run):
        super().reached(run)
        self.after -= 1
        if not self.after:
            raise StoppedHere


def weights(model):
    return {name: value.view(torch.int32) for name, value in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def uninterrupted():
    model, loss = train.train(SETTINGS, tiny.corpus(), "cpu")
    return weights(model), loss


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_a_run_in_pieces_is_the_whole_run(tmp_path, uninterrupted, matrices):
    """Stopped at random steps, five times."""
    settings = SETTINGS if matrices == "muon" else tiny.replace(SETTINGS, matrix_rate=None)
    whole, loss = uninterrupted
    if matrices == "adamw":
        model, loss = train.train(settings, tiny.corpus(), "cpu")
        whole = weights(model)
    draws = random.Random(18)
    path = tmp_path / "x.checkpoint"
    for _ in range(5):
        # What lies outside of the run must not matter to it.
        torch.manual_seed(draws.randrange(1000))
        with pytest.raises(StoppedHere):
            train.train(settings, tiny.corpus(), "cpu", None, Stopping(path, draws.randint(1, 2)))
    checkpoint = Checkpoint(path)
    model, again = train.train(settings, tiny.corpus(), "cpu", None, checkpoint)
    assert 5 <= checkpoint.resumed <= 10
    assert same(weights(model), whole)
    assert again == loss


def test_a_killed_process_goes_on(tmp_path, uninterrupted):
    """By SIGKILL, after 3 and then 4 steps; the cache then holds the model and nothing else."""
    context = multiprocessing.get_context("spawn")
    for step in (3, 4):
        process = context.Process(target=main, args=(tmp_path, step))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    made = train.trained_model(SETTINGS, tiny.corpus(), "cpu", tmp_path)
    assert made.facts["resumed_at_step"] == 7
    assert same(weights(made.model), uninterrupted[0])
    assert [path.name for path in (tmp_path / "models").iterdir()] == [made.key]


def test_a_checkpoint_is_written_when_it_is_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    checkpoint = Checkpoint(tmp_path / "x.checkpoint", seconds=10)
    model = torch.nn.Linear(2, 2)
    run = Run(model, [torch.optim.AdamW(model.parameters())], torch.Generator(), [])
    for now[0], there in ((9.0, False), (10.0, True)):
        checkpoint.reached(run)
        assert checkpoint.path.exists() == there
    assert list(tmp_path.iterdir()) == [checkpoint.path]


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "x.checkpoint"
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"x\.checkpoint cannot be read; delete it"):
        train.train(SETTINGS, tiny.corpus(), "cpu", None, Checkpoint(path))
