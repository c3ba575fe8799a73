"""Products that a weight keeps prepared: the launches of the ordinary call, and that call wherever something differs."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ao_lab
from ao_lab import QuantizedTensor
from ao_lab.gemm import choices, select
from ao_lab.gemm.choices import Choice, Problem
from ao_lab.tensor import matmul_ops
from ao_lab.tensor.matmul_ops import MOST_SHAPES
from fast.cpu import products
from fast.launch import launcher
from tests.fast.kernels.compiling.recorded_launches import Flat, Nested
from tests.support.models.gpu_layers import (
    CONFIGS,
    DYNAMIC,
    PRESHUFFLED,
    ROWS,
    WIDTH,
    addresses_of,
    given,
    inputs,
    kept,
    layer,
    pretend,
    run,
)


@pytest.fixture(params=[Flat, Nested])
def gpu(monkeypatch, request):
    """CPU tensors that pass for a GPU's."""
    return pretend(monkeypatch, request.param)


#: Several rows of codes are torch's product, or go by descriptors (`tests/fast/kernels/test_scaled_mm.py`).
SEVERAL = ("int4", "int8", *(f"{name}{PRESHUFFLED}" for name in ("int8", *DYNAMIC)))
SHAPES = {
    name: [(), (1,), (1, 1), *([(4,), (2, 3)] if name in SEVERAL else [])]
    for name in dict.fromkeys([*CONFIGS, *SEVERAL])
}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in SHAPES for shape in SHAPES[name]])
@pytest.mark.parametrize("bias", [False, True])
def test_launches_are_those_of_the_call(gpu, name, bias, shape):
    """The same kernels with the same arguments, but for memory that is made anew."""
    one = layer(name, bias)
    run(gpu, one, inputs(*shape))
    programs, x = kept(one).programs, inputs(*shape)
    (known,) = programs.items()
    programs[known[0]] = None
    _, looked_up, ordinary = run(gpu, one, x)
    assert 0 < looked_up <= len(ordinary)
    programs.update([known])
    y, looked_up, launches = run(gpu, one, x)
    assert looked_up == 0
    assert y.shape == (*shape, ROWS)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    fixed = {x.data_ptr(), *addresses_of(one)}
    assert [given(one, fixed) for one in launches] == [given(one, fixed) for one in ordinary]
    assert y.data_ptr() in launches[-1]
    assert fixed <= {value for launch in launches for value in launch if isinstance(value, int)}


@pytest.mark.parametrize("name", ["float8 by float8", "static int8"])
def test_the_codes_of_inputs_are_those_that_are_multiplied(gpu, name):
    """What the first launch writes is what the second one reads: codes and scales of rows, under a static scale too."""
    one = layer(name)
    run(gpu, one, inputs(1))
    _, _, launches = run(gpu, one, inputs(1))
    made = [{v for v in launch if isinstance(v, int) and v > 1 << 32} for launch in launches]
    parts = {part.data_ptr() for part in one.weight.parts.values() if part is not None}
    assert len(made) == 2
    assert len(made[0] & made[1]) == 2  # codes and scales
    static = {part.data_ptr() for part in (one.weight.parts.get("input_scale"),) if part is not None}
    assert parts - static <= made[1]
    assert parts & made[0] == static


def unaligned(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


OTHERS = {
    "another shape": lambda x: inputs(2),
    "another dtype": lambda x: x.half(),
    "an odd address": unaligned,
    "other strides": lambda x: torch.cat([x, x], 1)[:, ::2],
    "a negative view": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_inputs_are_looked_up(gpu, other):
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    assert run(gpu, one, x)[1] == 0
    before = sum(gpu.counts())
    with torch.no_grad():
        program = kept(one)(OTHERS[other](x), None)
    assert program is None
    assert sum(gpu.counts()) == before
    y, *_ = run(gpu, one, OTHERS[other](x))
    assert sum(gpu.counts()) > before
    assert y.shape[-1] == ROWS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_of_no_memory_are_not_multiplied(gpu):
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    assert kept(one)(x.to_sparse(), None) is None
    nested = torch.nested.nested_tensor([x[0], x[0]])
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError)):
        one(nested)


def test_other_biases_are_looked_up(gpu):
    one = layer(bias=True)
    run(gpu, one, inputs(1))
    prepared = kept(one)
    x = inputs(1)
    assert prepared(x, one.bias) is not None
    for bias in (None, one.bias.float(), unaligned(one.bias), torch.stack([one.bias] * 2, 1)[:, 0]):
        assert prepared(x, bias) is None


def test_parts_are_read_where_they_lie(gpu):
    """In place, in other memory, and exchanged."""
    one, other = layer(), layer(seed=1)
    x = inputs(1)
    run(gpu, one, x)
    one.weight.codes.data = one.weight.codes.clone()
    _, looked_up, launches = run(gpu, one, x)
    assert looked_up == 0
    assert one.weight.codes.data_ptr() in launches[0]
    one.weight.codes.data = unaligned(one.weight.codes)
    assert kept(one)(x, None) is None
    one, was = layer(), kept(one)
    run(gpu, one, x)
    one.weight.data = other.weight.data
    assert "_settled" not in vars(one.weight)
    run(gpu, one, x)
    _, looked_up, launches = run(gpu, one, x)
    assert looked_up == 0
    assert other.weight.codes.data_ptr() in launches[0]
    assert was is not kept(one)


def columns(name):
    """A layer whose weight is the first half of a wider one's columns: its parts are views with strides."""
    one, wide = layer(name), nn.Sequential(nn.Linear(2 * WIDTH, ROWS)).bfloat16().requires_grad_(False)
    ao_lab.quantize_(wide, CONFIGS[name]())
    one.weight = nn.Parameter(wide[0].weight[:, :WIDTH], requires_grad=False)
    assert not one.weight.codes.is_contiguous()
    return one


@pytest.mark.parametrize("name", ["int4", "int8 by int8"])
@pytest.mark.parametrize("another_first", [False, True])
def test_parts_with_strides_are_copied(gpu, name, another_first):
    """Kernels read rows one behind the other: every call makes them so, whichever weight was first of its shape."""
    x = inputs(1)
    if another_first:
        run(gpu, layer(name), x)
    one = columns(name)
    run(gpu, one, x)
    before = sum(gpu.counts())
    assert kept(one)(x, None) is None
    y, _, launches = run(gpu, one, x)
    assert sum(gpu.counts()) > before
    assert y.shape == (1, ROWS)
    assert one.weight.codes.data_ptr() not in [value for launch in launches for value in launch]


def test_parts_that_get_strides_are_copied(gpu):
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    assert kept(one)(x, None) is not None
    one.weight.codes.data = columns("int4").weight.codes
    assert kept(one)(x, None) is None


def test_a_copy_prepares_its_own(gpu):
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    twin = copy.deepcopy(one)
    run(gpu, twin, x)
    _, looked_up, launches = run(gpu, twin, x)
    assert looked_up == 0
    assert twin.weight.codes.data_ptr() in launches[0]
    assert one.weight.codes.data_ptr() not in launches[0]


def test_listeners_hear(gpu, monkeypatch):
    """Hooks of Triton, modes of torch, and gradients."""
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    monkeypatch.setattr(launcher.HOOKS, "launch_enter_hook", lambda *given: None)
    before = gpu.counts()
    run(gpu, one, x)
    assert gpu.counts() == (before[0] + 1, before[1])
    monkeypatch.undo()


def test_graphs_have_the_product_alone(gpu, monkeypatch):
    """Of a shape that is new while one is captured; a program that is there runs."""
    one, x = layer("int8 by int8"), inputs(1)
    run(gpu, layer("int8 by int8"), x)  # compiles
    monkeypatch.setattr(matmul_ops, "is_captured", lambda: True)
    for _ in range(2):
        _, looked_up, launches = run(gpu, one, x)
        assert (looked_up, len(launches)) == (2, 2)


def test_programs_run_in_graphs(gpu, monkeypatch):
    one, x = layer("int8 by int8"), inputs(1)
    run(gpu, one, x)
    monkeypatch.setattr(matmul_ops, "is_captured", lambda: True)
    _, looked_up, launches = run(gpu, one, x)
    assert (looked_up, len(launches)) == (0, 2)


def test_modes_see_the_product(gpu):
    one, x, seen = layer(), inputs(1), []
    run(gpu, one, x)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Mode():
        one(x)
    assert seen


def test_autocast_is_the_dispatchers(gpu):
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(gpu, one, x)[1] == 1
    assert run(gpu, one, x)[1] == 0


def test_choices_are_followed(gpu, monkeypatch):
    """What is tuned later, and what is pinned then."""
    one, x = layer(), inputs(1)
    run(gpu, one, x)
    device = x.device
    monkeypatch.setattr(choices, "_tables", {device: choices.Choices("one")})
    keys = select.inference_keys(one.weight)
    problem = Problem("inference", *keys, ROWS, WIDTH, 1, str(x.dtype), "", "", 0)
    choices.choices_for(device).add(Choice(problem, "dequantize"))
    seen = []
    monkeypatch.setattr(
        QuantizedTensor,
        "dequantize",
        lambda self, dtype: seen.append(dtype) or torch.zeros(WIDTH, ROWS, dtype=dtype),
    )
    run(gpu, one, x)
    run(gpu, one, x)
    assert len(seen) == 2
    with choices.default_choices():
        _, looked_up, launches = run(gpu, one, x)
    assert (looked_up, len(launches)) == (1, 1)
    run(gpu, one, x)
    assert len(seen) == 3
    choices.choices_for(device).add(Choice(problem, "fused"))
    run(gpu, one, x)
    assert run(gpu, one, x)[1] == 0
    with choices.default_choices():
        assert run(gpu, one, x)[1] == 1  # may be another kernel
    choices.changed()


def test_shapes_that_are_kept_are_few(gpu):
    one = layer()
    for rows in range(1, 140):
        run(gpu, one, inputs(rows))
    assert len(kept(one).programs) <= MOST_SHAPES


def test_weights_alone_are_prepared_on_a_cpu_too():
    one, x = layer(), inputs(1)
    with torch.no_grad():
        first = one(x)
        (program,) = kept(one).programs.values()
        assert program.launch is products.fused
        assert torch.equal(one(x), first)


@pytest.mark.parametrize("name", ["int4", "int8, preshuffled"])
def test_weights_that_are_computed_alike_share_what_runs_them(gpu, name):
    """What each has of its own is its parts: little for the processor to fetch again."""
    layers, x = [layer(name, seed=seed) for seed in (0, 1)], inputs(1)
    for one in layers:
        run(gpu, one, x)
    (first, second) = ((*kept(one).programs.items(),) for one in layers)
    assert first[0][0] is second[0][0]
    assert first[0][1].launch is second[0][1].launch
    for one in layers:
        _, looked_up, launches = run(gpu, one, x)
        parts = {part.data_ptr() for part in one.weight.parts.values() if part is not None}
        assert looked_up == 0
        assert parts <= {value for launch in launches for value in launch if isinstance(value, int)}
