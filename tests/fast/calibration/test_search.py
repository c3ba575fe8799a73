"""`fast.search_scales`: on the host the reference; its steps on a device, run here on CPU tensors."""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import search as module
from fast.calibration.inputs import numpy_of, torch_of
from fast.calibration.search import search_scales_on_device
from fast.cpu.search import searched
from reference import SCHEMES
from reference.calibration import search as reference_search
from tests.emulator.interpreter_process import lines_of
from tests.reference.calibration.test_search import matrix, small
from tests.support.refusals import refused

BY_DAY = (
    "int4_g32", "int3_g64_asymmetric", "mxfp4", "nvfp4", "int8_rowwise", "fp8_tensorwise", "fp8_128x128", "nf4", "fp8_1x128",
    "te.nvfp4_16x16", "torchao.int4_g32_tinygemm", "torchao.intx4_g32",
)  # fmt: skip


def problem(seed, rows=32, k=256, dtype=torch.float32):
    w, weights = matrix(seed, rows, k)
    return torch.from_numpy(w).to(dtype), torch.from_numpy(weights)


def same(made, wanted):
    for part in ("scale", "outer", "zero"):
        one, other = getattr(made, part), getattr(wanted, part)
        assert (one is None) == (other is None)
        if other is not None:
            assert_same_bits(one, torch.as_tensor(other))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BY_DAY else (pytest.mark.nightly,)) for n in SCHEMES]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_reference(name, dtype, monkeypatch):
    """Some rows at a time; no two candidates are so alike that the order of sums could matter."""
    monkeypatch.setattr(module, "CHUNK", 2560)
    monkeypatch.setattr(reference_search, "END_RATIOS", (1.0, 0.9, 0.75))
    wide = "torchao.nf4" in name
    w, weights = problem(1, 128 if "128x128" in name else 64 if wide else 32, 256, dtype)
    same(search_scales_on_device(w, name, weights=weights), fast.search_scales(w, name, weights=weights))


def test_on_the_host_it_is_the_reference():
    w, weights = problem(2, 4, 64)
    same(
        fast.search_scales(w, "nvfp4", weights=weights, norm=2.4),
        reference.search_scales(w.numpy(), "nvfp4", weights=weights.numpy(), norm=2.4),
    )


LOOPS = ("int3_g64_asymmetric", "int4_g32", "mxint8", "mxfp4", "nvfp4", "int8_rowwise")
LOOPS_BY_DAY = (("int3_g64_asymmetric", 3.0), ("int4_g32", 2.0), ("mxfp4", 2.0))


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        pytest.param(name, norm, marks=() if (name, norm) in LOOPS_BY_DAY else (pytest.mark.nightly,))
        for name in LOOPS
        for norm in (2.0, 3.0)
    ],
)
def test_the_compiled_loop_takes_the_reference_s_candidates(name, norm, monkeypatch):
    """Weights in bfloat16, a row of zeros among them; no two candidates are nearly alike."""
    monkeypatch.setattr(reference_search, "END_RATIOS", (1.0, 0.9, 0.75))
    w, weights = problem(4, 24, 192, torch.bfloat16)
    w[3] = 0
    scales = searched(numpy_of(w), name, weights=weights.numpy(), norm=norm)
    assert scales is not None
    same(torch_of(scales), reference.search_scales(numpy_of(w), name, weights=weights.numpy(), norm=norm))


def test_large_matrices_go_through_the_loop_and_what_it_does_not_take_through_the_reference(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "WORTH", 24 * 192)
    monkeypatch.setattr(module, "searched", lambda *a, **k: calls.append(searched(*a, **k)) or calls[-1])
    w, weights = problem(4, 24, 192)
    fast.search_scales(w[:23], "int4_g32", weights=weights)
    assert calls == []
    same(fast.search_scales(w, "int4_g32", weights=weights), calls[-1])
    for name, more in (("fp8_tensorwise", {}), ("nf4", {}), ("int4_g32", {"norm": 2.4})):
        made = fast.search_scales(w, name, **more)
        assert calls[-1] is None
        same(made, reference.search_scales(w.numpy(), name, **more))
    w[0] = 1e38
    fast.search_scales(w, "int4_g32", candidates=[1000.0])
    assert calls[-1] is None, "scales beyond plain arithmetic"


def test_a_short_last_block_counts_its_own_elements_alone():
    w, weights = problem(5, 40, 16)
    w, weights = w[:, :12].contiguous(), weights[:12].contiguous()
    w[:, 11] *= 3
    scheme = small("int3_g32")
    scheme = replace(scheme, name="partial", scale=replace(scheme.scale, partial=True))
    same(
        search_scales_on_device(w, scheme, weights=weights),
        reference.search_scales(w.numpy(), scheme, weights=weights.numpy()),
    )


@pytest.mark.parametrize("call", [fast.search_scales, search_scales_on_device])
def test_options(call):
    w, _ = problem(3, 6, 64)
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((100, 64)))
    h = (x.T @ x).reshape(4, 16, 4, 16)
    local = torch.stack([h[b, :, b] for b in range(4)])
    arrays = {"weights": local.numpy()}
    same(call(w, "nvfp4", weights=local), reference.search_scales(w.numpy(), "nvfp4", **arrays))
    for options in ({"norm": 2.4}, {"candidates": [0, 3, -3]}, {"outer": torch.tensor(0.002)}):
        arrays = {key: value.numpy() if key == "outer" else value for key, value in options.items()}
        same(call(w, "nvfp4", **options), reference.search_scales(w.numpy(), "nvfp4", **arrays))
    pairs = [(1.0, 0.8), (0.7, 1.0)]
    same(
        call(w, "int3_g64_asymmetric", candidates=pairs),
        reference.search_scales(w.numpy(), "int3_g64_asymmetric", candidates=pairs),
    )


@pytest.mark.parametrize("call", [fast.search_scales, search_scales_on_device])
def test_refusals(call):
    w, weights = problem(4, 3, 64)
    refused(ValueError, "finite weights", call, w * torch.nan, "mxfp4")
    refused(ValueError, "takes a matrix", call, w[0], "mxfp4")
    refused(ValueError, r"shape \(64,\)", call, w, "mxfp4", weights=weights[:3])
    refused(ValueError, "one step or ratio", call, w, "mxfp4", candidates=[])
    refused(ValueError, "norm is a positive number", call, w, "mxfp4", norm=-1)
    refused(ValueError, "outer", call, w, "mxfp4", outer=torch.tensor(1.0))


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
@pytest.mark.parametrize(
    "name",
    [
        "int3_g64_asymmetric",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("nvfp4", "mxfp4", "int8_g256")),
    ],
)
def test_blocks_stay_in_registers(name):
    """No stack; what is exchanged stays in a warp."""
    from fast.kernels.calibration.candidates import best_candidates
    from tests.fast.kernels.compiling.kernel_compiler import launched

    scheme, w = SCHEMES[name], torch.ones(256, 1024, dtype=torch.bfloat16)
    scale = torch.ones(5, w.numel() // scheme.scale.block)
    zero = None if scheme.zero is None else scale.char()
    weights = torch.ones(1024, dtype=torch.float64)
    (machine,) = launched(lambda: best_candidates(w, weights, scheme, scale, zero, torch.ones(())))
    assert machine.kernel == "candidates_kernel"
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("BAR", "LDS", "STS") == 0
    assert machine.registers <= 144


def test_the_kernel_by_squares_and_cubes():
    assert len(lines_of("calibration", "searched")) == 3
