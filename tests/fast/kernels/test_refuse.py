"""What the host leaves to the reference before a kernel could read beyond an array; nothing is launched here."""

from dataclasses import replace

import pytest
import torch

import fast
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.rowwise_colwise import mx as both
from fast.kernels.rowwise_colwise.host import fused_both
from fast.kernels.scheme.constants import constants_of
from reference import SCHEMES, Scales
from reference.quantize.blocks import Blocks


def normals(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 1, dtype=torch.uint8)}),
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 2)}),
        ("nvfp4", {"outer": None}),
        ("int4_g32_asymmetric", {"zero": torch.zeros(1, dtype=torch.int8)}),
    ],
)
def test_scales_that_do_not_fit_are_refused(scheme, wrong):
    q = fast.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), scheme)
    with pytest.raises((ValueError, TypeError), match=f"{scheme}|shape|dtype"):
        quantizer.dequantize(replace(q, **wrong), "float32")


@pytest.mark.parametrize(
    ("shape", "start", "served"),
    [((128, 64), 0, True), ((128, 64), 2, True), ((128, 64), 1, False), ((64, 64), 0, False), ((128, 32), 0, False)],
)  # fmt: skip
def test_which_matrices_are_read_in_words(shape, start, served):
    """Words of two 16-bit numbers, whole patches."""
    memory = torch.zeros(shape[0] * shape[1] + 8, dtype=torch.bfloat16)
    x = memory[start : start + shape[0] * shape[1]].view(shape)
    assert both.covers_mx(x, constants_of(SCHEMES["mxfp8_e4m3"], "bfloat16")) is served


@pytest.mark.parametrize(
    ("name", "shape", "given", "size", "fill"),
    [
        ("mxfp8_e4m3", (128, 128), "", 512, ()),
        ("mxfp8_e4m3", (96, 96), "", 512, (0,)),
        ("nvfp4", (256, 64), "outer", 1024, ()),
        ("nvfp4", (256, 32), "", 1024, (0,)),
    ],
)
def test_tiled_scales_are_flat_and_padded_with_zeros(name, shape, given, size, fill):
    scheme = SCHEMES[name]
    of = passes.problem_of("bfloat16", scheme, Blocks.of(shape, scheme.scale, -1))
    assert passes.tiles(of, given)
    assert not passes.tiles(of, "all")
    plan = passes.quantizing(of, given, tiled=True)
    assert plan.buffers["scale"] == passes.Buffer((size,), "uint8", fill)
    assert plan.passes[-1].place.blocks == shape[1] // scheme.scale.block


@pytest.mark.parametrize("part", ["scale", "zero"])
def test_scales_on_another_device_are_left_to_the_reference(part):
    x = normals(4, 64)
    kept = fast.quantize(x, "int4_g32_asymmetric").scales
    moved = replace(kept, **{part: getattr(kept, part).to("meta")})
    assert quantizer.quantize(x, "int4_g32_asymmetric", -1, moved, None, False) is None
    assert quantizer.fake_quantize(x, "int4_g32_asymmetric", -1, moved) is None


def test_scales_for_both_on_another_device_are_left_to_the_reference():
    x, scheme = normals(128, 64), SCHEMES["fp8_tensorwise"]
    scale = fast.quantize(x, "fp8_tensorwise").scales
    other = replace(scale, scale=scale.scale.to("meta"))
    assert fused_both(x, scheme, (scale, other), False) is None


def test_short_groups_of_scales_are_refused_by_gradients_too():
    x = normals(4, 32, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match="full blocks of 256"):
        fast.fake_quantize_vjp(x, x, "torchao.nf4")
    with pytest.raises(ValueError, match="full blocks of 256"):
        passes.masking(
            passes.problem_of(
                "float32", SCHEMES["torchao.nf4"], Blocks.of((4, 32, 5), SCHEMES["torchao.nf4"].scale, -1)
            )
        )


def test_an_outer_scale_that_requires_a_gradient_is_refused():
    """None flows to it, which nobody would notice; x keeps its own."""
    x = torch.randn(4, 32, requires_grad=True)
    outer = torch.tensor(0.01, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient for an outer scale: detach it"):
        fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer))
    with torch.no_grad():
        fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer))
    fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer.detach())).sum().backward()
    assert x.grad is not None
