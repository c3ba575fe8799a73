"""Counts of steps: read from their buffers when the host cannot know them, and not else."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab import SparseTrainingConfig, sparsify_, step_sparsity_
from ao_lab.sparsity.training import api, counts


@pytest.fixture
def reads(monkeypatch):
    """How many buffers were read at once, call by call."""
    found, read = [], counts._read
    monkeypatch.setattr(counts, "_read", lambda steps: found.append(len(steps)) or read(steps))
    return found


def model(**fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    sparsify_(net, SparseTrainingConfig(masks="recomputed", **fields))
    return net


def steps(net):
    return [int(net[0].sparse_step), int(net[2].sparse_step)]


def test_ranks_read_it_in_every_step(reads, monkeypatch):
    """A collective may have written to the buffer, which torch does not count."""
    net = model()
    step_sparsity_(net)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    net[0].sparse_step.numpy()[...] = 41
    net[2].sparse_step.numpy()[...] = 41
    assert step_sparsity_(net).step == 42
    assert reads == [2, 2]


def test_an_optimizer_beside_steps_that_a_graph_counts(monkeypatch):
    """Replays count where the host does not see it, so that nothing is missing."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for captured in (False, True):
        monkeypatch.setattr(counts, "is_capturing", lambda steps, now=captured: now)
        step_sparsity_(net)
    monkeypatch.undo()
    net(torch.randn(4, 16)).sum().backward()
    for _ in range(2):
        optimizer.step()
    other = model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="called twice"):
        optimizer.step()


def test_a_count_is_read_once(reads):
    net = model()
    assert [step_sparsity_(net).step for _ in range(3)] == [1, 2, 3]
    assert (reads, steps(net)) == ([2, 0, 0], [3, 3])


def test_what_the_host_cannot_know_is_read_again(reads):
    """Values that were loaded or written, buffers of another module or in another place."""
    net, other = model(), model()
    for _ in range(4):
        step_sparsity_(net)
    step_sparsity_(other)
    other.load_state_dict(net.state_dict())
    assert step_sparsity_(other).step == 5
    copied = copy.deepcopy(other)
    assert step_sparsity_(copied).step == 6
    with torch.no_grad():
        copied[0].sparse_step.fill_(9)
    assert step_sparsity_(copied).step == 10
    assert steps(copied) == [10, 7]
    copied._apply(lambda t: t.clone())
    assert step_sparsity_(copied).step == 11
    copied[0].sparse_step.data = torch.tensor(20)
    assert step_sparsity_(copied).step == 21
    assert reads == [2, 0, 0, 0, 2, 2, 2, 1, 2, 1]
    assert steps(other) == [5, 5]


def test_memory_that_is_shared_is_counted_once():
    """Two tensors of one memory, of which one is written to."""
    one = torch.zeros((), dtype=torch.int64)
    other = torch.empty(0, dtype=torch.int64).set_(one.untyped_storage(), 0, ())
    assert counts.count([one, other, one]) == [1, 1, 1]
    other.fill_(5)
    assert counts.count([one, other]) == [6, 6]
    one.fill_(7)
    assert counts.count([one, other]) == [8, 8]
    assert counts.count([one, other]) == [9, 9]
    assert int(one) == 9


def test_tensors_that_do_not_count_writes_are_read():
    with torch.inference_mode():
        step = torch.zeros((), dtype=torch.int64)
        assert [counts.count([step]) for _ in range(2)] == [[1], [2]]


class Waits(TorchDispatchMode):
    """What the host waits for."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten._to_copy.default,
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("fields", [{"transposable": True}, {}, {"warmup": 4}, {"every": 2}], ids=str)
def test_the_host_waits_for_nothing(fields):
    net = model(**fields)
    step_sparsity_(net)
    for _ in range(5):
        with Waits() as waits:
            step_sparsity_(net)
        assert waits.found == 0


def test_masks_are_written_where_they_are():
    """What has taken their address reads the new ones."""
    net = model(transposable=True)
    mask = net[0].sparse_mask
    before, address = mask.clone(), mask.data_ptr()
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight.flip(1))
    step_sparsity_(net)
    assert net[0].sparse_mask is mask
    assert mask.data_ptr() == address
    assert torch.equal(mask, before.flip(1))


def test_captures(monkeypatch, reads):
    """A number has to be known in a capture, and says nothing after it, as replays add to the buffer."""
    net = model()
    for module in (api, counts):
        monkeypatch.setattr(module, "is_capturing", lambda steps: True)
    with pytest.raises(RuntimeError, match="the number of steps cannot be read; call it once before"):
        step_sparsity_(net)
    assert steps(net) == [0, 0]
    monkeypatch.setattr(counts, "is_capturing", lambda steps: False)
    monkeypatch.setattr(api, "is_capturing", lambda steps: False)
    step_sparsity_(net)
    for module in (api, counts):
        monkeypatch.setattr(module, "is_capturing", lambda steps: True)
    assert [step_sparsity_(net).step for _ in range(2)] == [2, 3]
    for module in (api, counts):
        monkeypatch.setattr(module, "is_capturing", lambda steps: False)
    assert [step_sparsity_(net).step for _ in range(2)] == [4, 5]
    assert reads == [2, 0, 0, 2, 2]


@pytest.mark.parametrize("fields", [{"warmup": 1}, {"cooldown": 1, "steps": 9}, {"every": 2}], ids=str)
def test_steps_that_differ_are_no_graph(monkeypatch, fields):
    net = model(**fields)
    step_sparsity_(net)
    monkeypatch.setattr(api, "is_capturing", lambda steps: True)
    with pytest.raises(RuntimeError, match="a CUDA graph repeats one step, and those of 0 differ"):
        step_sparsity_(net)
    assert steps(net) == [1, 1]
