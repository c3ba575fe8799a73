"""`fast.gptq`: on the host the reference; its steps on a device, run here on CPU tensors; what the kernel compiles to.

`fast.held_out_damping`: on the host the reference; its steps on a device, run here on CPU tensors.

`fast.second_moment` and `fast.triangular_factor`: on the host the reference; their steps on a device, on CPU tensors.
"""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import hessian as module
from fast.calibration.damping import gptq_held_out, held_out_errors_on_device
from fast.calibration.gptq import ColumnRule, Sweep, gptq_on_device
from fast.calibration.hessian import Ordered, checked_hessian, factor_on_device, second_moment_on_device
from reference import SCHEMES, Scales, choose_scales
from reference.calibration.damping import held_out_errors
from reference.quantize.blocks import Blocks
from tests.emulator.interpreter_process import lines_of
from tests.reference.calibration.test_damping import split_tokens
from tests.reference.calibration.test_gptq import BY_DAY, inputs
from tests.support.refusals import refused
from tests.support.refusals import refused as refuses

PARTS = ("scale", "outer", "zero")


def problem(seed, rows=32, k=192):
    w, h = inputs(seed, rows, k)
    return torch.from_numpy(w), torch.from_numpy(h)


def same(made, wanted):
    """Codes and scales bit for bit; the loss up to the order of sums."""
    for part in ("codes", *PARTS):
        one, other = getattr(made.quantized, part), getattr(wanted.quantized, part)
        if other is not None:
            assert_same_bits(one, torch.as_tensor(other))
    torch.testing.assert_close(made.loss, torch.as_tensor(wanted.loss), rtol=1e-9, atol=0)
    assert_same_bits(made.dead, torch.as_tensor(wanted.dead))
    assert (made.damping, made.floor) == (wanted.damping, wanted.floor)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BY_DAY else (pytest.mark.nightly,)) for n in SCHEMES]
)
def test_steps_are_those_of_the_reference(name):
    """No target lies so near to the middle of two values that the order of sums could matter."""
    wide = "torchao.nf4" in name
    w, h = problem(1, 128 if "128x128" in name else 64 if wide else 32, 256)
    scales = choose_scales(w, name)
    for order in ("stored", "activation", "groups"):
        wanted = reference.gptq(
            w.numpy(), h.numpy(), name, scales=choose_scales(w.numpy(), name), order=order
        )
        same(gptq_on_device(w, h, name, scales=scales, order=order), wanted)
        if order == "stored":
            same(fast.gptq(w, h, name, scales=scales, order=order), wanted)


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from(["mxfp4", "int3_g32"]), st.sampled_from([0.0, 0.3, 3.0]))
def test_options(seed, name, damping):
    """Dead channels, a cross term, 16-bit weights, packed codes, searched scales, damping that rises."""
    w, h = problem(seed, 3, 64)
    h[5], h[:, 5] = 0, 0
    w, cross = w.bfloat16(), torch.from_numpy(np.random.default_rng(seed).standard_normal((64, 64)) / 100)
    cross[:, 5] = 0
    options = {"damping": damping, "order": "activation", "packed": True}
    for extra in ({}, {"cross": cross}):
        same(gptq_on_device(w, h, name, **options, **extra), fast.gptq(w, h, name, **options, **extra))
    bent = torch.eye(64, dtype=torch.float64)
    bent[1, 2] = bent[2, 1] = 1.035
    made = gptq_on_device(w, bent, name)
    same(made, fast.gptq(w, bent, name))
    assert made.damping == 0.04


def test_outer_scales_given_alone_and_bare_scales():
    w, h = problem(2, 4, 64)
    outer = Scales(outer=torch.tensor(0.001))
    same(gptq_on_device(w, h, "nvfp4", scales=outer), fast.gptq(w, h, "nvfp4", scales=outer))
    bare = choose_scales(w, "int4_g32").scale
    same(gptq_on_device(w, h, "int4_g32", scales=bare), fast.gptq(w, h, "int4_g32", scales=bare))


def test_blocks_of_the_flattened_matrix_that_do_not_end_with_rows():
    w, h = problem(3, 6, 96)
    scales = choose_scales(w, "nf4")
    same(gptq_on_device(w, h, "nf4", scales=scales), fast.gptq(w, h, "nf4", scales=scales))


def test_nothing_given_is_changed():
    w, h = problem(4, 3, 64)
    copies = w.clone(), h.clone()
    gptq_on_device(w, h, "mxfp4", order="activation")
    assert_same_bits(w, copies[0])
    assert_same_bits(h, copies[1])
    assert gptq_on_device(w[:0], h, "int4_g32", scales=choose_scales(w[:0], "int4_g32")).loss.shape == (0,)


@pytest.mark.parametrize("call", [fast.gptq, gptq_on_device])
def test_refusals(call):
    w, h = problem(5, 3, 32)
    refuses(ValueError, "finite weights", call, w * torch.nan, h, "mxfp4")
    refuses(ValueError, "takes a matrix", call, w[0], h, "mxfp4")
    refuses(ValueError, r"\(32, 32\), inputs by inputs", call, w, h[:4], "mxfp4")
    refuses(ValueError, "no input was seen", call, w, 0 * h, "mxfp4")
    refuses(ValueError, "order", call, w, h, "mxfp4", order="act")
    refuses(ValueError, "0 or more", call, w, h, "mxfp4", damping=-1)
    refuses(ValueError, "cross term is finite", call, w, h, "mxfp4", cross=h * torch.inf)
    refuses(ValueError, r"of shape \(3, 1\)", call, w, h, "mxfp4", scales=choose_scales(w[:1], "mxfp4"))
    drawn = replace(SCHEMES["mxfp4"], name="drawn", rounding="stochastic")
    refuses(ValueError, "stochastically", call, w, h, drawn)
    refuses(TypeError, "torch tensors, got ndarray", fast.gptq, w.numpy(), h, "mxfp4")


def swept_by_kernel(name, rows, k=128):
    """A sweep whose columns the kernel takes."""
    w, scheme = torch.ones(rows, k), SCHEMES[name]
    rule = ColumnRule.of(scheme, choose_scales(w, scheme), Blocks.of((rows, k), scheme.scale, -1), w)
    sweep = Sweep.of(w.double(), torch.eye(k, dtype=torch.float64), torch.arange(k))
    return sweep.run(replace(rule, kernel=True))


needs_triton = pytest.mark.skipif(
    platform.system() != "Linux", reason="triton has no packages for this system"
)


@needs_triton
@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_kernels_have_the_bits_of_the_steps(part):
    """Those of columns, and of candidates of `search_scales`."""
    for kernel in ("columns", "candidates"):
        assert len(lines_of("calibration", kernel, *part.split())) > 2


NIGHTLY = ("nvfp4", "nf4", "fp8_128x128", "stretched2_g32", "torchao.int4_g32_tinygemm")


@needs_triton
@pytest.mark.parametrize(
    "name", ["mxfp4", "int3_g64_asymmetric", *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)]
)
def test_a_warp_keeps_its_rows_in_registers(name):
    """One kernel a block; no stack, and up to two rows no shared memory."""
    from tests.fast.kernels.compiling.kernel_compiler import launched

    for rows, registers in ((256, 72), (4096, 112), (16384, 192)):
        (machine,) = launched(lambda rows=rows: swept_by_kernel(name, rows))
        assert machine.kernel == "columns_kernel"
        assert (machine.local, machine.stack) == (0, 0)
        assert machine.named("BAR", "LDS", "STS") == 0 or rows > 4096
        assert machine.registers <= registers


@pytest.mark.parametrize("name", ["mxfp4", "int8_rowwise", "fp8_128x128", "nf4", "int3_g64_asymmetric"])
@pytest.mark.parametrize("rows", [None, 3])
def test_errors(name, rows):
    w, h, val = map(torch.from_numpy, split_tokens(1, 64))
    options = {"order": "activation", "candidates": [0.01, 0.1, 1.0], "rows": rows}
    if name == "nf4":
        options["order"] = "stored"
    scales = choose_scales(w, name)
    arrays = w.numpy(), h.numpy(), val.numpy()
    wanted = held_out_errors(*arrays, name, scales=choose_scales(w.numpy(), name), **options)
    made = held_out_errors_on_device(w, h, val, name, scales=scales, **options)
    torch.testing.assert_close(made, torch.from_numpy(wanted), rtol=1e-9, atol=0)
    assert fast.held_out_damping(w, h, val, name, scales=scales, **options) == reference.held_out_damping(
        *arrays, name, scales=choose_scales(w.numpy(), name), **options
    )


@pytest.mark.parametrize("name", ["mxfp4", "int3_g64_asymmetric"])
def test_gptq_by_the_damping_that_is_found_is_both_calls_in_one(name, monkeypatch):
    """The same bits, on the host and by the steps of a device."""
    w, h, val = map(torch.from_numpy, split_tokens(3, 64))
    scales, options = choose_scales(w, name), {"order": "activation", "candidates": (0.003, 0.1, 3.0)}
    errors = held_out_errors_on_device(w, h, val, name, scales=scales, **options)
    damping = options["candidates"][int(errors.argmin())]
    call, sweeps = (fast.gptq, gptq_on_device), []
    swept = Sweep.run
    monkeypatch.setattr(Sweep, "run", lambda self, rule: sweeps.append(1) or swept(self, rule))
    for on_device in (False, True):
        sweeps.clear()
        made = gptq_held_out(w, lambda: h, val, name, scales=scales, on_device=on_device, **options)
        # Of three candidates three sweeps, the best of which is the result.
        assert len(sweeps) == (3 if on_device else 0)
        wanted = call[on_device](w, h, name, scales=scales, order="activation", damping=damping)
        assert made.damping == wanted.damping == damping
        assert torch.equal(made.quantized.codes, wanted.quantized.codes)
        assert torch.equal(made.loss, wanted.loss)


def test_damping_refused():
    w, h, val = map(torch.from_numpy, split_tokens(2, 32))
    for call in (fast.held_out_damping, held_out_errors_on_device):
        refused(ValueError, "one damping at least", call, w, h, val, "mxfp4", candidates=[])
        refused(ValueError, "inputs by inputs", call, w, h, val[:3], "mxfp4")
        refused(ValueError, "1 or more", call, w, h, val, "mxfp4", rows=0)


def moments(seed, k=24, tokens=200):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed))
    return x, fast.second_moment(x).value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_second_moment(dtype, monkeypatch):
    """Integers, whose sums are exact in any order: the same bits, padded or not."""
    monkeypatch.setattr(module, "TOKENS", 16)
    x = torch.randint(-3, 4, (4, 16, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = reference.second_moment(x.double().numpy())
    for made in (fast.second_moment(x), second_moment_on_device(x)):
        assert_same_bits(made.value, torch.from_numpy(wanted.value))
        assert made.count == 64
    padded = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    mask = torch.arange(32).expand(4, 32) < 16
    for made in (fast.second_moment(padded, mask), second_moment_on_device(padded, mask)):
        assert_same_bits(made.value, torch.from_numpy(wanted.value))
        assert made.count == 64
    assert second_moment_on_device(x, torch.zeros(4, 16, dtype=torch.bool)).count == 0


@pytest.mark.parametrize("damping", [0.0, 0.01, 3.0])
def test_the_factor(damping):
    _, h = moments(1)
    h[3], h[:, 3] = 0, 0
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    copy = h.clone()
    for one in (None, order):
        wanted = reference.triangular_factor(
            h.numpy(), damping=damping, order=None if one is None else one.numpy()
        )
        made = factor_on_device(checked_hessian(h), damping, one)
        torch.testing.assert_close(
            made.factor, torch.from_numpy(wanted.factor.copy()), rtol=1e-10, atol=1e-12
        )
        assert_same_bits(made.dead, torch.from_numpy(wanted.dead))
        assert made[2:] == wanted[2:]
        assert_same_bits(
            fast.triangular_factor(h, damping=damping, order=one).factor,
            torch.from_numpy(wanted.factor.copy()),
        )
    assert_same_bits(h, copy)
    # Only the lower triangle is read.
    low = factor_on_device(checked_hessian(h.tril()), damping, order).factor
    assert_same_bits(low, factor_on_device(checked_hessian(h), damping, order).factor)


def test_one_damping_after_the_other():
    """Each as if it were the first, where one before had to be raised too."""
    _, h = moments(4)
    h[5], h[:, 5] = 0, 0
    h[1, 2] = h[2, 1] = 1.02 * (h[1, 1] * h[2, 2]).sqrt()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    ordered, raised = Ordered.of(h, order), False
    for damping in (0.001, 1.0, 0.01, 1.0):
        found, alone = ordered.factor(damping), factor_on_device(h, damping, order)
        assert_same_bits(found.factor, alone.factor)
        assert_same_bits(found.dead, alone.dead)
        assert found[2:] == alone[2:]
        raised = raised or found.damping > damping
    assert raised


def test_damping_rises():
    bent = torch.eye(8, dtype=torch.float64)
    bent[1, 2] = bent[2, 1] = 1.035
    assert factor_on_device(bent, 0.01, None)[2:] == (0.04, 0.0)
    bent[1, 2] = bent[2, 1] = 40
    refused(ValueError, "not positive definite", factor_on_device, bent, 0.01, None)


def test_hessians_refused():
    x, h = moments(2)
    for call in (fast.second_moment, second_moment_on_device):
        refused(
            ValueError, "got 3 of NaN", call, torch.cat([x, x[:1].index_fill(1, torch.arange(3), torch.inf)])
        )
        refused(ValueError, "K >= 1", call, x[:, :0])
        refused(ValueError, r"bool of shape \(200,\)", call, x, torch.ones(200))
    for changed, said in (
        (h[:3], "inputs by inputs"),
        (0 * h, "no input was seen"),
        (-h, "negative"),
        (h[:0, :0], "no inputs"),
    ):
        refused(ValueError, said, checked_hessian, changed)
        refused(ValueError, said, fast.triangular_factor, changed)
    refused(TypeError, "got torch.float16", checked_hessian, h.half())
    refused(TypeError, "torch tensors", fast.triangular_factor, h.numpy())
    refused(ValueError, "permutation", fast.triangular_factor, h, order=[0] * 24)
