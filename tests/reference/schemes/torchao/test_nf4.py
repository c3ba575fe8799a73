"""torchao's NF4 with double quantization, against `NF4Tensor.from_tensor(x, 64, 256)`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

from reference.quantize.quantize import dequantize, quantize
from tests.support.bits import as_torch, assert_floats, assert_words
from tests.support.edge_blocks import Edges, Floats, edge_blocks

BLOCK, GROUP = 64, 256
DTYPES = ("float32", "bfloat16")


def their_codes(theirs: NF4Tensor) -> torch.Tensor:
    """One code per element: the first of two stands in the high nibble."""
    return torch.stack([theirs.quantized_data >> 4, theirs.quantized_data & 15], -1).reshape(theirs.shape)


def compare(x: torch.Tensor) -> bool:
    """Equal codes and, where the means are equal, scale codes, factors and values in x's dtype. Returns whether they are.

    Whatever the mean: element codes come from the unrounded scales, and what torchao stored dequantizes to its values."""
    q, theirs = quantize(x, "torchao.nf4"), NF4Tensor.from_tensor(x, BLOCK, GROUP)
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
    return np.resize(blocks, (count * GROUP, BLOCK))


def similar(family: Floats) -> list[Floats]:
    """The family, and its half of larger blocks: sums of scales within few binades are exact in float32."""
    order = np.argsort(np.abs(family).max(1))
    return [groups_of(family, 1), groups_of(family[order[len(order) // 2 :]], 2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges(dtype: str) -> None:
    """torchao adds the scales, the record averages them: where their sum is beyond float32, torchao's mean is infinite."""
    unequal, infinite = [], 0
    for name, family in edge_blocks(Edges("nf4_torchao", 1.0, BLOCK, dtype)).items():
        for blocks in similar(family):
            largest = np.abs(blocks).max(1).astype(np.float64)
            overflow = np.isfinite(largest).all() and largest.sum() > np.finfo(np.float32).max
            infinite += overflow
            if compare(as_torch(blocks, dtype)) == overflow:
                unequal.append(name)
    assert infinite == 4
    # The scales of this family span 60 binades: their float32 sum depends on its order.
    assert unequal in ([], ["random"] if dtype == "float32" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_exact_sums(count: int, dtype: str) -> None:
    """Scales that are small multiples of a power of two: their sum has no rounding, so its order does not matter."""
    rng = np.random.default_rng(count)
    x = rng.uniform(-1, 1, (count * GROUP, BLOCK)) * 2.0**-8
    x[:, 7] = rng.integers(1, 256, count * GROUP) * 2.0**-8
    assert compare(as_torch(Edges("nf4_torchao", 1.0, BLOCK, dtype).exact(x), dtype))


def test_random_bfloat16() -> None:
    """Maxima of normal blocks lie within few binades: 8 bits each, the float32 sum of 512 is exact."""
    for seed in range(6):
        x = torch.randn(2 * GROUP, BLOCK, generator=torch.Generator().manual_seed(seed))
        assert compare(x.to(torch.bfloat16))


def test_random_float32_differs_only_by_the_order_of_the_mean() -> None:
    """PyTorch's order of summation depends on the vector width of the machine; the record adds in a binary tree."""
    equal = 0
    for seed in range(16):
        x = torch.randn(GROUP, BLOCK, generator=torch.Generator().manual_seed(seed))
        same = compare(x)
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
    blocks = np.zeros((-(-len(values) // (BLOCK - 1)), BLOCK), np.float32)
    blocks[:, 1:] = np.resize(values, (len(blocks), BLOCK - 1))
    blocks[:, 0] = 1.0
    assert compare(as_torch(groups_of(blocks, 3), dtype))
