"""Tables and bags by which kernels of embedding bags are compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import reference

#: Ids that are outside of every table, 1 standing for the number of its rows.
BAD = (-1, 1)


@dataclass(frozen=True)
class Case:
    """A table in a scheme and bags of it. lengths: of the bags, in turn. large: scales at which products overflow."""

    scheme: str
    rows: int = 61
    width: int = 128
    lengths: tuple[int, ...] = (3, 0, 1, 7)
    bags: int = 12
    mode: str = "sum"
    dtype: str = "float32"
    padding: int | None = None
    weighted: bool = False
    packed: bool = True
    large: bool = False
    features: int = 1
    ids: torch.dtype = torch.int64


CASES = (
    Case("int8_rowwise"),
    Case("int4_g128_asymmetric", weighted=True, dtype="bfloat16", features=4),
    Case("fp8_rowwise", mode="mean", padding=41, ids=torch.int32),
    Case("int8_rowwise", width=160, features=4, dtype="float16"),
    Case("int8_rowwise", large=True),
    Case("fp8_rowwise", large=True, weighted=True),
    Case("int8_rowwise_asymmetric", weighted=True, padding=18),
    Case("int4_g32", width=64),
    Case("int4_g32", width=64, packed=False),
    Case("mxfp8_e4m3", width=96),
    Case("mxfp4", width=64, mode="mean"),
    Case("int8_rowwise", lengths=(100, 1), bags=4),
    Case("torchao.fp8_rowwise_training"),
    Case("int8_rowwise", dtype="bfloat16", lengths=(3, 0, 70, 1, 20, 7), bags=90, features=6),
    Case("fp8_rowwise", width=256, mode="mean", ids=torch.int32, lengths=(9, 1, 40)),
)


def table_of(case: Case) -> reference.Quantized:
    """Rows of several magnitudes, zeros, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(case.rows, case.width, generator=generator)
    w *= torch.exp2(torch.randint(-3, 4, (case.rows, 1), generator=generator).float())
    w[1] = 0
    w[17, 5], w[5, 7] = float("nan"), float("-inf")
    if case.large:
        w[27], w[40] = torch.finfo(torch.float32).max, 2.0**126
    return reference.quantize(w, case.scheme, packed=case.packed)


def bags_of(case: Case, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Ids, offsets, weights."""
    generator = torch.Generator().manual_seed(1)
    lengths = [case.lengths[at % len(case.lengths)] for at in range(case.bags)]
    ids = torch.randint(0, rows, (sum(lengths),), generator=generator).to(case.ids)
    offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1].to(case.ids)
    weights = torch.randn(len(ids), generator=generator) if case.weighted else None
    return ids, offsets, weights


__all__ = ["BAD", "CASES", "Case", "bags_of", "table_of"]
