"""SignRound for torch tensors: the bits of the reference, on a CPU and by the device's steps."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab.testing.bits import assert_same_quantized
from fast.calibration.signround import (
    signround_codes,
    signround_keep,
    signround_on_device,
    signround_quantize,
    signround_start,
    signround_step,
    signround_unchecked,
)
from fast.kernels.calibration import hqq, token_errors
from fast.kernels.calibration import signround as signround_kernel
from reference import SCHEMES, choose_scales
from reference.calibration import signround as rule
from reference.calibration.signround import SignRoundState
from reference.quantize.blocks import Blocks
from tests.emulator.interpreter_process import lines_of
from tests.support.refusals import refused


def case(seed, scheme, shape=(16, 128), dtype=torch.float32):
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.standard_normal(shape) * 0.05).to(dtype)
    scale = Blocks.of(shape, SCHEMES[scheme].scale, -1).scale_shape
    low, high = (torch.from_numpy(np.asarray(rng.uniform(0.6, 1, scale), np.float32)) for _ in range(2))
    v = torch.from_numpy(rng.uniform(-0.5, 0.5, shape)).float()
    return w, SignRoundState(v, low, high), torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def same(found, expected):
    return all(
        a is b is None or (a.dtype == b.dtype == torch.float32 and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [
    "int4_g32_asymmetric", "mxfp4", "nvfp4", "nf4", "hqq.int4_g64", "torchao.fp8_rowwise_training", "int8_tensorwise",
])  # fmt: skip
def test_bits(scheme, dtype):
    w, state, g = case(1, scheme, dtype=dtype)
    values, vjp = signround_quantize(w, *state, scheme)
    assert values.dtype == dtype
    found = signround_on_device(w, state, scheme, None)
    # The result lets its codes go.
    assert_same_quantized(found.quantized, signround_codes(w, *state, scheme))
    assert torch.equal(found.result().values, values)
    assert same(found.gradients(g), vjp(g))
    moved = signround_step(state, vjp(g), 0.1, range_rate=0.05)
    arrays = (SignRoundState(*(part.numpy() for part in parts)) for parts in (state, vjp(g)))
    expected = rule.signround_step(*arrays, 0.1, range_rate=0.05)
    assert all((a.numpy() == b).all() for a, b in zip(moved, expected, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme):
    w, state, g = case(2, scheme, (128, 256))
    values, vjp = signround_quantize(w, *state, scheme)
    found = signround_on_device(w, state, scheme, None)
    assert torch.equal(found.result().values, values)
    assert same(found.gradients(g), vjp(g))


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "nvfp4"])
def test_given_scales(scheme):
    w, state, g = case(3, scheme)
    q = signround_codes(w, *state, scheme)
    start = signround_start(w, scheme, q)
    assert start.low is start.high is None
    assert same(rule.start(signround_module().TORCH, w, SCHEMES[scheme], q), start)
    found = signround_on_device(w, start, scheme, q.scales)
    values, vjp = signround_quantize(w, *start, scheme, scales=q.scales)
    assert_same_quantized(signround_codes(w, *start, scheme, scales=q.scales), found.quantized)
    assert torch.equal(found.result().values, values)
    assert same(found.gradients(g), vjp(g))


def signround_module():
    from fast.calibration import signround

    return signround


def test_it_starts_at_rounding():
    w, _, _ = case(4, "mxfp4")
    state = signround_start(w, "mxfp4")
    assert (state.v == 0).all()
    assert (state.low == 1).all()
    assert state.high.shape == (16, 4)
    scales = choose_scales(w, "mxfp4")
    assert torch.equal(signround_codes(w, *state, "mxfp4").scale, scales.scale)


def test_refusals():
    w, state, _ = case(5, "int4_g32")
    for call in (
        lambda *args: signround_quantize(args[0], *args[1], args[2]),
        lambda *args: signround_on_device(*args, None),
    ):
        refused(ValueError, "v as float32", call, w, state._replace(v=state.v[:2]), "int4_g32")
        refused(ValueError, "v from -0.5", call, w, state._replace(v=state.v * 2), "int4_g32")
        refused(ValueError, "low as float32", call, w, state._replace(low=None), "int4_g32")
    refused(ValueError, "NaN or infinity in w", signround_quantize, w * torch.nan, *state, "int4_g32")
    refused(ValueError, "matrix", signround_quantize, w[0], *state, "int4_g32")
    refused(TypeError, "torch tensors", signround_codes, w.numpy(), *state, "int4_g32")
    refused(TypeError, "torch tensors", signround_start, w.numpy(), "int4_g32")
    refused(ValueError, "rate", signround_step, state, state, -1)


class Waits(TorchDispatchMode):
    """Counts operations that a device would have to be waited for: numbers taken out of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "nvfp4"])
def test_loops_wait_for_no_device(scheme):
    w, state, g = case(6, scheme)
    q = signround_codes(w, *state, scheme)
    for one, scales in ((state, None), (signround_start(w, scheme, q), q.scales)):
        values, vjp = signround_quantize(w, *one, scheme, scales=scales)
        assert torch.equal(signround_unchecked(w, *one, scheme, scales=scales).values, values)
        with Waits() as checked:
            signround_on_device(w, one, scheme, scales)
        with Waits() as waits:
            found = signround_on_device(w, one, scheme, scales, checked=False)
            gradients = found.gradients(g)
        assert checked.count > waits.count == 0
        assert torch.equal(found.result().values, values)
        assert same(gradients, vjp(g))


def test_the_kernels():
    assert len(lines_of("calibration", "signround")) == 8
    assert len(lines_of("calibration", "token_errors")) == 3


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Whichever device is the current one: Triton launches on that."""
    inside, launched = [], []

    @contextmanager
    def entered(device):
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    for module, names in (
        (signround_kernel, ("moved_kernel", "gradient_kernel", "sign_step_kernel", "keep_better_kernel")),
        (token_errors, ("errors_kernel", "gradients_kernel")),
        (hqq, ("hqq_kernel",)),
    ):
        for name in names:
            record = defaultdict(lambda name=name: lambda *_, **__: launched.append((name, list(inside))))
            monkeypatch.setattr(module, name, record)
    w, (v, *_), _ = case(11, "int4_g32")
    unit = signround_kernel.Unit(torch.ones(64), 1, 32, 4, torch.empty(0), 1.0)
    signround_kernel.moved(w, v, unit)
    signround_kernel.gradient(v, w, v, unit, sums=True)
    signround_kernel.step(v, v, 0.1)
    signround_kernel.keep(torch.ones(1, dtype=torch.uint8), v, v)
    token_errors.token_errors(w.clone().requires_grad_(), v).sum().backward()
    hqq.zero_points(w.view(-1, 32), torch.ones(64), torch.ones(64), "float32", 8.0, 15, 1, 0.7, 10.0)
    empty = torch.empty(4, 0)  # no launch, and no sums that nothing has written
    assert signround_kernel.gradient(empty, empty, empty, unit._replace(columns=1), sums=True)[1] is None
    assert len(launched) == 7
    assert all(current == [w.get_device()] for _, current in launched)


@pytest.mark.parametrize("stays", [False, True])
def test_loops_make_the_steps_of_the_reference(stays):
    w, state, g = case(8, "int4_g32_asymmetric")
    q = signround_codes(w, *state, "int4_g32_asymmetric")
    one, scales = (signround_start(w, q.scheme, q), q.scales) if stays else (state, None)
    _, vjp = signround_quantize(w, *one, q.scheme, scales=scales)
    expected = signround_step(one, vjp(g), 0.1)
    assert same(signround_unchecked(w, *one, q.scheme, scales=scales).step(g, 0.1), expected)
    assert same(signround_on_device(w, one, q.scheme, scales).step(one, g, 0.1), expected)


def test_a_state_is_kept_where_it_is_better():
    _, kept, _ = case(9, "int4_g32")
    _, new, _ = case(10, "int4_g32")
    before = SignRoundState(*(part.clone() for part in kept))
    signround_keep(torch.tensor(False), new, kept)
    assert same(kept, before)
    signround_keep(torch.tensor(True), new._replace(low=None), kept._replace(low=None))
    assert same(kept, new._replace(low=before.low))


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "nvfp4", "mxfp4"])
def test_a_span_that_a_loop_has_already(scheme):
    w, state, g = case(7, scheme)
    span = rule.Span.of(w, SCHEMES[scheme])
    found = signround_on_device(w, state, scheme, None, span=span)
    values, vjp = signround_quantize(w, *state, scheme)
    assert torch.equal(found.result().values, values)
    assert same(found.gradients(g), vjp(g))
    other = rule.Span.of(w * 2, SCHEMES[scheme])
    assert not torch.equal(signround_on_device(w, state, scheme, None, span=other).result().values, values)
