"""Rows of embedding tables that are on different ranks, exchanged as codes and scales: the bits of rounding in one process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from experiments.distributed.cases import BITS, Case, Rank, Tally

WIDTH, ROWS, SAMPLES, IDS = 128, 512, 64, 3
SCHEMES = (None, "fp8_rowwise", "int8_rowwise", "mxfp8_e4m3", "int4_g32_asymmetric")


def rounded(x: Tensor, scheme: str | None) -> Tensor:
    """What arrives of a row."""
    import fast

    return x if scheme is None else fast.dequantize(fast.quantize(x, scheme), x.dtype)


def exchange(rank: Rank, tally: Tally, scheme: str | None) -> None:
    """Sums of bags go to the ranks of their samples, gradients back to the tables."""
    from ao_lab.tensor.all_to_all import all_to_all_rows

    tables = [rank.random(ROWS, WIDTH, seed=of) for of in range(rank.size)]
    numbers = torch.Generator().manual_seed(9)
    shape = (rank.size, rank.size * SAMPLES, IDS)
    ids = torch.randint(0, ROWS, shape, generator=numbers).to(rank.device)
    bags = [nn.EmbeddingBag.from_pretrained(t.clone(), freeze=False, mode="sum") for t in tables]
    mine, each = slice(rank.rank * SAMPLES, (rank.rank + 1) * SAMPLES), [SAMPLES] * rank.size
    sums = bags[rank.rank](ids[rank.rank])
    sent = sums.detach().requires_grad_()
    y = all_to_all_rows(sent, each, each, scheme, gradient=scheme).reshape(rank.size, SAMPLES, WIDTH)
    with torch.no_grad():
        whole = torch.stack([rounded(bag(ids[at]), scheme) for at, bag in enumerate(bags)])
    tally.bits("sums", y, whole[:, mine])
    factor = rank.random(rank.size, rank.size * SAMPLES, WIDTH, seed=7)
    (y * factor[:, mine]).sum().backward()
    gradient = sent.grad
    tally.true("there is no gradient", gradient is not None)
    if gradient is not None:
        tally.bits("gradients of sums", gradient, rounded(factor[rank.rank], scheme))


CASES = tuple(
    Case(f"all-to-all, {scheme or 'as they are'}", partial(exchange, scheme=scheme), BITS, day=scheme == "fp8_rowwise")
    for scheme in SCHEMES
)  # fmt: skip
