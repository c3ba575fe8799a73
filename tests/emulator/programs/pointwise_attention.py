"""The kernel of HSTU's attention in Triton's interpreter, beside the padded form in float64.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process pointwise_attention
"""

from __future__ import annotations

from dataclasses import replace

import torch

from experiments.models.hstu import TINY, RelativeBias, Sequences, by_kernel, padded_attention

#: Lengths and candidates of users: several tiles of queries, a user without history, without candidates, without tokens.
BATCHES = {
    "tiles": ((300, 7, 130), (40, 7, 0)),
    "few": ((140, 0, 64), (10, 0, 64)),
}


def main(*names: str) -> None:
    """Each batch, with and without a bias."""
    for name in names or BATCHES:
        for biased in (False, True):
            compare(*BATCHES[name], biased)
            print(f"{name}{', bias' * biased}")


def compare(lengths: tuple[int, ...], candidates: tuple[int, ...], biased: bool) -> None:
    """Weights are rounded to bfloat16 before they are multiplied (2^-9 of each), and the result once more."""
    config = replace(TINY, heads=2, qk_width=32, v_width=16, length=512, relative_bias=biased)
    torch.manual_seed(len(lengths))
    total = sum(lengths)
    times = torch.randint(1, 4000, (total,)).cumsum(0)
    empty = torch.zeros(total, dtype=torch.int64)
    batch = Sequences(empty, empty, times, lengths, candidates)
    # Views of one matrix, as a layer has them.
    both = torch.randn(total, 2 * (16 + 32 + 32), dtype=torch.bfloat16)
    v, q, k = (one.unflatten(-1, (2, -1)) for one in both.split((32, 64, 64), -1))
    bias = None
    if biased:
        bias = RelativeBias(config)
        torch.nn.init.normal_(bias.positions)
        torch.nn.init.normal_(bias.times)
    found = by_kernel(q, k, v, batch.layout(), bias, config).double()
    wide = bias.double() if bias is not None else None
    expected = padded_attention(q.double(), k.double(), v.double(), batch.layout(), wide, config)
    # What weights of either sign are at most: |SiLU(s)| <= SiLU(s) + 0.557, and every user has at most N tokens.
    ones = torch.ones_like(v, dtype=torch.float64)
    size = (
        padded_attention(q.double(), k.double(), ones, batch.layout(), wide, config)
        + 0.557 * max(lengths) / config.length
    )
    limit = 2**-9 * size * v.abs().max() + 2**-8 * expected.abs()
    assert ((found - expected).abs() <= limit).all(), (
        lengths,
        biased,
        float((found - expected).abs().max()),
        float(limit.min()),
    )
