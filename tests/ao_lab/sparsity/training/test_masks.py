"""Masks of weights in training."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from ao_lab import SparseTrainingConfig, finish_sparsity_, sparsify_, step_sparsity_
from ao_lab.sparsity.training import api, masks, products
from ao_lab.sparsity.training.masks import find_mask, stored_as, stored_dtype, zero_pruned_
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits
from fast.sparsity import compress, prune

# Counts of steps: read from their buffers when the host cannot know them, and not else.


@pytest.fixture
def reads(monkeypatch):
    """How many buffers were read at once, call by call."""
    found, read = [], masks._read
    monkeypatch.setattr(masks, "_read", lambda steps: found.append(len(steps)) or read(steps))
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
        monkeypatch.setattr(masks, "is_capturing", lambda steps, now=captured: now)
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
    assert masks.count([one, other, one]) == [1, 1, 1]
    other.fill_(5)
    assert masks.count([one, other]) == [6, 6]
    one.fill_(7)
    assert masks.count([one, other]) == [8, 8]
    assert masks.count([one, other]) == [9, 9]
    assert int(one) == 9


def test_tensors_that_do_not_count_writes_are_read():
    with torch.inference_mode():
        step = torch.zeros((), dtype=torch.int64)
        assert [masks.count([step]) for _ in range(2)] == [[1], [2]]


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
    for module in (api, masks):
        monkeypatch.setattr(module, "is_capturing", lambda steps: True)
    with pytest.raises(RuntimeError, match="the number of steps cannot be read; call it once before"):
        step_sparsity_(net)
    assert steps(net) == [0, 0]
    monkeypatch.setattr(masks, "is_capturing", lambda steps: False)
    monkeypatch.setattr(api, "is_capturing", lambda steps: False)
    step_sparsity_(net)
    for module in (api, masks):
        monkeypatch.setattr(module, "is_capturing", lambda steps: True)
    assert [step_sparsity_(net).step for _ in range(2)] == [2, 3]
    for module in (api, masks):
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


RECOMPUTED = SparseTrainingConfig(masks="recomputed")


def weight(dtype=torch.float32, shape=(8, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["fixed", "recomputed"])
def test_by_magnitude(dtype, masks):
    w = weight(dtype)
    config = SparseTrainingConfig(masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune(w)))
    config = SparseTrainingConfig(pattern="1:8", masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune(w, pattern="1:8")))
    config = SparseTrainingConfig(transposable=True, masks=masks)
    assert torch.equal(find_mask(w, config), torch.as_tensor(reference.prune_transposable(w)))


def test_fixed_masks_are_the_zeros_that_are_there():
    """By another score than magnitude: pruned are the largest; a group with one weight keeps one."""
    w = weight()
    kept = ~torch.as_tensor(reference.prune(w))
    kept[0, :4] = torch.tensor([False, True, False, False])
    sparse = torch.where(kept, w, 0)
    assert torch.equal(find_mask(sparse, SparseTrainingConfig()), kept)
    assert find_mask(sparse, RECOMPUTED)[0, :4].sum() == 2
    # Three of four somewhere: the zeros are no mask.
    sparse[1, :4] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert torch.equal(find_mask(sparse, SparseTrainingConfig()), torch.as_tensor(reference.prune(sparse)))


def test_a_weight_of_zeros_is_not_dropped_whole():
    mask = find_mask(torch.zeros(4, 8), SparseTrainingConfig())
    assert mask.tolist() == [[True, True, False, False] * 2] * 4


@pytest.mark.parametrize(
    "config", [SparseTrainingConfig(), RECOMPUTED, SparseTrainingConfig(warmup=1)], ids=str
)
def test_set_up_inside_inference_mode(config):
    """Trains as what was set up outside of it."""
    nets = [nn.Sequential(nn.Linear(16, 8)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    with torch.inference_mode():
        sparsify_(nets[0], config)
    sparsify_(nets[1], config)
    for net in nets:
        train(net.bfloat16(), range(3))
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_zeros_of_rows_are_no_transposable_mask():
    rows = torch.where(torch.as_tensor(reference.prune(weight())), weight(), 0)
    both = find_mask(rows, SparseTrainingConfig(transposable=True))
    assert int(both.T.reshape(-1, 4).sum(-1).max()) == 2
    transposed = torch.where(both, rows + 1, 0)
    assert torch.equal(find_mask(transposed, SparseTrainingConfig(transposable=True)), transposed != 0)


def test_the_mask_decides_what_becomes_zero():
    w = torch.tensor([[float("nan"), -1.0, float("inf"), -0.0]])
    zero_pruned_(w, torch.tensor([[False, True, False, False]]))
    assert w.view(torch.int32).tolist() == [[0, torch.tensor(-1.0).view(torch.int32).item(), 0, 0]]


def test_zeros_by_bits_are_those_of_the_mask():
    w, other = weight(), weight()
    mask = find_mask(w, RECOMPUTED)
    zero_pruned_(w, mask)
    zero_pruned_(other, pack_bits(mask))
    assert torch.equal(other, w)


@pytest.fixture
def kernels(monkeypatch):
    """The reference in the place of kernels, on the host."""
    monkeypatch.setattr(products, "_check", lambda x, name: None)
    ours = products.PRODUCTS["sparse_wgmma"]._replace(unsupported_reason=lambda w: None)
    monkeypatch.setitem(products.PRODUCTS, "sparse_wgmma", ours)


#: Every rule of gradients, and every phase.
STORED = (
    SparseTrainingConfig(products="sparse_wgmma", transposable=True),
    SparseTrainingConfig(products="sparse_wgmma", masks="recomputed", gradient="sr-ste", decay=0.1, every=2),
    SparseTrainingConfig(
        products="sparse_wgmma", masks="recomputed", gradient="straight-through", transposable=True
    ),
    SparseTrainingConfig(products="sparse_wgmma", masks="recomputed", warmup=1, cooldown=1, steps=4),
)


def sparse(config, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16()
    sparsify_(net, config)
    return net


def train(net, steps):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_sparsity_(net)


@pytest.mark.parametrize("config", STORED, ids=str)
def test_bits_train_as_bytes_do(kernels, monkeypatch, config):
    """Weights and masks after each step, the same bits; the attribute is bool, the buffer an eighth of it."""
    bits = sparse(config)
    monkeypatch.setattr(api, "stored_dtype", lambda config: torch.bool)
    whole = sparse(config)
    for step in range(5):
        for ours, theirs in zip(bits[::2], whole[::2], strict=True):
            assert torch.equal(ours.weight, theirs.weight)
            assert ours.sparse_mask.dtype == torch.bool
            assert torch.equal(ours.sparse_mask, theirs.stored_mask)
            assert torch.equal(ours.stored_mask, pack_bits(theirs.sparse_mask))
            assert ours.stored_mask.nbytes * 8 == theirs.stored_mask.nbytes == ours.weight.numel()
            assert theirs.sparse_mask is theirs.stored_mask
        train(bits, [step])
        train(whole, [step])
    finish_sparsity_(bits), finish_sparsity_(whole)
    assert all(torch.equal(a, b) for a, b in zip(bits.parameters(), whole.parameters(), strict=True))


def test_other_products_keep_bytes():
    assert stored_dtype(STORED[0]) == torch.uint8
    for name in ("dense", "cusparselt"):
        assert stored_dtype(SparseTrainingConfig(products=name)) == torch.bool


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, "0/1"], ids=["bytes", "bits", "numbers"])
@pytest.mark.parametrize("loads", ["sparse_wgmma", "dense"])
def test_saved_masks_load_however_they_were_stored(kernels, loads, dtype, assign):
    """Bytes of earlier versions and of other products; what was given stays as it is."""
    first = sparse(STORED[0])
    train(first, range(2))
    state = {key: value.clone() for key, value in first.state_dict().items()}
    for key, length in (("0.sparse_mask", 16), ("2.sparse_mask", 32)):
        assert state[key].dtype == torch.uint8
        state[key] = (
            stored_as(state[key], torch.bool, length).to(torch.uint8)
            if dtype == "0/1"
            else stored_as(state[key], dtype, length)
        )
    given = dict(state)
    other = sparse(SparseTrainingConfig(products=loads, transposable=True), seed=1)
    kept = other[0].stored_mask.dtype
    assert other.load_state_dict(state, strict=True, assign=assign) == ([], [])
    assert all(state[key] is given[key] for key in given)
    for ours, theirs in zip(other[::2], first[::2], strict=True):
        assert ours.stored_mask.dtype == kept == stored_dtype(ours.sparse)
        assert torch.equal(ours.sparse_mask, theirs.sparse_mask)
        assert torch.equal(ours.weight, theirs.weight)


def test_masks_of_another_shape_are_refused(kernels):
    net = sparse(STORED[0])
    state = net.state_dict() | {"0.sparse_mask": torch.ones(32, 8, dtype=torch.bool)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.sparse_mask"):
        net.load_state_dict(state)


def test_layers_that_share_bits(kernels):
    """One buffer; found for each in its own where a file gave each its own."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    net[1].weight = net[0].weight
    sparsify_(net, STORED[2])
    assert net[0].stored_mask is net[1].stored_mask
    net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
    net[1].weight = net[0].weight
    train(net, range(1))
    assert net[0].stored_mask is not net[1].stored_mask
    wanted = torch.as_tensor(reference.prune_transposable(net[0].weight.detach()))
    assert all(torch.equal(layer.sparse_mask, wanted) for layer in copy.deepcopy(net))


def test_what_backward_keeps(kernels):
    """Of a mask bits alone."""
    net, kept = sparse(STORED[2])[0], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        net(torch.ones(4, 16, dtype=torch.bfloat16).requires_grad_())
    assert sorted(t.nbytes for t in kept) == [32 * 2, 4 * 16 * 2, 32 * 16 * 2]
    assert sum(t.dtype == torch.uint8 for t in kept) == 1


@pytest.mark.parametrize(("masks", "kernel"), [("fixed", "keep"), ("recomputed", "prune")])
def test_a_step_is_one_launch(kernels, monkeypatch, masks, kernel):
    """Fixed masks take no more of the host than those that are found: beside the count of steps torch is asked for nothing."""
    net, told = sparse(SparseTrainingConfig(products="sparse_wgmma", masks=masks, transposable=True)), []
    step_sparsity_(net)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module, name in ((compress, "keep"), (prune, "prune")):
        monkeypatch.setattr(
            module, "execute", lambda f, r, v, operands, name=name: told.append(name) or operands[-1]
        )
    monkeypatch.setattr(api, "is_capturing", lambda steps: False)
    monkeypatch.setattr("ao_lab.sparsity.training.masks.is_capturing", lambda steps: False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step_sparsity_(net)
    assert told == [kernel] * 2
    called = {event.name for event in seen.events() if event.name.startswith("aten::")}
    # On a CPU the reference gets copies.
    alike = {"aten::detach", "aten::clone", "aten::empty_strided", "aten::copy_"}
    counted = {"aten::_foreach_add_", "aten::add_"}
    assert called == (counted if masks == "fixed" else counted | alike)
