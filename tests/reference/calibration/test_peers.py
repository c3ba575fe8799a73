"""GPTQ beside other projects' own functions, where they are installed: no code differs.

llmcompressor 0.14 and gptqmodel 7.7 on 64 x 256 in groups of 32. Both compute in float32 with a factor of the inverse, so codes
may differ where a target lies within their rounding of the middle of two values: in these none does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reference import SCHEMES, Scales, choose_scales, dequantize, gptq, quantize, second_moment

F = np.float32
GROUP = 32
# What they warn of is theirs: temporary folders, deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")


def problem(seed=0, rows=64, k=256, tokens=2048):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, k)) @ (np.eye(k) + 0.5 * rng.standard_normal((k, k)) / np.sqrt(k))
    x *= np.exp(0.5 * rng.standard_normal(k))
    return rng.standard_normal((rows, k)).astype(F), x.astype(F)


def divided(name):
    """The record with elements divided by their scales, as both projects divide."""
    return replace(SCHEMES[name], name=f"{name}_divided", apply="divide")


@pytest.mark.parametrize(("order", "theirs"), [("stored", None), ("activation", "static")])
@pytest.mark.parametrize(
    "scheme",
    [divided("int4_g32"), divided("int3_g32_asymmetric"), SCHEMES["compressed_tensors.nvfp4"]],
    ids=str,
)
def test_llm_compressor(scheme, order, theirs):
    peer = pytest.importorskip("llmcompressor.modifiers.gptq.gptq_quantize")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    w, x = problem()
    h = second_moment(x).value
    scales = choose_scales(w, scheme)
    made = gptq(w, h, scheme, scales=scales, order=order)
    is_float = scheme.format.kind == "float"
    options = (
        {"strategy": "tensor_group", "type": "float"} if is_float else {"strategy": "group", "type": "int"}
    )
    arguments = quantization.QuantizationArgs(
        num_bits=scheme.format.bits, symmetric=scheme.zero is None, group_size=scheme.scale.block, actorder=theirs, **options
    )  # fmt: skip
    scale = torch.from_numpy(scales.scale)[None]
    if is_float:
        scale = scale.view(torch.float8_e4m3fn).float()
    zero = torch.zeros(scale.shape) if scheme.zero is None else torch.from_numpy(scales.zero)[None].float()
    outer = None if scales.outer is None else torch.from_numpy(scales.outer.reshape(1, 1))
    values, _, failed = peer.quantize_weight(
        torch.from_numpy(w.copy())[None], torch.from_numpy(h)[None].float(), scale, zero, outer, arguments
    )
    assert not failed.any()
    # A zero has either sign there.
    theirs = dequantize(quantize(values[0].numpy(), scheme, scales=scales))
    np.testing.assert_array_equal(theirs, dequantize(made.quantized))


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("stored", {"desc_act": False, "static_groups": True, "act_group_aware": False}),
        ("activation", {"desc_act": True, "static_groups": True, "act_group_aware": False}),
        ("groups", {"desc_act": False, "act_group_aware": True}),
    ],
)
def test_gptqmodel(order, options):
    """Its own scales and zero points, and its codes for them."""
    module = pytest.importorskip("gptqmodel.quantization.gptq")
    configuration = pytest.importorskip("gptqmodel.quantization.config")
    w, x = problem(1)
    layer = torch.nn.Linear(256, 64, bias=False)
    layer.weight.data = torch.from_numpy(w.copy())
    peer = module.GPTQ(
        layer, configuration.QuantizeConfig(bits=4, group_size=GROUP, damp_percent=0.01, sym=False, **options)
    )
    peer.quantizer.configure(perchannel=True)
    peer.add_batch(torch.from_numpy(x)[None], layer(torch.from_numpy(x)[None]))
    values, scale, zero, *_ = peer.quantize()
    record = divided("int4_g32_asymmetric")
    scales = Scales(scale.numpy().astype(F), None, (zero.numpy() - 8).astype(np.int8))
    made = gptq(w, second_moment(x).value, record, scales=scales, order=order)
    np.testing.assert_allclose(dequantize(made.quantized), values.detach().numpy(), rtol=1e-5, atol=1e-6)
