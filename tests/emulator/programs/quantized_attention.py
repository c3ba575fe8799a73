"""Prefill's kernels of `fast.kernels.attention` in Triton's interpreter: codes bit for bit, attention within its bound.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process quantized_attention codes RECIPE[,RECIPE...]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process quantized_attention attend CASE[,CASE...]

Inputs are float16: the interpreter truncates bfloat16 where it should round.
"""

import numpy as np
import pytest
import torch

from fast.kernels.attention import prefill
from fast.kernels.attention.quantize_heads import quantize_heads
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    quantize_operands,
    quantized_attention,
    quantized_attention_error_bound,
)
from tests.emulator import quick_interpreter

#: Recipe, widths of keys and of values, queries, keys, what else; tiles of queries and keys.
CASES = {
    "causal": ("int8", 64, 64, 70, 75, {"causal": True}, (64, 64)),
    "all": ("fp8", 96, 64, 40, 150, {}, (64, 128)),
    "window": ("int8_block", 64, 128, 150, 150, {"causal": True, "window": 40}, (64, 64)),
    "offset": ("int8_block", 64, 64, 70, 140, {"causal": True, "offset": 3, "window": 50}, (128, 64)),
    "mask": ("int8", 64, 64, 70, 90, {"mask": True}, (64, 64)),
    "few keys": ("int8", 64, 64, 70, 20, {"causal": True}, (64, 64)),
    "wide": ("int8", 256, 256, 40, 90, {"causal": True}, (64, 64)),
    "zeros": ("int8_block", 64, 64, 5, 9, {"causal": True}, (64, 64)),
}


def main(what, names):
    """All of a list of names."""
    quick_interpreter.install()
    for name in names.split(","):
        {"codes": codes, "attend": attend}[what](name)
        print(what, name, flush=True)


def states(queries, keys, width, value_width):
    """q of 4 heads as a view of (B, T, heads, width), k with a mean, and v, of 2 heads."""
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, width).half().transpose(1, 2)
    k = (torch.randn(2, 2, keys, width) + 3 * torch.randn(width)).half()
    v = (torch.randn(2, 2, keys, value_width) * torch.logspace(-2, 1, value_width)).half()
    return q, k, v


def codes(name):
    """Codes and scales where the kernels put them, of the mean that they found; zeros beyond the tokens."""
    recipe = ATTENTION_RECIPES[name]
    for width, value_width, masked in ((64, 128, True), (96, 64, False))[: 1 if name == "int8_block" else 2]:
        q, k, v = states(40, 150, width, value_width)
        seen = torch.rand(2, 150) > 0.1 if masked else None
        made = quantize_heads(q, k, v, recipe, seen)
        host = None if seen is None else seen.numpy()
        expected = quantize_operands(q, k, v, recipe, seen=host, mean=made.mean)
        exact = quantize_operands(q, k, v, recipe, seen=host).mean
        assert np.abs(exact - made.mean.numpy()).max() <= 2.0**-20 * np.abs(exact).max()
        for one, stored, scale in ((expected.q, made.q, made.q_scale), (expected.k, made.k, made.k_scale)):
            tokens, blocks = one.codes.shape[2], one.scale.shape[2]
            np.testing.assert_array_equal(one.codes, stored[:, :, :tokens, :width])
            np.testing.assert_array_equal(one.scale[..., 0], scale[:, :, :blocks])
            assert not stored[:, :, tokens:].any()
            assert not stored[..., width:].any()
        place = np.arange(256)
        token = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
        values = np.empty((2, 2, value_width, 256), np.uint8)
        values[..., token] = made.v[:, :, :value_width]
        np.testing.assert_array_equal(np.asarray(expected.v.codes).swapaxes(-1, -2), values[..., :150])
        np.testing.assert_array_equal(expected.v.scale[:, :, 0], made.v_scale[:, :, :value_width])
        assert not values[..., 150:].any()


def attend(name):
    """One case: NaN in tokens that nobody sees, and queries that see nothing, are zeros."""
    recipe, width, value_width, queries, keys, options, tile = CASES[name]
    q, k, v = states(queries, keys, width, value_width)
    if name == "zeros":  # least scales, whose product is 0
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    if "mask" in options:
        mask = torch.rand(2, 1, queries, keys) > 0.2
        mask[..., 3], mask[:, :, 5] = False, False
        k[:, :, 3], v[:, :, 3] = torch.nan, torch.nan
        options = {"mask": mask}
    if options.get("offset") is not None:
        k[:, :, queries + options["offset"] :] = torch.nan
    plan, made = prefill.Plan(*tile, 4, 1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            prefill, "quantize_heads", lambda *x, **more: made.append(quantize_heads(*x, **more)) or made[-1]
        )
        y = prefill.attention(q, k, v, ATTENTION_RECIPES[recipe], scale=width**-0.5, plan=plan, **options)
    if "mask" in options:
        options["mask"] = options["mask"].numpy()
    options["mean"] = made[0].mean
    expected = quantized_attention(q, k, v, recipe, out_dtype="float64", **options)
    bound = quantized_attention_error_bound(
        q, k, v, recipe, out_dtype="float16", accumulation="exact", **options
    )
    assert (np.abs(y.double().numpy() - np.asarray(expected)) <= bound).all(), name
    assert y.transpose(1, 2).is_contiguous()
