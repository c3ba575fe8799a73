"""On a GPU: embedding bags of stored tables against the reference, and their times in DLRMv2's tables.

    PYTHONPATH=. python tests/gpu/layers/embedding_bag.py [--part bits outside times sweep model] [--batch 8192]
        [--schemes int8_rowwise fp8_rowwise int4_g128] [--rows 204184588] [--out FOLDER]

bits: cases of tests/support/embedding.py, all values compared; rows of a table of more than 2**31 bytes. outside: an id outside
of the table ends a process of its own with the assertion. times: all tables of DLRMv2 in one (--rows: fewer where they do not
fit), its bags, uniform and Zipf ids, as a CUDA graph over several batches; a copy of as many bytes and torch's embedding_bag of
a bfloat16 table beside it. sweep: ids in flight and elements of a warp. model: DLRMv2 whole, tables in int8, the rest in
bfloat16, compiled: a forward of a batch and memory. A line each, and rows in FOLDER/embedding_bag.csv (else
$OUT). 204 million rows take 27 GB in 8 bits; with the bfloat16 table 79 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import from_quantized
from experiments.data.drawn_ratings import zipf
from experiments.models.click_models import Tables
from experiments.models.dlrm import DLRM, DLRMV2, HOTS, SIZES
from fast.kernels.layers import embedding_bag as host
from reference import SCHEMES, Quantized
from tests.gpu.harness.lines import on_gpu, run_parts, say
from tests.gpu.harness.timing import captured, elapsed
from tests.support.embedding import CASES, bags_of, table_of

WIDTH, REPLAYS, BATCHES = 128, 15, 6


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
    q = big_table("int8_rowwise", 20_000_000)
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


def big_table(name: str, rows: int, device: str = "cuda") -> Quantized:
    """Random codes and scales, made in pieces."""
    scheme = SCHEMES[name]
    packed = scheme.format.bits < 8
    codes = torch.empty((rows, WIDTH // 2 if packed else WIDTH), dtype=torch.uint8, device=device)
    for piece in codes.split(1 << 23):
        # No NaN of e4m3: bits of the exponent are not all set.
        piece.random_(0, 256).bitwise_and_(0xFF if scheme.format.kind == "int" else 0xBF)
    scale = torch.rand((rows, 1), device=device) * 0.01
    return Quantized(codes, scale, None, None, (rows, WIDTH), 1, scheme, packed)


def batches(batch: int, rows: int, drawn: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and offsets of several batches, sample after sample, table after table; tables are scaled to `rows` in all."""
    generator, share = np.random.default_rng(0), rows / sum(SIZES)
    sizes = [max(1, int(size * share)) for size in SIZES]
    starts = np.cumsum([0, *sizes])[:-1]
    made = []
    for _ in range(BATCHES):
        columns = []
        for start, size, hot in zip(starts, sizes, HOTS, strict=True):
            uniform = generator.random((batch, hot))
            # Frequent ids lie anywhere in a table, as hashed ones do.
            ranks = (
                zipf(uniform, size) * 2654435761 % size
                if drawn == "zipf"
                else (uniform * size).astype(np.int64)
            )
            columns.append(start + ranks)
        ids = torch.from_numpy(np.concatenate(columns, 1).reshape(-1)).cuda()
        firsts = np.concatenate([[0], np.cumsum(HOTS)[:-1]])
        offsets = torch.from_numpy((np.arange(batch)[:, None] * sum(HOTS) + firsts).reshape(-1)).cuda()
        made.append((ids, offsets))
    return made


def graph_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of the calls, all of them in a CUDA graph; the median of replays."""
    graph, count = captured(calls)
    return statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / count


def copy_rate(size: float) -> float:
    """Bytes a microsecond, read and written, of a copy of `size` bytes in all."""
    sources = [torch.empty(int(size) // 2, dtype=torch.uint8, device="cuda") for _ in range(4)]
    target = torch.empty_like(sources[0])
    return size / graph_time([lambda s=s: target.copy_(s) for s in sources])


def counted(name: str, batch: int) -> float:
    """Bytes: a row with its scale for each id, sums in bfloat16."""
    row = WIDTH * SCHEMES[name].format.bits / 8 + 4
    return batch * (sum(HOTS) * row + len(HOTS) * WIDTH * 2)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def stored_time(q: Quantized, made: Batches, features: int) -> float:
    """Microseconds of a batch of a stored table."""
    return graph_time(
        [lambda i=i, o=o: fast.embedding_bag(q, i, o, dtype="bfloat16", features=features) for i, o in made]
    )


def dense_time(table: torch.Tensor, made: Batches) -> float:
    """Microseconds of torch's."""
    return graph_time(
        [lambda i=i, o=o: torch.nn.functional.embedding_bag(i, table, o, mode="sum") for i, o in made]
    )


def times(schemes: list[str], batch: int, rows: int) -> None:
    """Microseconds, and the share of a copy's rate at the bytes that are counted."""
    for drawn in ("uniform", "zipf"):
        made = batches(batch, rows, drawn)
        for name in schemes:
            torch.cuda.empty_cache()
            q, size = big_table(name, rows), counted(name, batch)
            copied = copy_rate(size)
            held = round(torch.cuda.memory_allocated() / 1e9, 1)
            for features in (len(HOTS), 1):
                us = stored_time(q, made, features)
                share = round(size / us / copied, 3)
                say("times", f"{name} {drawn} features={features}", us, "us", share=share, rows=rows, gb=held)
            del q
        torch.cuda.empty_cache()
        us = dense_time(torch.zeros((rows, WIDTH), dtype=torch.bfloat16, device="cuda"), made)
        say("times", f"torch, bfloat16 table {drawn}", us, "us", rows=rows)


def sweep(batch: int, rows: int) -> None:
    """Ids in flight and elements of a warp."""
    made = batches(batch, rows, "uniform")
    q, size = big_table("int8_rowwise", rows), counted("int8_rowwise", batch)
    copied, usual = copy_rate(size), (host.TOGETHER, host.WARP)
    for host.TOGETHER in (1, 2, 4, 8):
        for host.WARP in (512, 1024, 2048):
            us = stored_time(q, made, len(HOTS))
            say(
                "sweep",
                f"together {host.TOGETHER} warp {host.WARP}",
                us,
                "us",
                share=round(size / us / copied, 3),
            )
    host.TOGETHER, host.WARP = usual


def whole_model(rows: int, device: str = "cuda") -> DLRM:
    """DLRMv2 in bfloat16 whose tables are int8 by rows, of random numbers; tables are scaled to `rows` in all."""
    share = rows / sum(SIZES)
    sizes = tuple(max(1, int(size * share)) for size in SIZES)
    tables = Tables(sizes, HOTS, 1, device)
    q = big_table("int8_rowwise", sum(sizes), device)
    tables.width = WIDTH
    stored = from_quantized(q, Recipe(weight=q.scheme), torch.bfloat16)
    tables.bag.weight = torch.nn.Parameter(stored, requires_grad=False)
    return DLRM(replace(DLRMV2, sizes=sizes), tables=tables, device=device).to(torch.bfloat16).eval()


@torch.no_grad()
def model_time(batch: int, rows: int) -> None:
    """A forward of the whole model, compiled, and the memory that it holds."""
    model = whole_model(rows)
    step = torch.compile(model)
    dense = torch.randn((batch, DLRMV2.dense), device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor(model.tables.sizes, device="cuda").repeat_interleave(
        torch.tensor(HOTS, device="cuda")
    )
    ids = [(torch.rand((batch, len(sizes)), device="cuda") * sizes).long() for _ in range(BATCHES)]
    us = graph_time([lambda i=i: step(dense, i) for i in ids])
    held = round(torch.cuda.memory_allocated() / 1e9, 1)
    say("model", "DLRMv2 forward, tables int8_rowwise", us, "us", samples_s=round(batch / us * 1e6), gb=held)


def main() -> int:
    """The parts that were asked for; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "outside", "times", "sweep", "model"])
    parser.add_argument("--schemes", nargs="+", default=["int8_rowwise", "fp8_rowwise", "int4_g128"])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=sum(SIZES))
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "bits": bits,
        "outside": outside,
        "times": lambda: times(options.schemes, options.batch, options.rows),
        "sweep": lambda: sweep(options.batch, options.rows),
        "model": lambda: model_time(options.batch, options.rows),
    }
    return run_parts(parts, options.part, "embedding_bag.csv", options.out)


if __name__ == "__main__":
    sys.exit(main())
