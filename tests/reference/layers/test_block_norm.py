"""Block norm and hard swish: against `rms_norm` block by block, float64, and behind a linear layer."""

import numpy as np
import pytest
import torch

import reference
from reference import block_norm, linear_block_norm
from tests.support.block_norm import CASES, operands


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_rows_of_rms_norm(dtype):
    x, weight = torch.randn(5, 512).to(dtype), torch.randn(512).to(dtype)
    parts = [
        reference.rms_norm(x[:, at : at + 128], weight[at : at + 128], eps=1e-3)[0]
        for at in range(0, 512, 128)
    ]
    assert torch.equal(block_norm(x, weight, block=128, eps=1e-3), torch.cat(parts, 1))


def test_hard_swish_is_rounded_step_by_step():
    x, weight = torch.randn(64, 256) * 4, torch.ones(256)
    y = block_norm(x, weight).numpy()
    gate = np.clip(y + np.float32(3), np.float32(0), np.float32(6))
    expected = (y * gate) * np.float32(1 / 6)
    assert np.array_equal(block_norm(x, weight, activation="hard_swish").numpy(), expected)
    assert abs(expected - y * np.clip(y.astype(float) + 3, 0, 6) / 6).max() < 4 * 2.0**-24 * abs(y).max()


def test_nan_makes_its_block_nan():
    x = torch.ones(2, 512)
    x[0, 3] = float("nan")
    y = block_norm(x, torch.ones(512), activation="hard_swish")
    assert y[0, :256].isnan().all()
    assert y[0, 256:].isfinite().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_behind_a_linear_layer(case):
    _, activation, scheme, dtype, _ = case
    x, w, gain, bias = operands(case)
    product = reference.dequantize(x).double() @ reference.dequantize(w).double().T
    product = (product if bias is None else product + bias).float()
    wide = block_norm(product, gain, activation=activation)
    found = linear_block_norm(
        x, w, gain, bias=bias, activation=activation, scheme=scheme or None, dtype=dtype
    )
    if scheme:
        expected = reference.quantize(wide, scheme)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)
    else:
        assert torch.equal(found, wide.to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block": 100}, ValueError, "no whole blocks of 100"),
        ({"weight": torch.ones(256)}, ValueError, "weight"),
        ({"eps": -1.0}, ValueError, "eps is a number from 0"),
        ({"activation": "relu"}, ValueError, "activation"),
        ({"x": torch.ones(2, 512, dtype=torch.float64)}, TypeError, "block_norm takes float32"),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        block_norm(**({"x": torch.ones(2, 512), "weight": torch.ones(512)} | changes))
