"""`fast.held_out_damping`: on the host the reference; its steps on a device, run here on CPU tensors."""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.calibration.damping import gptq_held_out, held_out_errors_on_device
from fast.calibration.gptq import gptq_on_device
from reference import choose_scales
from reference.calibration.damping import held_out_errors
from tests.reference.calibration.test_damping import split_tokens
from tests.support.refusals import refused


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
def test_gptq_by_the_damping_that_is_found_is_both_calls_in_one(name):
    """The same bits, on the host and by the steps of a device."""
    w, h, val = map(torch.from_numpy, split_tokens(3, 64))
    scales, options = choose_scales(w, name), {"order": "activation", "candidates": (0.003, 0.1, 3.0)}
    errors = held_out_errors_on_device(w, h, val, name, scales=scales, **options)
    damping = options["candidates"][int(errors.argmin())]
    call = fast.gptq, gptq_on_device
    for on_device in (False, True):
        made = gptq_held_out(w, lambda: h, val, name, scales=scales, on_device=on_device, **options)
        wanted = call[on_device](w, h, name, scales=scales, order="activation", damping=damping)
        assert made.damping == wanted.damping == damping
        assert torch.equal(made.quantized.codes, wanted.quantized.codes)
        assert torch.equal(made.loss, wanted.loss)


def test_refusals():
    w, h, val = map(torch.from_numpy, split_tokens(2, 32))
    for call in (fast.held_out_damping, held_out_errors_on_device):
        refused(ValueError, "one damping at least", call, w, h, val, "mxfp4", candidates=[])
        refused(ValueError, "inputs by inputs", call, w, h, val[:3], "mxfp4")
        refused(ValueError, "1 or more", call, w, h, val, "mxfp4", rows=0)
