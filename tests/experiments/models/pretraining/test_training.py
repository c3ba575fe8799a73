"""Training within a budget: the loss falls, a killed run goes on, low-precision layers are put in before it."""

import pytest
import torch
from torch import nn

from experiments.models.pretraining import training as clock_module
from experiments.models.pretraining.model import ByteLevelModel
from experiments.models.pretraining.settings import Budget
from experiments.models.pretraining.training import WARMUP_STEPS, Clock, TimedRun, pretrain, store
from experiments.models.training_checkpoint import Checkpoint
from tests.experiments.harness import tiny
from tests.experiments.models.pretraining.small import MODEL, SETTINGS, replace


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
    return [value.view(torch.int32) for value in model.state_dict().values()]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


@pytest.fixture(scope="module")
def whole():
    return pretrain(SETTINGS, tiny.corpus(), "cpu")


def test_it_takes_the_steps_of_its_budget_and_learns(whole):
    assert len(whole.losses) == 12
    assert whole.losses[0] == pytest.approx(8.0, abs=0.2)
    assert whole.last_loss < 7.0
    assert not whole.model.training
    assert whole.bytes_per_second == pytest.approx((12 - WARMUP_STEPS) * 64 / whole.seconds)


def test_a_seed_draws_weights_and_text():
    again, other = (pretrain(replace(SETTINGS, seed=seed), tiny.corpus(), "cpu") for seed in (0, 1))
    assert same(again.model, pretrain(SETTINGS, tiny.corpus(), "cpu").model)
    assert not same(again.model, other.model)


def test_a_run_in_pieces_is_the_whole_run(tmp_path, whole):
    path = tmp_path / "x.checkpoint"
    for after in (3, 4):
        torch.manual_seed(after)
        with pytest.raises(StoppedHere):
            pretrain(SETTINGS, tiny.corpus(), "cpu", None, Stopping(path, after))
    last = pretrain(SETTINGS, tiny.corpus(), "cpu", None, Checkpoint(path))
    assert last.resumed_at == 7
    assert same(last.model, whole.model)
    assert torch.equal(last.losses, whole.losses)


def test_seconds_are_those_of_all_processes(tmp_path, monkeypatch):
    """By a clock that moves one second when it is read: warm-up and checkpoints take none."""
    now = iter(range(1000))
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: float(next(now)))
    settings, path = replace(SETTINGS, budget=Budget(seconds=30.0)), tmp_path / "x.checkpoint"
    with pytest.raises(StoppedHere):
        pretrain(settings, tiny.corpus(), "cpu", None, Stopping(path, WARMUP_STEPS + 4))
    before = torch.load(path, weights_only=True)
    assert 0 < before["seconds"] < 30
    assert before["timed_bytes"] == 4 * 64
    last = pretrain(settings, tiny.corpus(), "cpu", None, Checkpoint(path))
    assert 30 <= last.seconds < 33
    timed = last.bytes_per_second * last.seconds
    assert timed == pytest.approx((len(last.losses) - 2 * WARMUP_STEPS) * 64)
    assert last.resumed_at == WARMUP_STEPS + 4


def test_a_run_that_shared_its_device_once_has_no_time_of_its_own(tmp_path, whole):
    path = tmp_path / "x.checkpoint"
    with pytest.raises(StoppedHere):
        pretrain(SETTINGS, tiny.corpus(), "cpu", None, Stopping(path, 3), alone=False)
    last = pretrain(SETTINGS, tiny.corpus(), "cpu", None, Checkpoint(path))
    assert (whole.alone, last.alone) == (True, False)
    assert same(last.model, whole.model)


def test_writing_a_checkpoint_takes_no_time_of_the_clock(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    class Slow(Checkpoint):
        def reached(self, run):
            now[0] += 100

    run = TimedRun(nn.Linear(1, 1), [], torch.Generator(), [], Clock("cpu"))
    run.clock.start()
    now[0] += 1
    store(run, Slow(tmp_path / "x.checkpoint", seconds=0.0))
    now[0] += 1
    assert run.clock.now() == 2


def test_a_stopped_clock_stands_still():
    one = Clock("cpu")
    one.trained(5)
    assert (one.bytes, one.now(), one.rate) == (0, 0.0, 0.0)
    one.start()
    one.trained(5)
    one.stop()
    assert one.now() == one.seconds == one.now() > 0
    assert one.rate == 5 / one.seconds


class Rounded(nn.Linear):
    """A stand-in of a low-precision layer."""

    def forward(self, x):
        return super().forward((x * 4).round() / 4)


def test_layers_are_converted_before_the_optimizer_sees_them(whole):
    seen = []

    def convert(model):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = Rounded
        seen.append([name for name, _ in model.named_parameters()])

    made = pretrain(replace(SETTINGS, method="rounded"), tiny.corpus(), "cpu", convert)
    assert seen == [[name for name, _ in made.model.named_parameters()]]
    assert all(isinstance(module, Rounded) for module in made.model.linears().values())
    assert len(made.losses) == 12
    # The same initial weights and the same text: the first losses are near, and not equal.
    assert made.losses[0] != whole.losses[0]
    assert made.losses[0] == pytest.approx(float(whole.losses[0]), abs=0.05)


def test_the_model_is_the_language_model_on_a_cpu():
    from experiments.models.language_model import LanguageModel

    torch.manual_seed(0)
    ours = ByteLevelModel(MODEL)
    plain = LanguageModel(MODEL)
    plain.load_state_dict(ours.state_dict())
    tokens = torch.arange(32).reshape(2, 16)
    assert torch.equal(ours(tokens), plain(tokens))
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_norms_keep_the_dtype_of_their_input():
    norms = [module for module in ByteLevelModel(MODEL).modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 3
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for norm in norms:
        assert norm(x.bfloat16()).dtype == torch.bfloat16
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.epsilon)
        assert torch.allclose(norm(x), expected, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_it_trains_in_bfloat16_on_cuda(compiled):
    made = pretrain(replace(SETTINGS, compiled=compiled), tiny.corpus(), "cuda")
    assert made.last_loss < 7.2
    logits = made.model(torch.zeros(1, 16, dtype=torch.long, device="cuda"))
    assert logits.dtype == torch.bfloat16
