"""torchao's NVFP4 with one and two levels of scales, and its NF4, against `nvfp4_quantize`, `NVFP4Tensor` and `NF4Tensor`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.quantize.scales import Scales
from reference.schemes.schemes import scheme_of
from tests.support.bits import as_torch, assert_floats, assert_words, counted_machine, torchao_nan_codes
from tests.support.edge_blocks import Edges, Floats, all_blocks, edge_blocks

BLOCK = 16
DTYPES = ("float32", "bfloat16")
ELEMENT = "float4_e2m1fn"


def edges(dtype: str) -> Edges:
    return Edges(ELEMENT, 6.0, BLOCK, dtype)


def their_values(
    codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None, out: str
) -> torch.Tensor:
    tensor = NVFP4Tensor(
        pack_uint4(codes), scale.view(torch.float8_e4m3fn), BLOCK, getattr(torch, out), per_tensor_scale=outer
    )
    return tensor.dequantize(getattr(torch, out))


def machine_nans(x: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    """The scaled elements as this machine computes them. Where they are NaN, torchao's integer cast to fp4 keeps their sign
    and payload (the NaN of an e4m3 scale has one); the record writes every NaN as code 3."""
    steps = scale.view(torch.float8_e4m3fn).float()
    factor = 1.0 / steps if outer is None else (1.0 / outer) / steps
    blocks = x.float().reshape(x.shape[0], -1, BLOCK)
    return torch.clamp(blocks * factor.unsqueeze(-1), -6.0, 6.0).reshape(x.shape)


def assert_scales(q: Quantized, scale: torch.Tensor, x: torch.Tensor, outer: torch.Tensor | None) -> None:
    """Equal bytes; 0 / 0 (a zero block of a tensor whose outer scale is 0) has the machine's sign in the NaN byte."""
    largest = x.float().reshape(x.shape[0], -1, BLOCK).abs().amax(-1) / 6.0
    ratio = largest if outer is None else largest / outer
    negative = ratio.isnan() & ratio.signbit()
    assert_words(q.scale | negative.to(torch.uint8) << 7, scale, "scale")


def compare(x: torch.Tensor, outer: torch.Tensor | None, given: bool = False) -> tuple[Quantized, int]:
    """Equal codes, scales and values, NaN codes as explained. Returns the number of codes that differ."""
    scale, data = nvfp4_quantize(x, BLOCK, outer)
    codes = unpack_uint4(data)
    scale = scale.view(torch.uint8)
    name = "torchao.nvfp4_single_level" if outer is None else "torchao.nvfp4"
    q = quantize(x, name, scales=Scales(outer=outer) if given else None)
    assert_scales(q, scale, x, outer)
    scaled = machine_nans(x, scale, outer)
    expected = torch.where(scaled.isnan(), torchao_nan_codes(scaled, FORMATS[ELEMENT]), q.codes)
    assert_words(expected, codes, "codes", x)
    assert (q.codes[scaled.isnan()] == 3).all()
    if outer is not None:
        assert_floats(q.outer, outer, "outer scale")
    for out in DTYPES:
        stored = replace(q, codes=codes, scale=scale)
        assert_floats(
            dequantize(stored, out), their_values(codes, scale, outer, out), f"values in {out}", codes
        )
    return q, int((q.codes != codes).sum())


def two_levels(x: torch.Tensor) -> tuple[Quantized, int]:
    return compare(x, per_tensor_amax_to_scale(x.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_level_on_edges(dtype: str) -> None:
    _, nans = compare(as_torch(all_blocks(edges(dtype)), dtype), None)
    if counted_machine():
        # The elements of NaN blocks other than the NaNs themselves.
        assert nans == 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_levels_on_edges(dtype: str) -> None:
    nans = 0
    for family in edge_blocks(edges(dtype)).values():
        tensors = [family, *family[:: max(len(family) // 50, 1)]]
        nans += sum(two_levels(as_torch(part.reshape(-1, BLOCK), dtype))[1] for part in tensors)
    if counted_machine():
        # Tensors with a NaN, and those whose outer scale underflows to 0, become NaN as a whole.
        assert nans == {"float32": 1352, "bfloat16": 596}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_scales_at_their_floor_and_at_ties(dtype: str) -> None:
    """Block maxima 2**-20 .. 1 of the tensor's, around every e4m3 scale and every midpoint between two."""
    values = FORMATS["float8_e4m3fn"].values
    values = np.unique(np.abs(values[np.isfinite(values)])).astype(np.float64)
    maxima = np.concatenate([values, (values[1:] + values[:-1]) / 2, 2.0 ** np.arange(-12.0, -5)]) * 6
    rng = np.random.default_rng(5)
    for top in (1.0, 3.0, 1 / 3, 2.0**-100, 1.7e38):
        blocks = rng.uniform(-1, 1, (3 * len(maxima), BLOCK)).astype(np.float32)
        near = edges(dtype).exact(maxima * (top / 2688)).view(np.uint32).astype(np.int64)
        near = (near[:, None] + edges(dtype).step * np.arange(-1, 2)).reshape(-1)
        near = np.maximum(near, 0).astype(np.uint32).view(np.float32)
        blocks = edges(dtype).exact(blocks * near[:, None])
        blocks[:, 3] = near
        blocks[0, 0] = edges(dtype).exact(top)
        _, nans = two_levels(as_torch(blocks, dtype))
        assert nans == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_calibrated_outer_scale(dtype: str) -> None:
    x = as_torch(edge_blocks(edges(dtype))["random"], dtype)
    for outer in (1.0, 0.37, 1e-20, 1e20, 2.0**-126):
        compare(x, torch.tensor(outer), given=True)


def test_every_code_with_every_scale() -> None:
    codes = (torch.arange(256, dtype=torch.uint8) % 16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 // BLOCK)
    for outer in (None, torch.tensor(0.37), torch.tensor(3e37), torch.tensor(1e-44)):
        name = "torchao.nvfp4_single_level" if outer is None else "torchao.nvfp4"
        q = Quantized(codes, scale, outer, None, (256, 256), 1, scheme_of(name))
        for out in DTYPES:
            assert_floats(
                dequantize(q, out), their_values(codes, scale, outer, out), f"values in {out}", codes
            )


# torchao's NF4 with double quantization, against `NF4Tensor.from_tensor(x, 64, 256)`.

NF4_BLOCK, GROUP = 64, 256


def their_codes(theirs: NF4Tensor) -> torch.Tensor:
    """One code per element: the first of two stands in the high nibble."""
    return torch.stack([theirs.quantized_data >> 4, theirs.quantized_data & 15], -1).reshape(theirs.shape)


def nf4_compare(x: torch.Tensor) -> bool:
    """Equal codes and, where the means are equal, scale codes, factors and values in x's dtype. Returns whether they are.

    Whatever the mean: element codes come from the unrounded scales, and what torchao stored dequantizes to its values."""
    q, theirs = quantize(x, "torchao.nf4"), NF4Tensor.from_tensor(x, NF4_BLOCK, GROUP)
    assert_words(q.codes, their_codes(theirs), "codes", x)
    values, dtype = theirs.get_original_weight(), str(x.dtype).removeprefix("torch.")
    mean, factors = theirs.scaler_mean.float(), theirs.quantization_factor.float()
    stored = replace(q, scale=theirs.quantized_scalers, outer=factors, zero=mean)
    assert_floats(dequantize(stored, dtype), values, "values of what torchao stored", q.codes)
    if not torch.equal(q.zero.nan_to_num(nan=-1.0), mean.nan_to_num(nan=-1.0)):
        return False
    assert_floats(q.outer, factors, "factors")
    assert_words(q.scale, theirs.quantized_scalers, "scale codes")
    assert_floats(dequantize(q, dtype), values, "values", q.codes)
    return True


def groups_of(blocks: Floats, count: int) -> Floats:
    """Blocks repeated to whole groups of scales."""
    return np.resize(blocks, (count * GROUP, NF4_BLOCK))


def similar(family: Floats) -> list[Floats]:
    """The family, and its half of larger blocks: sums of scales within few binades are exact in float32."""
    order = np.argsort(np.abs(family).max(1))
    return [groups_of(family, 1), groups_of(family[order[len(order) // 2 :]], 2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges(dtype: str) -> None:
    """torchao adds the scales, the record averages them: where their sum is beyond float32, torchao's mean is infinite."""
    unequal, infinite = [], 0
    for name, family in edge_blocks(Edges("nf4_torchao", 1.0, NF4_BLOCK, dtype)).items():
        for blocks in similar(family):
            largest = np.abs(blocks).max(1).astype(np.float64)
            overflow = np.isfinite(largest).all() and largest.sum() > np.finfo(np.float32).max
            infinite += overflow
            if nf4_compare(as_torch(blocks, dtype)) == overflow:
                unequal.append(name)
    assert infinite == 4
    # The scales of this family span 60 binades: their float32 sum depends on its order.
    assert unequal in ([], ["random"] if dtype == "float32" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_exact_sums(count: int, dtype: str) -> None:
    """Scales that are small multiples of a power of two: their sum has no rounding, so its order does not matter."""
    rng = np.random.default_rng(count)
    x = rng.uniform(-1, 1, (count * GROUP, NF4_BLOCK)) * 2.0**-8
    x[:, 7] = rng.integers(1, 256, count * GROUP) * 2.0**-8
    assert nf4_compare(as_torch(Edges("nf4_torchao", 1.0, NF4_BLOCK, dtype).exact(x), dtype))


def test_random_bfloat16() -> None:
    """Maxima of normal blocks lie within few binades: 8 bits each, the float32 sum of 512 is exact."""
    for seed in range(6):
        x = torch.randn(2 * GROUP, NF4_BLOCK, generator=torch.Generator().manual_seed(seed))
        assert nf4_compare(x.to(torch.bfloat16))


def test_random_float32_differs_only_by_the_order_of_the_mean() -> None:
    """PyTorch's order of summation depends on the vector width of the machine; the record adds in a binary tree."""
    equal = 0
    for seed in range(16):
        x = torch.randn(GROUP, NF4_BLOCK, generator=torch.Generator().manual_seed(seed))
        same = nf4_compare(x)
        assert same == torch.equal(quantize(x, "torchao.nf4").zero, x.abs().amax(1).mean())
        equal += same
    assert 0 < equal < 16
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert equal == 11


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_between_table_values(dtype: str) -> None:
    """torchao takes the first of the smallest rounded differences; in bfloat16 whole ranges of x are ties."""
    every = (np.arange(0x3F81, dtype=np.uint32) << 16).view(np.float32)
    values = np.concatenate([every, -every])
    blocks = np.zeros((-(-len(values) // (NF4_BLOCK - 1)), NF4_BLOCK), np.float32)
    blocks[:, 1:] = np.resize(values, (len(blocks), NF4_BLOCK - 1))
    blocks[:, 0] = 1.0
    assert nf4_compare(as_torch(groups_of(blocks, 3), dtype))
