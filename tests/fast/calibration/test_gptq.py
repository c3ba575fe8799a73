"""`fast.gptq`: on the host the reference; its steps on a device, run here on CPU tensors; what the kernel compiles to."""

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
from fast.calibration.gptq import ColumnRule, Sweep, gptq_on_device
from reference import SCHEMES, Scales, choose_scales
from reference.quantize.blocks import Blocks
from tests.emulator.interpreter_process import lines_of
from tests.reference.calibration.test_gptq import BY_DAY, inputs
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
