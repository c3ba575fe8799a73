"""Steps that repeat launch what the general way launches, and are kept as long as choices stand. Layers with one input share
its cast: the same codes, none after a change, nothing kept longer than backward asks."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fast
from ao_lab.gemm import choices
from ao_lab.tensor.quantized_tensor import quantized
from ao_lab.training import autograd, casts, reuse
from ao_lab.training.autograd import PreparedLinear, training_linear
from ao_lab.training.fsdp import gather_recipe
from reference.training.recipe import RECIPES
from tests.fast.kernels.compiling.recorded_launches import Flat, Recorded
from tests.support import cublaslt

M, K, N = 256, 128, 384
SERVED = ("tensorwise", "rowwise")


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is left of other tests, nor for them."""
    reuse.forget()
    reuse.forget_copies()
    yield
    reuse.forget()
    reuse.forget_copies()


@pytest.fixture
def recorded(monkeypatch):
    """CPU tensors pass for a GPU's, and products of codes are those of `torch._scaled_mm`, whose arguments are noted."""
    found = Recorded(monkeypatch, Flat)
    found.products = []

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        cublaslt.check(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        operands = [(t.shape, t.stride(), t.dtype) for t in (a, b, scale_a, scale_b)]
        found.products.append((operands, bias is not None, out_dtype, use_fast_accum))
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(reuse, "has_kernels", lambda x: True)
    monkeypatch.setattr(reuse, "select_product", lambda *_: "scaled_mm")
    monkeypatch.setattr("ao_lab.training.products.select_product", lambda *_: "scaled_mm")
    return found


def tensors(leading=(M,), bias=False, dtype=torch.bfloat16, n=N):
    x = torch.randn(*leading, K, dtype=dtype).requires_grad_()
    w = torch.randn(n, K, dtype=dtype).requires_grad_()
    return x, w, torch.randn(n, dtype=dtype).requires_grad_() if bias else None


def run(recorded, name, x, w, bias):
    """What one step launches, without addresses, and its products; and the class that computed it."""
    launched, multiplied = len(recorded.straight), len(recorded.products)
    y = training_linear(x, w, bias, RECIPES[name])
    torch.autograd.grad(y, [t for t in (x, w, bias) if t is not None], torch.ones_like(y))
    tails = [[one for one in given if not is_address(one)] for given in recorded.straight[launched:]]
    return tails, recorded.products[multiplied:], type(y.grad_fn).__name__


def is_address(one):
    return isinstance(one, int) and one > 2**24


@pytest.mark.parametrize("leading", [(M,), (2, M // 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", SERVED)
def test_a_repeated_step_is_the_general_one(name, bias, leading, recorded, monkeypatch):
    x, w, b = tensors(leading, bias)
    with monkeypatch.context() as patched:
        patched.setattr(autograd, "prepared_step", lambda *_: None)
        run(recorded, name, x, w, b)  # compiles
        general = run(recorded, name, x, w, b)
    prepared = run(recorded, name, x, w, b)
    assert general[2] in ("TrainingLinearBackward", "UnsafeViewBackward0")
    assert prepared[2] == "PreparedLinearBackward"
    assert prepared[:2] == general[:2]
    assert len(prepared[0]) == {"rowwise": 7, "tensorwise": 8}[name]
    assert len(prepared[1]) == 3


@pytest.mark.parametrize("n", [N, K], ids=["", "square"])
@pytest.mark.parametrize("name", SERVED)
def test_a_repeated_step_of_gathered_codes_is_the_general_one(name, n, recorded, monkeypatch):
    """The same launches, products and operands; with one scale in all the weight's codes are turned, and that is all. Of a
    square weight shapes do not say which way round it lies."""
    monkeypatch.setattr(casts, "has_kernels", lambda x: True)
    recipe = gather_recipe(RECIPES[name])
    monkeypatch.setitem(RECIPES, name, recipe)
    x, w, _ = tensors(n=n)
    gathered = nn.Parameter(quantized(w.detach(), recipe.output.b.scheme))
    assert run(recorded, name, x, w, None)[2] == "TrainingLinearBackward"
    with monkeypatch.context() as patched:
        patched.setattr(autograd, "prepared_step", lambda *_: None)
        run(recorded, name, x, gathered, None)
        general = run(recorded, name, x, gathered, None)
    prepared = run(recorded, name, x, gathered, None)
    assert general[2] == "TrainingLinearBackward"
    assert prepared[2] == "PreparedLinearBackward"
    assert prepared[:2] == general[:2]
    assert len(prepared[0]) == {"rowwise": 7, "tensorwise": 5}[name]
    transposed = nn.Parameter(gathered.detach().t())
    assert reuse.find(x, transposed, None, recipe, "auto") is None


@pytest.mark.parametrize("name", ["rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"])
def test_other_recipes_are_asked_once(name, recorded, monkeypatch):
    x, w, _ = tensors()
    assert reuse.find(x, w, None, RECIPES[name], "auto") is None
    monkeypatch.setattr(reuse, "_problem", lambda *_: pytest.fail("asked again"))
    assert reuse.find(x, w, None, RECIPES[name], "auto") is None


def test_many_layers_before_the_first_backward(recorded):
    x, w, _ = tensors()
    recipe = RECIPES["rowwise"]
    outputs = [training_linear(x, w, None, recipe) for _ in range(3)]
    assert all(isinstance(found, int) for found in reuse._steps.values())
    torch.autograd.grad(outputs[0], (x, w), torch.ones(M, N, dtype=x.dtype))
    assert reuse.find(x, w, None, recipe, "auto") is not None


@pytest.mark.parametrize(
    "why", ["x", "w", "no_grad", "kernel", "float32", "a mode", "a kind of weight", "K", "bias"]
)
def test_what_has_no_prepared_step(why, recorded, monkeypatch):
    x, w, bias = tensors(dtype=torch.float32 if why == "float32" else torch.bfloat16, bias=why == "bias")
    recipe, kernel = RECIPES["rowwise"], "scaled_mm" if why == "kernel" else "auto"
    for _ in range(2):
        run(recorded, "rowwise", x, w, bias)
    assert (reuse.find(x, w, bias, recipe, "auto") is None) == (why == "float32")
    if why in "xw":
        x, w = (t.detach() if name == why else t for name, t in (("x", x), ("w", w)))
    if why == "a kind of weight":
        w = w.as_subclass(type("Other", (torch.Tensor,), {}))
    if why == "K":
        x = x.detach().reshape(M // 2, 2 * K).requires_grad_()
    if why == "bias":
        bias = bias[:1].detach().requires_grad_()
    mode = TorchDispatchMode() if why == "a mode" else nullcontext()
    with torch.set_grad_enabled(why != "no_grad"), mode:
        assert reuse.find(x, w, bias, recipe, kernel) is None


def test_choices_and_determinism_have_steps_of_their_own(recorded):
    x, w, _ = tensors()
    recipe = RECIPES["rowwise"]
    for _ in range(2):
        run(recorded, "rowwise", x, w, None)
    first = reuse.find(x, w, None, recipe, "auto")
    choices.changed()
    assert reuse.find(x, w, None, recipe, "auto") not in (None, first)
    torch.use_deterministic_algorithms(True)
    try:
        assert reuse.find(x, w, None, recipe, "auto") not in (None, first)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(reuse._steps) == 3


def test_keys_know_devices_and_the_bias(recorded):
    """Stand-ins: what a key reads of tensors."""
    x, w, bias = tensors(bias=True)
    kinds = [None, bias, bias.double(), bias[:2]]
    for one in kinds:
        reuse.find(x, w, one, RECIPES["rowwise"], "auto")
    assert len(reuse._steps) == len(kinds)
    key = next(iter(reuse._steps))
    assert key.count(torch.device("cpu")) == 2


def test_schemes_of_x_and_its_transpose_have_to_be_one(recorded):
    x, w, _ = tensors()
    recipe = RECIPES["rowwise"]
    mixed = replace(recipe, weight_grad=replace(recipe.weight_grad, b=RECIPES["tensorwise"].weight_grad.b))
    assert reuse._problem(x, w, None, recipe) is not None
    assert reuse._problem(x, w, None, mixed) is None
    turned = replace(recipe, weight_grad=replace(recipe.weight_grad, a=RECIPES["tensorwise"].weight_grad.a))
    assert reuse._problem(x, w, None, turned) is None


def test_a_capture_makes_its_own_copies(recorded, monkeypatch):
    """What was made before a capture is no part of its graph."""
    x, w, _ = tensors()
    for _ in range(2):
        run(recorded, "rowwise", x, w, None)
    before = training_linear(x, w, None, RECIPES["rowwise"])
    for module in (reuse, autograd):
        monkeypatch.setattr(module, "is_captured", lambda x: True)
    launched = len(recorded.straight)
    captured = training_linear(x, w, None, RECIPES["rowwise"])
    assert len(recorded.straight) == launched + 3  # maxima, tiles, rows of the weight
    assert captured.grad_fn.saved_tensors[1].data_ptr() != before.grad_fn.saved_tensors[1].data_ptr()


def test_backward_lets_go_of_shared_copies(recorded):
    x, w, _ = tensors()
    for _ in range(2):
        run(recorded, "rowwise", x, w, None)
    x = x + 0  # computed by a graph
    y = training_linear(x, w, None, RECIPES["rowwise"])
    assert reuse._last
    y.backward(torch.ones_like(y))
    assert not reuse._last


def test_looked_for_again_after_another_backward_alone(recorded, monkeypatch):
    """However many layers a model has before the first backward."""
    x, w, _ = tensors()
    asked, prepared = [], reuse._prepared
    monkeypatch.setattr(reuse, "_prepared", lambda *given: asked.append(1) or prepared(*given))
    outputs = [training_linear(x, w, None, RECIPES["rowwise"]) for _ in range(300)]
    assert len(asked) == 1
    outputs[0].backward(torch.ones_like(outputs[0]))
    assert reuse.find(x, w, None, RECIPES["rowwise"], "auto") is not None


def test_layers_with_one_input_share_its_cast(recorded):
    x, w, _ = tensors()
    run(recorded, "rowwise", x, w, None)
    run(recorded, "rowwise", x, w, None)
    launched, x = len(recorded.straight), x + 0  # computed by a graph
    first, second = (training_linear(x, w, None, RECIPES["rowwise"]) for _ in range(2))
    kept = [y.grad_fn.saved_tensors[1].data_ptr() for y in (first, second)]
    assert kept[0] == kept[1]
    assert isinstance(first.grad_fn, PreparedLinear._backward_cls)
    assert len(recorded.straight) == launched + 2 + 2 * 1


def test_forgotten_where_there_are_too_many(recorded, monkeypatch):
    monkeypatch.setattr(reuse, "MOST", 2)
    for m in (32, 64, 96):
        x, w, _ = tensors((m,))
        reuse.find(x, w, None, RECIPES["rowwise"], "auto")
        assert len(reuse._steps) <= 2


def test_a_layer_that_is_prepared_when_it_is_computed_again(recorded):
    """Activation checkpointing compares what both computations keep: shapes, dtypes and devices."""
    x, w, _ = tensors()
    second = torch.randn(K, N, dtype=x.dtype).requires_grad_()

    def block(x):
        for _ in range(2):
            x = training_linear(
                training_linear(x, w, None, RECIPES["rowwise"]), second, None, RECIPES["rowwise"]
            )
        return x

    y = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
    torch.autograd.grad(y, (x, w, second), torch.ones_like(y))
    assert any(isinstance(found, reuse.Step) for found in reuse._steps.values())
    y = checkpoint(block, x, use_reentrant=False)
    torch.autograd.grad(y, (x, w, second), torch.ones_like(y))


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


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = computed(torch.randn(M, K, generator=generator).bfloat16())
    return x, [torch.randn(N, K, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def saved(y):
    """The codes that a step keeps for the weight gradient."""
    return y.grad_fn.saved_tensors[1]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_one_cast_for_three_layers(name, made):
    x, weights = inputs()
    outputs = [training_linear(x, w, None, RECIPES[name]) for w in weights]
    assert made == [(M, K)]
    assert len({saved(y).data_ptr() for y in outputs}) == 1
    reuse.forget_copies()
    assert all(
        torch.equal(y, training_linear(x.clone(), w, None, RECIPES[name]))
        for y, w in zip(outputs, weights, strict=True)
    )


def test_gradients_are_those_of_own_casts():
    x, weights = inputs()
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
    x, (w, other, _) = inputs()
    first = training_linear(x, w, None, RECIPES["rowwise"])
    x.mul_(2)
    second = training_linear(x, other, None, RECIPES["rowwise"])
    assert made == [(M, K)] * 2
    assert not torch.equal(first.grad_fn.saved_tensors[2], second.grad_fn.saved_tensors[2])


def test_other_data_are_seen(made):
    x, (w, *_) = inputs()
    first = training_linear(x, w, None, RECIPES["rowwise"])
    x.data = inputs(1)[0]
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
    (w, *_), (old, new) = inputs()[1], torch.randn(2, M, K)
    x, weight = old.clone(), w.detach().float().requires_grad_()
    first = training_linear(x, weight, None, RECIPES[name])
    write(x, new)
    second = training_linear(x, weight, None, RECIPES[name])
    assert torch.equal(second, training_linear(new.clone(), weight, None, RECIPES[name]))
    assert not torch.equal(first, second)


def test_other_operands_and_other_inputs_are_cast_anew(made):
    x, (w, *_) = inputs()
    kept = [
        training_linear(one, w, None, RECIPES[name])
        for one, name in ((x, "rowwise"), (x, "mxfp8"), (x.clone(), "mxfp8"))
    ]
    assert len(kept) == len(made) == 3


def test_nothing_outlives_the_graph(made):
    """An input that stays does not hold its codes: neither after backward, nor after the output is dropped."""
    x, (w, *_) = inputs()
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
    x, (w, *_) = inputs()
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
    x, (w, other, _) = inputs()
    kept = [training_linear(x, one, None, RECIPES["mxfp4"]) for one in (w, other)]
    assert not reuse._last
    assert saved(kept[0]).data_ptr() != saved(kept[1]).data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    x, weights = inputs()
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
