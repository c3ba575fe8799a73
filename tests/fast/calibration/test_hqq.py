"""HQQ for torch tensors: the bits of the reference, on a CPU and by the device's steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ao_lab.testing.bits import assert_same_quantized
from fast.calibration import hqq as module
from fast.calibration.hqq import hqq, hqq_on_device
from reference import SCHEMES
from reference.arrays.bridges import to_numpy
from reference.calibration.hqq import hqq as reference_hqq
from reference.schemes.conventions import hqq_scheme
from tests.emulator.interpreter_process import lines_of
from tests.support.refusals import refused


def weights(seed, shape=(8, 128), dtype=torch.float32):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_t(4, shape) * 0.05).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", [
    "hqq.int4_g64", hqq_scheme(3, 32, "float32"), "torchao.int4_g32_tinygemm", "int3_g64", "nvfp4", "mxfp4", "te.nvfp4",
    "fp8_1x128", "torchao.fp8_rowwise_training", "int8_tensorwise",
], ids=str)  # fmt: skip
def test_bits(scheme, dtype, monkeypatch):
    w = weights(1, (16, 128), dtype)
    w[1] = 0
    monkeypatch.setattr(module, "CHUNK", 500)
    on_cpu = hqq(w, scheme)
    assert_same_quantized(on_cpu, reference_hqq(to_numpy(w), scheme))
    assert_same_quantized(hqq_on_device(w, scheme), on_cpu)


@pytest.mark.parametrize("options", [
    {"stop": "tensor"}, {"steps": 0}, {"steps": 1}, {"p": 1.0}, {"beta": 1e3, "p": 0.4}, {"stop": "tensor", "steps": 3},
])  # fmt: skip
@pytest.mark.parametrize("bits", [2, 4])
def test_options(options, bits):
    w, scheme = weights(2), hqq_scheme(bits, 64, "float32")
    assert_same_quantized(hqq_on_device(w, scheme, **options), hqq(w, scheme, **options))


def test_short_blocks_and_empty_tensors():
    w = weights(3, (4, 200))
    assert_same_quantized(hqq_on_device(w, "fp8_1x128"), hqq(w, "fp8_1x128"))
    assert hqq_on_device(w[:0, :128], "hqq.int4_g64").codes.shape == (0, 128)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [n for n, s in SCHEMES.items() if not (s.zero and s.zero.rule == "code") and "nf4" not in n]
)
def test_every_scheme(name):
    w = weights(4, (128, 256))
    assert_same_quantized(hqq_on_device(w, name), hqq(w, name))


@pytest.mark.parametrize("call", [hqq, hqq_on_device])
def test_refusals(call):
    w = weights(5)
    refused(ValueError, "integers", call, w, "int4_g64_asymmetric")
    refused(ValueError, "steps", call, w, "hqq.int4_g64", steps=-1)
    refused(ValueError, "NaN or infinity", call, w * torch.nan, "hqq.int4_g64")
    refused(ValueError, "matrix", call, w[0], "hqq.int4_g64")
    refused(ValueError, "stop", call, w, "hqq.int4_g64", stop="")


def test_arrays():
    refused(TypeError, "torch tensors", hqq, np.ones((2, 64)), "hqq.int4_g64")


def test_the_kernel():
    assert len(lines_of("calibration", "hqq")) == 4
