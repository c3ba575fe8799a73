"""On a GPU: HSTU's attention kernel beside the padded form, and self-speculation that is recorded.

    PYTHONPATH=. python tests/gpu/models/ladder.py [--part attention speculation times] [--out FOLDER]

attention: error over the bound of 16-bit weights and results, the same bits in 20 repetitions. speculation: tokens of recorded
rounds are those of rounds that are not, in three recipes of the cache. times: attention of DLRMv3's shapes, ten users of up to
16384 tokens and 2048 candidates, microseconds a layer and TFLOP/s of the visible half, beside the padded form for one user. A
line a check, and rows in FOLDER/ladder_checks.csv (else $OUT). About a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab.self_speculation import SelfSpeculation
from experiments.ladder.subjects import STAND_INS
from experiments.models.hstu import (
    DLRM_V3,
    HSTUConfig,
    RelativeBias,
    Sequences,
    by_kernel,
    padded_attention,
    random_batch,
)
from tests.gpu.harness.lines import run_parts, say
from tests.gpu.harness.timing import captured, elapsed

REPEATS = 20
#: Lengths and candidates of users, heads, widths of queries and values.
CASES = [
    ((300, 7, 130), (40, 7, 0), 2, 32, 16),
    ((2000, 0, 64, 1), (100, 0, 64, 1), 4, 128, 128),
    ((1024, 1000), (0, 1000), 4, 64, 64),
]


def operands(batch: Sequences, config: HSTUConfig) -> tuple[torch.Tensor, ...]:
    """q, k and v as views of one matrix, as a layer has them."""
    widths = [config.heads * one for one in (config.v_width, config.qk_width, config.qk_width)]
    both = torch.randn(len(batch.items), sum(widths), device="cuda", dtype=torch.bfloat16)
    v, q, k = (one.unflatten(-1, (config.heads, -1)) for one in both.split(widths, -1))
    return q, k, v


def attention() -> None:
    """Each case with and without tables."""
    for lengths, candidates, heads, qk, width in CASES:
        for biased in (False, True):
            torch.manual_seed(0)
            config = replace(
                DLRM_V3, heads=heads, qk_width=qk, v_width=width, length=2048, relative_bias=biased
            )
            total = sum(lengths)
            empty = torch.zeros(total, dtype=torch.int64, device="cuda")
            times = torch.randint(1, 4000, (total,), device="cuda").cumsum(0)
            batch = Sequences(empty, empty, times, lengths, candidates)
            q, k, v = operands(batch, config)
            bias: Any = RelativeBias(config).cuda() if biased else None
            if biased:
                torch.nn.init.normal_(bias.positions)
                torch.nn.init.normal_(bias.times)
            with torch.no_grad():
                y = by_kernel(q, k, v, batch.layout(), bias, config)
                same = all(
                    torch.equal(y, by_kernel(q, k, v, batch.layout(), bias, config)) for _ in range(REPEATS)
                )
                error = over_bound(y, q, k, v, batch, bias, config)
            what = f"{lengths} users, {heads} x {qk}, {width}{', bias' * biased}"
            say("attention", f"{what}: error", error, "of the bound", ok=error <= 1, repeatable=same)


def over_bound(
    y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Sequences, bias: Any, config: HSTUConfig
) -> float:  # fmt: skip
    """Largest error over its limit: weights in 16 bits (2^-9 of each) and by tanh.approx (2^-11 of |s| / 2), the result in 16
    bits."""
    wide = bias.double() if bias is not None else None
    layout, (q, k, v) = batch.layout(), (x.double() for x in (q, k, v))
    exact = padded_attention(q, k, v, layout, wide, config)
    share = batch.longest / config.length
    # |SiLU(s)| is at most SiLU(s) + 0.557.
    size = padded_attention(q, k, torch.ones_like(v), layout, wide, config) + 0.557 * share
    top = config.factor * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    top = top + (0 if wide is None else wide.positions.abs().max() + wide.times.abs().max())
    limit = (2**-9 * size + 2**-12 * top * share) * v.abs().max() + 2**-8 * exact.abs()
    return float(((y.double() - exact).abs() / limit).max())


def speculation() -> None:
    """Recorded rounds beside rounds that are not."""
    subject: Any = STAND_INS[0]
    subject = replace(
        subject, shape={**subject.shape, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 6}
    )
    model = subject.build("cuda", 0)
    prompt = torch.arange(16, device="cuda")[None] * 5 % 128
    for recipe in ("bfloat16", "fp8", "int8"):
        found = {}
        for recorded in (False, True):
            made = SelfSpeculation(
                model, exit_layer=2, drafts=3, max_length=96, kv_cache=recipe, captured=recorded
            )
            found[recorded] = made.generate(prompt, 64)
        equal = int((found[True].tokens == found[False].tokens).sum()) - prompt.shape[1]
        say(
            "speculation",
            f"{recipe}: tokens of recorded rounds that are those of others, of 64",
            equal,
            "tokens",
            ok=equal == 64,
        )
        say("speculation", f"{recipe}: acceptance of random layers", found[True].acceptance, "")


@torch.no_grad()
def times() -> None:
    """DLRMv3's attention."""
    torch.manual_seed(0)
    batch = random_batch(DLRM_V3, 10, 2048, 0, "cuda")
    layout, states = batch.layout(), operands(batch, DLRM_V3)
    graph, _ = captured([lambda: by_kernel(*states, layout, None, DLRM_V3)])
    seconds = statistics.median(elapsed(graph.replay) for _ in range(20))
    pairs = sum((n - c) ** 2 / 2 + (n - c) * c for n, c in zip(batch.lengths, batch.candidates, strict=True))
    flops = 4 * DLRM_V3.heads * DLRM_V3.qk_width * pairs
    say("times", "kernel, ten users", seconds, "us a layer")
    say("times", "kernel, ten users, visible scores alone", flops / seconds / 1e6, "TFLOP/s")
    one = random_batch(DLRM_V3, 1, 2048, 0, "cuda")
    layout, states = one.layout(), operands(one, DLRM_V3)
    for name, call in (("kernel", by_kernel), ("padded", padded_attention)):
        run = lambda call=call: call(*states, layout, None, DLRM_V3)  # noqa: E731
        run()
        say("times", f"{name}, one user", statistics.median(elapsed(run) for _ in range(10)), "us a layer")


PARTS = {"attention": attention, "speculation": speculation, "times": times}


def main() -> int:
    """All parts that are named; 1 where one failed, or a bound was passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out")
    arguments = parser.parse_args()
    return run_parts(PARTS, arguments.part, "ladder_checks.csv", arguments.out)


if __name__ == "__main__":
    sys.exit(main())
