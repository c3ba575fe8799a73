"""Training: seeded, cached by what decides its outcome."""

import importlib.metadata
import math
import random
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab import Int8DynamicActivationIntxWeightConfig, PerGroup, QATConfig, quantize_
from experiments.models import train
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.train import Checkpoint, Muon, Run, Steps, orthogonal
from tests.experiments.harness import tiny
from tests.experiments.models.killed_training import SETTINGS, main
from tests.experiments.models.test_pretraining import StoppedHere, Stopping
from tests.support.runs import fresh_processes

# A training run that is killed goes on where it was and ends with the same bits.


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


@pytest.mark.parametrize("method", fresh_processes.CONTEXTS)
def test_a_killed_process_goes_on(method, tmp_path, uninterrupted):
    """By SIGKILL, after 3 and then 4 steps; the cache then holds the model and nothing else."""
    context = fresh_processes.context(method)
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


# Muon: torch's steps bit for bit in bfloat16, the same rule in float32, and no slow products on a CPU.

SHAPES = ((8, 24), (24, 8), (16, 16), (1, 5))
OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(make, steps=4):
    """The parameters after some steps on the gradients of one seed; the last parameter never has one."""
    parameters, generator = matrices(), torch.Generator().manual_seed(1)
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters[:-1]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_in_bfloat16_are_torchs_bit_for_bit(nesterov):
    options = {**OPTIONS, "nesterov": nesterov}
    ours, made = stepped(lambda given: Muon(given, dtype=torch.bfloat16, **options))
    theirs, peer = stepped(lambda given: torch.optim.Muon(given, **options))
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    state = made.state_dict()["state"], peer.state_dict()["state"]
    assert state[0].keys() == state[1].keys()
    assert all(torch.equal(state[0][n]["momentum_buffer"], state[1][n]["momentum_buffer"]) for n in state[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    kept = x.clone()
    y = orthogonal(x, (3.4445, -4.7750, 2.0315), 5, eps=1e-7, dtype=torch.float32)
    assert torch.equal(x, kept)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    values = torch.linalg.svdvals(y)
    # The polynomial holds values that have grown past 0.3 inside [0.68, 1.14]; smaller ones are on their way there.
    assert values.max() < 1.2
    assert values[: max(1, min(shape) // 2)].min() > 0.6


def test_the_loss_of_a_closure_comes_back():
    (parameter,) = matrices()[:1]
    optimizer = Muon([parameter], dtype=torch.float32, **OPTIONS)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(parameter, before)


def test_other_adjustments_are_refused():
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        Muon(matrices(), dtype=torch.float32, adjust_lr_fn="match_rms_adamw", **OPTIONS)


class Products(TorchDispatchMode):
    """Notes the dtypes of every matrix product."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("mm", "linear", "matmul", "attention")):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("further", [False, True])
def test_training_on_a_cpu_multiplies_in_float32_alone(further):
    settings = tiny.replace(tiny.TRAIN, start=tiny.TRAIN, matrix_rate=None) if further else tiny.TRAIN
    begun = train.LanguageModel(tiny.TRAIN.model) if further else None
    with Products() as seen:
        train.train(settings, tiny.corpus(), "cpu", begun)
    assert seen.dtypes == {torch.float32}


def test_a_model_is_trained_once_and_then_read(tmp_path, monkeypatch):
    first = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained again"))
    second = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    assert first.facts == second.facts
    assert first.facts["training_bytes"] == 2 * 2 * 64
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert [path.name for path in (tmp_path / "models").iterdir()] == [first.key]


def test_the_same_seed_gives_the_same_weights():
    one, two = (train.train(tiny.TRAIN, tiny.corpus(), "cpu")[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_training_lowers_the_loss():
    settings = tiny.replace(tiny.TRAIN, steps=12, batch=4)
    _, loss = train.train(settings, tiny.corpus(), "cpu")
    assert loss < 7.0 < math.log2(256)


def test_the_key_covers_settings_text_and_device():
    key = train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu")
    shorter = type(tiny.corpus())("made", "1", tiny.corpus().documents[1:])
    others = [
        train.cache_key(tiny.replace(tiny.TRAIN, seed=1), tiny.corpus(), "cpu"),
        train.cache_key(tiny.TRAIN, shorter, "cpu"),
        train.cache_key(tiny.TRAIN, tiny.corpus(), "cuda"),
    ]
    assert key not in others
    assert len(set(others)) == 3
    assert train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu") == key


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_the_key_covers_the_libraries(monkeypatch, library):
    key = train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu")
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == library else real(name))
    assert train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu") != key


def test_a_run_goes_on_from_another(tmp_path):
    """Steps of nothing leave the model where it was; steps move it, and the one that was initial stays."""
    initial = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    further = tiny.replace(tiny.TRAIN, start=tiny.TRAIN, matrix_rate=None, seed=7)
    still = train.trained_model(tiny.replace(further, rate=0.0), tiny.corpus(), "cpu", tmp_path)
    moved = train.trained_model(further, tiny.corpus(), "cpu", tmp_path)
    before, after, other = (made.model.state_dict() for made in (initial, still, moved))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(torch.equal(before[name], other[name]) for name in before if "proj" in name)
    assert len({initial.key, still.key, moved.key}) == 3


def test_the_rate_warms_up_and_falls():
    settings = tiny.replace(tiny.TRAIN, steps=100, warmup=10)
    shares = [train.rate_factor(number, settings) for number in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(max(shares[8:12]))
    assert shares[-1] < 0.06


def test_the_rate_ends_where_it_is_told():
    settings = tiny.replace(tiny.TRAIN, steps=100, warmup=10, last_rate=0.0)
    assert train.rate_factor(99, settings) < 1e-3
    assert train.rate_factor(99, tiny.replace(settings, last_rate=0.5)) == pytest.approx(0.5, abs=1e-3)


def sums(device):
    """A step that changes what it goes on from, and what came out of nine of them."""
    held = torch.zeros(4, device=device)

    def step(batch):
        held.mul_(0.5).add_(batch)
        return held.sum()

    steps = Steps(step, captured=device == "cuda")
    return [float(loss) for loss in [steps(torch.full((4,), float(n), device=device)) for n in range(9)]]


def test_steps_follow_each_other():
    assert sums("cpu")[:3] == [0.0, 4.0, 10.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_are_the_same_on_cuda():
    assert sums("cuda") == sums("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", [None, Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32))])
def test_a_model_trains_in_captured_steps_on_cuda(config, monkeypatch):
    """As in steps that are launched one by one; torch's attention adds gradients in no fixed order, so losses are near."""
    settings = tiny.replace(tiny.TRAIN, steps=10, batch=4, matrix_rate=None, warmup=2)
    found = []
    for captured in (True, False):
        monkeypatch.setattr(
            train, "Steps", lambda step, captured, wanted=captured: Steps(step, captured=wanted)
        )
        torch.manual_seed(0)
        model = LanguageModel(settings.model).to("cuda")
        if config is not None:
            quantize_(model, QATConfig(config, learn_scales=True), filter_fn=is_linear)
        found.append(train.fit(model, settings, tiny.corpus()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def is_linear(module, _):
    """What `quantize_` is to take."""
    return isinstance(module, torch.nn.Linear)


def test_widths_that_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads must divide width"):
        ModelSettings(width=250, heads=4)
