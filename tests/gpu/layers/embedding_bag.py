"""On a GPU: embedding bags of stored tables against the reference, and how their kernel's constants change its time.

    PYTHONPATH=. python tests/gpu/layers/embedding_bag.py [--part bits outside sweep layouts] [--batch 8192] [--rows 204184588]
        [--out FOLDER]

bits: cases of tests/support/embedding.py, all values compared; rows of a table of more than 2**31 bytes. outside: an id outside
of the table ends a process of its own with the assertion. sweep: microseconds of DLRMv2's bags by ids in flight and elements of
a warp (nine compilations, 25 seconds), beside copies of as many bytes. layouts: what reading as many rows at random takes by
where scales lie (8 seconds). A line each, and rows in FOLDER/embedding_bag.csv (else $OUT). Times of all tables beside torch's
are a part of the experiment: `ao-lab reproduce loka --scale full --only speed`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from experiments.loka import table_speed
from experiments.loka.table_speed import ROWS, UNIFORM, WIDTH, stored_table
from experiments.models.dlrm import HOTS
from fast.kernels.layers import embedding_bag as host
from reference import Quantized
from tests.gpu.harness.lines import on_gpu, run_parts, say
from tests.gpu.harness.timing import captured, elapsed, measured
from tests.support.embedding import CASES, bags_of, table_of

REPLAYS = 15


def bits() -> None:
    """Values that differ."""
    for case in CASES:
        q = table_of(case)
        ids, offsets, weights = bags_of(case, q.shape[0])
        expected = reference.embedding_bag(
            q, ids, offsets, weights, mode=case.mode, padding=case.padding, dtype=case.dtype
        )
        found = fast.embedding_bag(
            on_gpu(q), ids.cuda(), offsets.cuda(), None if weights is None else weights.cuda(), mode=case.mode,
            padding=case.padding, dtype=case.dtype, features=case.features,
        ).cpu()  # fmt: skip
        carrier = torch.int32 if case.dtype == "float32" else torch.int16
        wrong = int((found.view(carrier) != expected.view(carrier)).sum())
        say("bits", f"{case.scheme} {case.mode} {case.dtype} {case.width}", wrong, "differ", of=found.numel())
    q = stored_table("int8_rowwise", 20_000_000, "cuda")
    ids = torch.randint(0, q.shape[0], (3000,), device="cuda")
    ids[:3] = torch.tensor([q.shape[0] - 1, 2**31 // WIDTH, 2**31 // WIDTH - 1], device="cuda")
    offsets = torch.arange(0, 3000, 3, device="cuda")
    picked = Quantized(q.codes[ids].cpu(), q.scale[ids].cpu(), None, None, (3000, WIDTH), 1, q.scheme)
    expected = reference.embedding_bag(picked, torch.arange(3000), offsets.cpu())
    wrong = int(
        (fast.embedding_bag(q, ids, offsets).cpu().view(torch.int32) != expected.view(torch.int32)).sum()
    )
    say("bits", "int8_rowwise, rows beyond 2**31 bytes", wrong, "differ", of=expected.numel())


OUTSIDE = """
import torch, fast, reference
q = reference.quantize(torch.ones(8, 128, device="cuda"), "int8_rowwise")
y = fast.embedding_bag(q, torch.tensor([1, 8], device="cuda"), torch.tensor([0], device="cuda"))
torch.cuda.synchronize()
"""


def outside() -> None:
    """The assertion's text in what a process says before it ends."""
    done = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=False)
    said = host.OUTSIDE in done.stderr and done.returncode != 0
    say("outside", "an id outside of the table", float(said), "refused")


def graph_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of the calls, all of them in a CUDA graph; the median of replays."""
    graph, count = captured(calls)
    return statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / count


#: Ids in flight, those of what is left of a bag, elements of a warp; the first is what serves today.
SWEPT = (
    (4, 2, 512), (2, 2, 1024), (4, 4, 1024), (4, 2, 1024), (8, 2, 1024), (8, 2, 512), (8, 4, 512), (8, 2, 256), (16, 2, 256),
)  # fmt: skip


def sweep(batch: int, rows: int) -> None:
    """Microseconds of a batch by ids in flight and elements of a warp, in turn, and the floors: a copy of as many bytes, of as
    many sectors, and the same ids in a table of a 27th of the rows, where fewer pages are touched; sums are compared."""
    q = stored_table("int8_rowwise", rows, "cuda")
    usual, expected = (host.TOGETHER, host.FEW, host.WARP), None
    for name, few in (("all rows", rows), ("a 27th of the rows", rows // 27)):
        made = table_speed.bags_of(UNIFORM, batch, few, "cuda").batches
        calls = [
            lambda i=i, o=o: fast.embedding_bag(q, i, o, dtype="bfloat16", features=len(HOTS))
            for i, o in made
        ]
        graphs = {}
        for one in SWEPT:
            host.TOGETHER, host.FEW, host.WARP = one
            graphs[one] = captured(calls)
            sums = calls[0]().view(torch.int16)
            expected = sums if one == SWEPT[0] else expected
            say("bits", f"together {one}", int((sums != expected).sum()), "differ")
        host.TOGETHER, host.FEW, host.WARP = usual
        took = {one: [] for one in SWEPT}
        for _ in range(REPLAYS):
            for one, (graph, count) in graphs.items():
                took[one].append(elapsed(graph.replay) / count)
        for one, times in took.items():
            say(
                "sweep",
                f"{name}: together {one[0]}, few {one[1]}, warp {one[2]}",
                statistics.median(times),
                "us",
            )
    for word, row in (("bytes", WIDTH + 4), ("sectors of 32", WIDTH + 32), ("pairs of sectors", WIDTH + 64)):
        size = batch * (sum(HOTS) * (row + 8) + len(HOTS) * WIDTH * 2)
        source = torch.empty(int(size / 2), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        say("sweep", f"a copy of as many {word}", graph_time([partial(target.copy_, source)] * 4), "us")


#: Words of 4 bytes of a row of codes, rows that a warp reads at once, and how often ids follow each other in a program.
WORDS, LANES, TURNS = WIDTH // 4, 8, 4
NOWHERE, APART, BESIDE = 0, 1, 2


@triton.jit
def rows_kernel(
    table, scale, ids, out, count, STRIDE: tl.constexpr, WHERE: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr,
    TOGETHER: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Sums of words of rows of STRIDE words at random: what reading alone takes, with a word of a scale apart or beside."""
    total = tl.zeros((P, WORDS), tl.int32)
    begin = tl.program_id(0) * P * TOGETHER * TURNS
    for turn in range(TURNS):
        parts = ()
        for step in tl.static_range(TOGETHER):
            place = begin + (turn * TOGETHER + step) * P + tl.arange(0, P)[:, None]
            row = tl.load(ids + place, mask=place < count, other=0)
            word = tl.load(table + row * STRIDE + tl.arange(0, WORDS)[None, :])
            if WHERE == 1:
                word += tl.load(scale + row)
            if WHERE == 2:
                word += tl.load(table + row * STRIDE + WORDS)
            parts = parts + (word,)  # noqa: RUF005 -- Triton unpacks no tuples
        # As in the kernel of bags: else loads sink to their uses.
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b64 $0, $1;", "=l,l", [row], dtype=tl.int64, is_pure=False, pack=1
        )
        for step in tl.static_range(TOGETHER):
            total += parts[step]
    tl.store(
        out + (tl.program_id(0) * P + tl.arange(0, P)[:, None]) * WORDS + tl.arange(0, WORDS)[None, :], total
    )


def layouts(batch: int, rows: int) -> None:
    """Microseconds of reading as many rows at random as a batch has ids, by where a row's scale lies: nowhere, in a table of
    its own, behind the row's codes (rows of 160 bytes, and of 192, which begin at multiples of 64)."""
    table = torch.zeros(rows * (WORDS + 1), dtype=torch.int32, device="cuda")
    count, calls = batch * sum(HOTS), dict[str, list[Callable[[], object]]]()
    for together in (4, 8):
        for name, stride, where in (
            ("128 bytes", WORDS, NOWHERE), ("128 bytes and a scale apart", WORDS, APART),
            ("160 bytes, the scale beside", 40, BESIDE), ("192 bytes, the scale beside", 48, BESIDE),
        ):  # fmt: skip
            programs = -(-count // (LANES * together * TURNS))
            out = torch.empty((programs * LANES, WORDS), dtype=torch.int32, device="cuda")
            drawn = [torch.randint(0, len(table) // 48, (count,), device="cuda") for _ in range(2)]
            scale = table[rows * WORDS :] if where == APART else None
            if where == APART:
                drawn = [one % min(rows, len(scale)) for one in drawn]
            calls[f"{name}, together {together}"] = [
                partial(rows_kernel[(programs,)], table, scale, ids, out, count, stride, where, WORDS, LANES, together, TURNS,
                        num_warps=1) for ids in drawn
            ]  # fmt: skip
    for name, us in measured(calls)["us"].items():
        say("layouts", name, us, "us")


def main() -> int:
    """The parts that were asked for; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "outside", "sweep", "layouts"])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "bits": bits,
        "outside": outside,
        "sweep": lambda: sweep(options.batch, options.rows),
        "layouts": lambda: layouts(options.batch, options.rows),
    }
    return run_parts(parts, options.part, "embedding_bag.csv", options.out)


if __name__ == "__main__":
    sys.exit(main())
