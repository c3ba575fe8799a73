"""Training within a budget: the loss falls, a killed run goes on, low-precision layers are put in before it.

Training with layer dropout and early exits: weights of exits, layers that are left out, the same model in transformers.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.data.corpus import SplitCorpus, SplitDocument
from experiments.models import early_exit
from experiments.models import pretraining as clock_module
from experiments.models.early_exit import PLAIN, Exits, as_transformers, exit_loss, train_with_exits
from experiments.models.pretraining import (
    LARGE,
    SIZES,
    SMALL,
    TINY,
    WARMUP_STEPS,
    Budget,
    ByteLevelModel,
    Clock,
    PretrainSettings,
    TimedRun,
    bits_by_text,
    bits_per_byte,
    common_bytes,
    mean_loss,
    pretrain,
    store,
    windows,
)
from experiments.models.train import Checkpoint
from experiments.pretraining.run import linear_parameters, share_of_peak, training_flops
from tests.experiments.harness import tiny

#: A training of a second: a model of two small layers on the text that tests make, twelve steps of 64 bytes.
MODEL = tiny.PRETRAINED
SETTINGS = PretrainSettings(model=MODEL, budget=Budget(bytes=12 * 64), batch=4, rate=1e-2, compiled=False)

# Bits per byte: every byte once, with the context that it is promised, equal to a count by hand.
TEXT = bytes(range(1, 251))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12, 13, 16, 17, 200, 250])
def test_each_byte_counts_once_behind_half_a_context(length):
    inputs, targets, counted = windows(TEXT[:length], 8)
    assert targets[counted].tolist() == list(TEXT[:length])
    assert inputs[0, 0] == 0
    for row, (seen, predicted, count) in enumerate(zip(inputs, targets, counted, strict=True)):
        assert torch.equal(seen[1:], predicted[:-1])
        assert row == 0 or not count[:4].any()


class Table(nn.Module):
    """The next byte from the last one by a table of logits."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.logits(tokens)


def test_bits_are_those_of_a_count_by_hand():
    torch.manual_seed(0)
    model, text = Table(), b"one byte after the other, " * 20
    likelihood = torch.log_softmax(model.logits.weight.detach().double(), dim=-1)
    pairs = zip(b"\0" + text, text, strict=False)
    expected = -sum(float(likelihood[a, b]) for a, b in pairs) / math.log(2) / len(text)
    assert bits_per_byte(model, {"a": text}, 32)["a"] == pytest.approx(expected, rel=1e-6)
    uniform = Table()
    nn.init.zeros_(uniform.logits.weight)
    assert bits_per_byte(uniform, {"a": text, "b": b"x"}, 32) == pytest.approx({"a": 8.0, "b": 8.0})


def test_bits_of_common_bytes_are_those_of_a_count_by_hand():
    """Of a text of two windows and more, with the bytes that are left out in each; the total is that of all bytes."""
    torch.manual_seed(0)
    model, text = Table(), b"a<b>" * 20
    likelihood = torch.log_softmax(model.logits.weight.detach().double(), dim=-1)
    pairs = list(zip(b"\0" + text, text, strict=False))
    common = torch.tensor([chr(byte).isalpha() for byte in range(256)])
    found = bits_by_text(model, {"a": text}, 32, common)["a"]
    expected = -sum(float(likelihood[pair]) for pair in pairs if common[pair[1]]) / math.log(2)
    assert (found.common_bits, found.common_bytes, found.bytes) == (pytest.approx(expected, rel=1e-6), 40, 80)
    assert found.bits / 80 == bits_per_byte(model, {"a": text}, 32)["a"]
    assert bits_by_text(model, {"a": b"<>"}, 32, common)["a"].common_bytes == 0


def test_common_bytes_are_those_of_the_training_text_once_in_a_million():
    """A byte that is there twice in two million bytes is common, one that is there once, or held out alone, is not."""
    train = b"x" * 1_999_990 + b"aa" + b"b"
    corpus = SplitCorpus("made", "1", (SplitDocument("heldout/c", b"c" * 9), SplitDocument("train/d", train)))
    assert common_bytes(corpus).nonzero().flatten().tolist() == [ord("a"), ord("x")]


def test_it_is_the_same_again_and_texts_do_not_depend_on_each_other():
    torch.manual_seed(0)
    model = ByteLevelModel(MODEL).eval()
    texts = {"a": TEXT, "b": TEXT[::-1] * 9}
    found = bits_per_byte(model, texts, 16)
    assert found == bits_per_byte(model, dict(reversed(texts.items())), 16)
    assert found["b"] == bits_per_byte(model, {"b": texts["b"]}, 16)["b"]


def test_what_cannot_be_evaluated_is_refused():
    for text, context in ((b"", 8), (b"x", 7)):
        with pytest.raises(ValueError, match="at least one byte and an even context"):
            windows(text, context)


# Budgets of bytes and seconds, the learning rate along them, sizes, and operations counted by hand.
def test_a_budget_ends_by_what_is_used_up_first():
    both = Budget(bytes=1000, seconds=10)
    assert both.fraction(500, 2) == 0.5
    assert both.fraction(500, 8) == 0.8
    assert Budget(seconds=10).fraction(10**9, 5) == 0.5
    assert str(Budget(bytes=60_000_000)) == "60 MB"
    assert str(both) == "0.001 MB or 10 s"
    for wrong in ({}, {"bytes": 0}, {"seconds": -1.0, "bytes": 5}):
        with pytest.raises(ValueError, match="a budget is a positive number"):
            Budget(**wrong)


def test_the_rate_is_a_trapezoid_over_the_budget():
    one = replace(SETTINGS, rate=1.0, warmup=0.1, decay=0.4, last_rate=0.1)
    points = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.8: 0.55, 1.0: 0.1}
    assert {done: one.rate_at(done) for done in points} == pytest.approx(points)
    assert replace(one, warmup=0.0, decay=0.0).rate_at(0.0) == 1.0


@pytest.mark.parametrize("change", [{"warmup": 0.8}, {"decay": -0.1}, {"rate": 0.0}, {"batch": 0}])
def test_settings_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="got"):
        replace(SETTINGS, **change)


@pytest.mark.parametrize(("settings", "millions"), [(SMALL, 28.7), (LARGE, 122.5)])
def test_sizes_have_their_parameters(settings, millions):
    with torch.device("meta"):
        model = ByteLevelModel(settings)
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert {settings.width % 256, settings.feed_forward % 256, settings.head_dim % 128} == {0}
    assert [SIZES[name].model for name in ("30m", "120m")] == [SMALL, LARGE]


def test_operations_are_six_a_parameter_and_causal_attention():
    parameters = 4 * 32 * 32 + 3 * 32 * 64 + 32 * 256
    assert linear_parameters(ByteLevelModel(MODEL)) == parameters
    # Attention: 2 products of 2 * 32 operations for each of 16 / 2 bytes, three times.
    assert training_flops(parameters, MODEL) == 6 * parameters + 3 * 2 * 2 * 32 * 8
    assert share_of_peak(989e6, 4e5, "NVIDIA H200") == pytest.approx(40.0)
    assert share_of_peak(1.0, 1.0, "cpu") is None


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
    from experiments.models.llama import LanguageModel

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


EXITS_MODEL = replace(TINY, layers=4, width=64, heads=2, kv_heads=2, feed_forward=64, context=32)


def test_exits_and_dropout_grow_with_depth():
    weights, drops = Exits().weights(4), [Exits(dropout=0.2).drop(layer, 4) for layer in range(4)]
    assert sum(weights) == pytest.approx(1)
    assert weights == sorted(weights)
    assert (drops[0], drops[-1]) == (0, pytest.approx(0.2))
    assert drops == sorted(drops)
    assert PLAIN.weights(4) == [0, 0, 0, 1]


def test_the_plain_loss_is_the_usual_one():
    torch.manual_seed(0)
    model, tokens = ByteLevelModel(EXITS_MODEL), torch.randint(256, (3, 17))
    torch.testing.assert_close(exit_loss(model, tokens, PLAIN), mean_loss(model, tokens))


def test_every_exit_is_a_loss_of_its_own():
    """The mean over exits of models that end there."""
    torch.manual_seed(0)
    model, tokens, exits = ByteLevelModel(EXITS_MODEL), torch.randint(256, (3, 17)), Exits(dropout=0.0)
    found, layers, losses = exit_loss(model, tokens, exits), list(model.model.layers), []
    for count in range(1, 5):
        model.model.layers = torch.nn.ModuleList(layers[:count])
        losses.append(mean_loss(model, tokens))
    expected = sum(weight * loss for weight, loss in zip(exits.weights(4), losses, strict=True))
    torch.testing.assert_close(found, expected)


def test_a_layer_that_is_left_out_changes_nothing(monkeypatch):
    """Of the sequences that leave it out, and of no other."""
    torch.manual_seed(0)
    model, tokens = ByteLevelModel(EXITS_MODEL), torch.randint(256, (2, 17))
    draws = torch.tensor([0.0, 1.0])[:, None, None]
    monkeypatch.setattr(early_exit.torch, "rand", lambda *sizes, device: draws)
    found = exit_loss(model, tokens, Exits(dropout=0.5, scale=0.0))
    whole = mean_loss(model, tokens[1:])
    model.model.layers = model.model.layers[:1]  # the first one is never left out
    torch.testing.assert_close(found, (mean_loss(model, tokens[:1]) + whole) / 2)


@torch.no_grad()
def test_transformers_computes_the_same():
    torch.manual_seed(0)
    model, ids = ByteLevelModel(EXITS_MODEL).eval(), torch.randint(256, (2, 16))
    torch.testing.assert_close(as_transformers(model)(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


def test_a_training_ends_with_its_budget(tmp_path):
    settings = PretrainSettings(
        model=EXITS_MODEL, budget=Budget(bytes=3 * 4 * 32), batch=4, rate=1e-3, compiled=False
    )
    torch.manual_seed(0)
    before = ByteLevelModel(EXITS_MODEL).lm_head.weight.clone()
    trained = train_with_exits(settings, Exits(), tiny.corpus(), "cpu")
    assert not trained.training
    assert not torch.equal(trained.lm_head.weight, before)
