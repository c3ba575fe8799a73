"""Weights of 2:4 made in their compressed form, and inputs, on a GPU, without any kernel of ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: The six choices of two of four, as 4 bits.
CHOICES = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110)


@dataclass
class Case:
    """x (M, K), the weight compressed and dense, metadata arranged, scales and a bias."""

    x: torch.Tensor
    values: torch.Tensor
    metadata: torch.Tensor
    arranged: torch.Tensor
    dense: torch.Tensor
    x_scale: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor


def elements(shape: tuple[int, ...], dtype: torch.dtype, whole: bool, device: str) -> torch.Tensor:
    """Integers from -2 to 2, or normal numbers (of int8 all)."""
    if dtype == torch.int8 and not whole:
        return torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
    made = torch.randint(-2, 3, shape, device=device).float() if whole else torch.randn(shape, device=device)
    return made.to(dtype)


def case(
    m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype], *, whole: bool, device: str = "cuda", dense: bool = True
) -> Case:  # fmt: skip
    """dtypes: of values and x. whole: integers, and scales with few bits, so that every sum and product is exact."""
    from fast.sparsity.linear_sparse import arrange_sparse_metadata

    choices = torch.tensor(CHOICES, device=device, dtype=torch.uint8)
    groups = choices[torch.randint(0, 6, (n, k // 4), device=device)]
    if groups.shape[1] % 2:
        groups = torch.cat([groups, groups.new_zeros(n, 1)], 1)
    metadata = groups[:, ::2] | groups[:, 1::2] << 4
    values = elements((n, k // 2), dtypes[0], whole, device)
    pair = values.view(torch.uint8 if values.itemsize == 1 else torch.int16).view(n, k // 4, 2)
    index = torch.stack([groups[:, : k // 4] & 3, groups[:, : k // 4] >> 2], -1).long()
    full = torch.zeros(n, k // 4, 4, dtype=pair.dtype, device=device).scatter_(2, index, pair)
    x_scale = torch.rand(m, 1, device=device) + 0.5
    scale = torch.rand(n, 1, device=device) + 0.5
    arranged = arrange_sparse_metadata(metadata, dtypes[0])
    return Case(
        elements((m, k), dtypes[1], whole, device), values, metadata, arranged,
        full.view(n, k).view(dtypes[0]) if dense else values, x_scale, scale, torch.randn(n, device=device),
    )  # fmt: skip


def wanted(one: Case, out: torch.dtype, scaled: bool) -> torch.Tensor:
    """The result where every sum is exact: the roundings of `reference.linear_sparse`, in float32."""
    sums = one.x.double() @ one.dense.double().T
    if out == torch.int32:
        return sums.to(torch.int32)
    total = sums.float()
    if scaled:
        total = (total * one.x_scale) * one.scale.T + one.bias
    return total.to(out)


__all__ = ["CHOICES", "Case", "case", "elements", "wanted"]
