"""Linear layers with one input share its cast: the same codes, none after a change, nothing kept longer than backward asks."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fast
from ao_lab.training import casts, reuse
from ao_lab.training.autograd import training_linear
from reference.training import RECIPES

SHAPE = M, K, N = 32, 64, 32


@pytest.fixture(autouse=True)
def none_before():
    reuse.forget_copies()
    yield
    reuse.forget_copies()


@pytest.fixture
def made(monkeypatch):
    """Shapes of the matrices that were quantized along both axes."""
    found, quantize_both = [], fast.quantize_both

    def counted(x, *args, **kwargs):
        found.append(tuple(x.shape))
        return quantize_both(x, *args, **kwargs)

    monkeypatch.setattr(casts.fast, "quantize_both", counted)
    return found


def computed(x):
    """x as the output of a layer before."""
    return x.requires_grad_() + 0


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = computed(torch.randn(M, K, generator=generator).bfloat16())
    return x, [torch.randn(N, K, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def saved(y):
    """The codes that a step keeps for the weight gradient."""
    return y.grad_fn.saved_tensors[1]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_one_cast_for_three_layers(name, made):
    x, weights = tensors()
    outputs = [training_linear(x, w, None, RECIPES[name]) for w in weights]
    assert made == [(M, K)]
    assert len({saved(y).data_ptr() for y in outputs}) == 1
    reuse.forget_copies()
    assert all(
        torch.equal(y, training_linear(x.clone(), w, None, RECIPES[name]))
        for y, w in zip(outputs, weights, strict=True)
    )


def test_gradients_are_those_of_own_casts():
    x, weights = tensors()
    g, grads = torch.ones(M, N, dtype=x.dtype), []
    for copy in (lambda t: t, lambda t: t * 1):
        leaf = x.detach().clone().requires_grad_()
        given = leaf + 0
        sum(training_linear(copy(given), w, None, RECIPES["rowwise"]) for w in weights).backward(g)
        grads.append([leaf.grad, *(w.grad for w in weights)])
        for w in weights:
            w.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_change_in_place_is_seen(made):
    x, (w, other, _) = tensors()
    first = training_linear(x, w, None, RECIPES["rowwise"])
    x.mul_(2)
    second = training_linear(x, other, None, RECIPES["rowwise"])
    assert made == [(M, K)] * 2
    assert not torch.equal(first.grad_fn.saved_tensors[2], second.grad_fn.saved_tensors[2])


def test_other_data_are_seen(made):
    x, (w, *_) = tensors()
    first = training_linear(x, w, None, RECIPES["rowwise"])
    x.data = tensors(1)[0]
    assert not torch.equal(first, training_linear(x, w, None, RECIPES["rowwise"]))
    assert made == [(M, K)] * 2


def refilled(x, new):
    x.numpy()[:] = new.numpy()


@pytest.mark.parametrize(
    "write", [refilled, lambda x, new: x.data.copy_(new), lambda x, new: x.detach().data.copy_(new)]
)
@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
def test_a_buffer_that_is_filled_again(write, name):
    """Past autograd's counter, while the graph of the first layer lives."""
    (w, *_), (old, new) = tensors()[1], torch.randn(2, M, K)
    x, weight = old.clone(), w.detach().float().requires_grad_()
    first = training_linear(x, weight, None, RECIPES[name])
    write(x, new)
    second = training_linear(x, weight, None, RECIPES[name])
    assert torch.equal(second, training_linear(new.clone(), weight, None, RECIPES[name]))
    assert not torch.equal(first, second)


def test_other_operands_and_other_inputs_are_cast_anew(made):
    x, (w, *_) = tensors()
    kept = [
        training_linear(one, w, None, RECIPES[name])
        for one, name in ((x, "rowwise"), (x, "mxfp8"), (x.clone(), "mxfp8"))
    ]
    assert len(kept) == len(made) == 3


def test_nothing_outlives_the_graph(made):
    """An input that stays does not hold its codes: neither after backward, nor after the output is dropped."""
    x, (w, *_) = tensors()
    for backward in (True, False):
        y = training_linear(x, w, None, RECIPES["rowwise"])
        codes, rows = weakref.ref(saved(y)), weakref.ref(reuse._last[-1].rows.codes)
        if backward:
            y.sum().backward()
        del y
        assert codes() is None
        assert rows() is None
    training_linear(x, w, None, RECIPES["rowwise"])
    assert made.count((M, K)) == 3  # a later step starts anew


def test_the_copy_for_the_output_goes_with_the_input():
    x, (w, *_) = tensors()
    gc.disable()
    try:
        y = training_linear(x, w, None, RECIPES["rowwise"])
        rows = weakref.ref(reuse._last[-1].rows.codes)
        del x
        assert rows() is None
        assert saved(y) is not None
    finally:
        gc.enable()


def test_random_bits_are_not_shared():
    x, (w, other, _) = tensors()
    kept = [training_linear(x, one, None, RECIPES["mxfp4"]) for one in (w, other)]
    assert not reuse._last
    assert saved(kept[0]).data_ptr() != saved(kept[1]).data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    x, weights = tensors()
    grads = []

    def layers(x):
        x = x + 0
        return sum(training_linear(x, w, None, RECIPES["rowwise"]) for w in weights)

    for run in (layers, lambda x: checkpoint(layers, x, use_reentrant=reentrant)):
        leaf = x.detach().clone().requires_grad_()
        run(leaf).sum().backward()
        grads.append([leaf.grad, *(w.grad for w in weights)])
        for w in weights:
            w.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
