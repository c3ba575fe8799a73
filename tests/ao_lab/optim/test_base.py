"""Optimizers in a training loop, on ranks too: they learn, resume bit for bit, and refuse what does not fit before anything has
changed.
"""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from ao_lab.optim import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8, Lion8bit, base
from ao_lab.optim.slots import lead_axes, like, moment_of, put_moment, slot_of
from ao_lab.training.shard import CastOnGather
from fast.optim import update
from fast.optim.update import Moment, Rule, Slot, Updates
from reference import SCHEMES
from reference.optim.states import STATES
from tests.support.distributed.ranks import check_on_ranks

CLASSES = (
    AdamW8bit,
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (AdamW4bit, Adam8bit, Lion8bit)),
)


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    """Small parameters need no compiled loop, which has the same bits."""
    monkeypatch.setattr(update, "LEAST", 1 << 30)


def model_of(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(dtype)


def trained(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 96, generator=generator).to(next(model.parameters()).dtype)
        loss = (model(x) - x[:, :64].roll(1, -1)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def parameter(shape=(64, 128), dtype=torch.float32, value=1.0, device="cpu"):
    p = torch.nn.Parameter(torch.full(shape, value, dtype=dtype, device=device))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize("kind", CLASSES)
def test_a_loss_falls_and_a_resumed_run_has_the_same_bits(kind):
    """Codes come back as they are: the states of the fourth step lead to the same parameters."""
    model, rate = model_of(), 1e-3 if kind is Lion8bit else 3e-3
    optimizer = kind(model.parameters(), lr=rate)
    trained(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = trained(model, optimizer, 30, 4)
    assert losses[-1] < 0.8 * losses[0]
    again = model_of(1)
    again.load_state_dict(saved[0])
    resumed = kind(again.parameters(), lr=rate)
    resumed.load_state_dict(saved[1])
    trained(again, resumed, 30, 4)
    assert same(model, again)


ADAM = (0.9, 0.999)


@pytest.mark.parametrize(
    ("kind", "states", "block", "betas", "decay"),
    [(AdamW8bit, "8bit", 256, ADAM, 1e-2), (AdamW4bit, "4bit", 128, ADAM, 1e-2), (AdamWFp8, "8bit", 256, ADAM, 1e-2),
     (Adam8bit, "8bit", 256, ADAM, 0), (AdamFp8, "8bit", 256, ADAM, 0), (Adam4bit, "4bit", 128, ADAM, 0),
     (Lion8bit, "lion.8bit", 256, (0.9, 0.99), 0)],
)  # fmt: skip
def test_defaults_are_torchaos(kind, states, block, betas, decay):
    optimizer = kind([parameter()])
    assert (optimizer.states.name, optimizer.block_size) == (states, block)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == (betas, decay)
    assert kind([parameter()], block_size=64).block_size == 64


def test_a_log_tells_how_states_are_stored():
    shown = repr(AdamW8bit([torch.nn.Parameter(torch.zeros(4))], master="32bit"))
    assert shown.startswith(
        "AdamW8bit (\n    states: 8bit, block_size: 256, master: 32bit\nParameter Group 0\n"
    )


def test_float32_moments_go_to_torchs_adamw_and_back():
    model = model_of()
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    trained(model, optimizer, 3)
    floats = optimizer.float32_state_dict()
    torchs = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)
    torchs.load_state_dict(floats)
    # Scales are powers of two, so what was stored is stored again as the same values.
    again = AdamW8bit(model.parameters(), lr=1e-3)
    again.load_state_dict(torchs.state_dict())
    found = again.float32_state_dict()["state"]
    for number, state in floats["state"].items():
        assert all(torch.equal(value, found[number][name]) for name, value in state.items())


def test_states_of_another_optimizer_are_one_clear_error():
    """And nothing has changed."""
    model = model_of()
    saved = {}
    for kind in (AdamW8bit, AdamW4bit, Lion8bit):
        optimizer = kind(model.parameters())
        trained(model, optimizer, 1)
        saved[kind] = copy.deepcopy(optimizer.state_dict())
    mine = AdamW8bit(model.parameters())
    trained(model, mine, 1)
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(
        ValueError,
        match=r"states '4bit', block_size 128, this optimizer of states '8bit'",
    ):
        mine.load_state_dict(saved[AdamW4bit])
    with pytest.raises(ValueError, match="kind 'lion'"):
        mine.load_state_dict(saved[Lion8bit])
    bare = copy.deepcopy(saved[AdamW4bit])
    for group in bare["param_groups"]:
        del group["low_bit"]
    with pytest.raises(ValueError, match=r"has shape \(64, 48\) in the state dict, and \(64, 96\) here"):
        mine.load_state_dict(bare)
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, this optimizer of \[1\]"):
        AdamW8bit([parameter()]).load_state_dict(before)
    after = mine.state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in state.items())


@pytest.mark.parametrize("states", ["8bit", "lion.8bit"])
def test_float32_moments_are_stored_or_kept(states):
    """Those of torch's AdamW, whose strides are any; of "lion.8bit" the second one is float32 here too."""
    p = parameter()
    torchs = torch.optim.AdamW([p])
    torchs.step()
    saved = torchs.state_dict()
    saved["state"][0] = {
        name: value.t().contiguous().t() if value.dim() else value
        for name, value in saved["state"][0].items()
    }
    optimizer = AdamW8bit([p], states=states)
    optimizer.load_state_dict(saved)
    loaded = optimizer.float32_state_dict()["state"][0]
    assert loaded["step"] == 1
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(loaded[name], saved["state"][0][name], rtol=1 / 16)
    if states == "lion.8bit":
        assert torch.equal(loaded["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_of_torch_that_change_steps_are_refused(option):
    torchs = torch.optim.AdamW([parameter()], **{option: True})
    optimizer = AdamW8bit([parameter()])
    with pytest.raises(ValueError, match=f"of an optimizer with {option}=True"):
        optimizer.load_state_dict(torchs.state_dict())
    assert option not in optimizer.param_groups[0]


def test_what_kernels_read_is_contiguous_and_on_one_device(monkeypatch):
    """They take addresses: a gradient with other strides is copied. Each device has its own flag to leave a step out."""
    first, second, third = parameter(), parameter(device="meta"), parameter(device="meta")
    first.grad = torch.arange(64.0 * 128).reshape(128, 64).t()
    optimizer = AdamW8bit([second, first, third], nonfinite="propagate")
    calls = []
    monkeypatch.setattr(optimizer, "_updates", lambda slots, rule, **options: calls.append(slots))
    optimizer.step()
    assert [[slot.parameter for slot in slots] for slots in calls] == [[0, 2], [1]]
    assert calls[1][0].g.is_contiguous()
    assert torch.equal(calls[1][0].g, first.grad)
    first.data = first.data.t().contiguous().t()
    with pytest.raises(ValueError, match="make it contiguous first"):
        optimizer.step()


def test_torchs_adamw_takes_no_codes_for_moments():
    """Codes have names of their own: its next step is an error, not a wrong update."""
    p = parameter()
    optimizer = AdamW8bit([p])
    optimizer.step()
    torchs = torch.optim.AdamW([p])
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    first, second = parameter(), parameter()
    optimizer = AdamW8bit([first, second], lr=0.1)
    optimizer.step()
    before = copy.deepcopy((first.data, optimizer.state_dict()["state"]))
    second.grad[3, 5] = bad
    with pytest.raises(
        ValueError,
        match=r"gradient of parameter 1 of shape \(64, 128\) is not finite: nothing was changed",
    ):
        optimizer.step()
    assert torch.equal(first, before[0])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][name]) for name, value in state.items())
    loose = AdamW8bit([second], lr=0.1, nonfinite="propagate")
    loose.step()
    assert not second.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"lr": -1.0}, ValueError, "lr is a finite number"), ({"eps": 0.0}, ValueError, "eps is 2"),
        ({"amsgrad": True}, ValueError, "use amsgrad=False"), ({"states": "9bit"}, ValueError, "unknown states"),
        ({"block_size": 100}, ValueError, "power of two"), ({"master": "20bit"}, ValueError, "master is one of"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite is one of"), ({"seed": -1}, ValueError, "seed is an integer"),
        ({"seed": 0.5}, TypeError, "integer"),
    ],
)  # fmt: skip
def test_arguments_are_refused(change, error, said):
    with pytest.raises(error, match=said):
        AdamW8bit([parameter()], **change)


def test_a_seed_of_numpy_is_an_integer():
    """Kernels take no other."""
    assert type(AdamW8bit([parameter()], seed=np.uint64(2**64 - 1)).seed) is int


def test_parameters_and_gradients_are_refused():
    with pytest.raises(TypeError, match=r"got torch.float64 of shape \(64, 128\); leave it out"):
        AdamW8bit([parameter(dtype=torch.float64)])
    with pytest.raises(ValueError, match="make it contiguous first"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(128, 64).t())])
    embedding = torch.nn.Embedding(200, 64, sparse=True)
    optimizer = AdamW8bit(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ValueError, match=r"is sparse, which these optimizers do not take: use Embedding\(sparse=False\)"
    ):
        optimizer.step()


def test_groups_closures_and_rates():
    """Each group has its own numbers; a rate may be a tensor that is changed in place, or a number that a scheduler sets."""
    fast, slow = parameter(), parameter()
    rate = torch.tensor(0.1)
    optimizer = AdamW8bit([{"params": [fast], "lr": rate}, {"params": [slow], "lr": 0.001}], weight_decay=0.0)
    assert optimizer.step(lambda: fast.detach().sum()) == 64 * 128
    assert torch.allclose(fast.data, torch.tensor(0.9))
    assert torch.allclose(slow.data, torch.tensor(0.999))
    rate.zero_()
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.0, lambda step: 0.0])
    before = fast.data.clone(), slow.data.clone()
    optimizer.step()
    assert torch.equal(fast, before[0])
    assert torch.equal(slow, before[1])


def test_small_parameters_keep_float32_moments():
    small, large = parameter((4095,)), parameter((4096,))
    optimizer = AdamW8bit([small, large])
    optimizer.step()
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    assert optimizer.state[large]["exp_avg_codes"].dtype == torch.uint8


@pytest.mark.parametrize(("kind", "expected"), [(AdamW8bit, 2 + 8 / 256), (AdamW4bit, 1 + 8 / 128)])
def test_bytes_of_states_are_exact(kind, expected):
    p = parameter((64, 1024))
    optimizer = kind([p])
    optimizer.step()
    size = sum(
        value.numel() * value.element_size() for name, value in optimizer.state[p].items() if name != "step"
    )
    assert size == expected * p.numel()


def test_blocks_end_with_a_row():
    """A row whose gradients are large shares no scale with others."""
    p = parameter((64, 96))
    p.grad[0] *= 1e6
    optimizer = AdamW8bit([p])
    optimizer.step()
    scale = optimizer.state[p]["exp_avg_sq_scale"]
    assert scale.shape == (64, 1)
    assert (scale[1:] < scale[0] * 1e-5).all()


@pytest.mark.parametrize("options", [{"master": "24bit"}, {"bf16_stochastic_round": True}])
def test_bfloat16_parameters_learn_by_small_updates(options):
    """lr 1e-5 at 1, whose last place is 2^-8: the plain parameter stands still."""
    p, plain = parameter(dtype=torch.bfloat16), parameter(dtype=torch.bfloat16)
    optimizer, other = (
        AdamW8bit([one], lr=1e-5, weight_decay=0, **more) for one, more in ((p, options), (plain, {}))
    )
    for _ in range(250):
        optimizer.step()
        other.step()
    assert (plain == 1).all()
    # By the mean of 8192 elements that are 1 or one step below; or by the half step that nearly all master weights have gone.
    moved = 1 - float(p.detach().float().mean())
    expected, within = (2.0**-8, 0.02) if "master" in options else (250e-5, 0.1)
    assert moved == pytest.approx(expected, rel=within)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_with_the_same_bits(copied):
    model = model_of()
    optimizer = AdamW4bit(model.parameters(), lr=3e-3)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    trained(model, optimizer, 1)
    other, again = copied((model, optimizer))
    trained(model, optimizer, 1, 1)
    trained(other, again, 1, 1)
    assert same(model, other)


def test_a_loaded_rate_is_not_shared():
    rate = torch.tensor(0.1)
    saved = AdamW8bit([parameter()], lr=rate).state_dict()
    optimizer = AdamW8bit([parameter()])
    optimizer.load_state_dict(saved)
    rate.fill_(0.5)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_a_shard_without_rows_steps():
    """Of FSDP, on a rank beyond the rows."""
    p, state = torch.zeros(0, 512), {"step": torch.zeros(())}
    states = STATES["8bit"]
    for value in (None, p):
        for name, record in (("exp_avg", states.first), ("exp_avg_sq", states.second)):
            put_moment(state, name, p, record, value)
    slot = slot_of(p, p.clone(), state, 0, 0)
    Updates()([slot], Rule("adamw", states, 0.1, (0.9, 0.999), 1e-8, 0.0))
    assert state["step"] == 1
    assert moment_of(p, state, "exp_avg", states.first).shape == p.shape


def test_shards_of_a_vector_round_as_the_whole():
    """Stochastically, wherever a shard begins; what lies before it in its block stays as it was."""
    generator = torch.Generator().manual_seed(0)
    states, rule = (
        STATES["float32"],
        Rule("adamw", STATES["float32"], 0.01, (0.9, 0.999), 1e-8, 0.1, stochastic_round=True, seed=5),
    )
    p, g = (torch.randn(600, generator=generator).bfloat16() for _ in range(2))

    def stepped(begin, end):
        part = p[begin:end].clone()
        moments = [Moment(torch.zeros(end - begin)) for _ in range(2)]
        first, inside = divmod(begin, states.first.block)
        slot = Slot(part, g[begin:end].clone(), torch.zeros(()), *moments, None, 3, first, inside)
        Updates()([slot], rule)
        assert slot.step == 1
        return part, *(moment.codes for moment in moments)

    whole = stepped(0, 600)
    parts = [stepped(*ends) for ends in ((0, 200), (200, 301), (301, 600))]
    for expected, *found in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(found), expected)
    assert not torch.equal(p, whole[0])


def test_steps_by_address_count_as_writes(monkeypatch):
    """Of a parameter, and of a weight that FSDP2 gathers quantized, whose codes are old then."""
    monkeypatch.setattr(update, "_by_loop", lambda slot, rule: slot.p.numpy().fill(2) is None)
    dense = torch.ones(64, 128)
    gathered, plain = torch.nn.Parameter(CastOnGather(dense, SCHEMES["fp8_rowwise"])), parameter()
    gathered.grad = torch.ones_like(dense)
    versions = plain._version, gathered.known.writes
    AdamW8bit([plain, gathered]).step()
    assert (plain._version, gathered.known.writes) == (versions[0] + 1, versions[1] + 1)
    assert torch.equal(plain, dense)
    assert torch.equal(dense, torch.full_like(dense, 2))


def test_ranks_raise_for_a_step_that_was_left_out_in_the_same_step(monkeypatch):
    """Of sharded parameters the host waits for what a GPU says; of others it goes on, and raises once that is known."""
    known = []
    event = SimpleNamespace(query=lambda: bool(known), synchronize=lambda: known.append(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer = AdamW8bit([parameter()])
    optimizer._pending = [(torch.ones(1), event)]
    optimizer.step()
    monkeypatch.setattr(base, "is_sharded", lambda p: True)
    with pytest.raises(ValueError, match="an earlier step was not finite"):
        optimizer.step()
    assert optimizer._pending == []


def test_ranks_have_the_bits_of_one_process(tmp_path):
    """Through checkpoints too."""
    check_on_ranks("optim.states", str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [((4000, 64), 256, 1), ((32, 16, 3, 3), 256, 1), ((8, 512, 512), 256, 2), ((512,), 256, 0)],
)
def test_axes_that_count_rows(shape, block, expected):
    assert lead_axes(shape, block) == expected


@pytest.mark.parametrize(
    ("shape", "codes", "axis", "said"),
    [((4, 6, 6), (4, 36), 2, "inside its rows of states; shard it along the first axis"),
     ((8, 513), (8, 513), 1, "over 2 ranks, which do not divide it")],
)  # fmt: skip
def test_shardings_that_rows_do_not_have(shape, codes, axis, said):
    mesh = SimpleNamespace(size=lambda axis: 2)
    p = SimpleNamespace(shape=shape, device_mesh=mesh, placements=[Shard(axis)], to_local=None)
    with pytest.raises(ValueError, match=said):
        like(p, torch.zeros(codes), codes)
