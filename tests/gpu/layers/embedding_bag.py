"""On a GPU: embedding bags of stored tables against the reference, and how their kernels' forms change their time.

    PYTHONPATH=. python tests/gpu/layers/embedding_bag.py [--part bits outside sweep layouts granularity] [--batch 8192]
        [--rows 204184588] [--out FOLDER]

bits: cases of tests/support/embedding.py, all values compared, by Triton's kernel too where another one serves; rows of a
table of more than 2**31 bytes. outside: an id outside of the table ends a process of its own with the assertion. sweep:
microseconds of DLRMv2's bags by forms of the kernel for Hopper, beside Triton's and copies of as many bytes (35 seconds).
layouts: what reading as many rows at random takes by where scales lie (8 seconds). granularity, not by default: the kernel
under a hint to the cache. A line each, and rows in FOLDER/embedding_bag.csv (else $OUT). Times of all tables beside torch's
are a part of the experiment: `ao-lab reproduce loka --scale full --only speed`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from experiments.loka import table_speed
from experiments.loka.table_speed import ROWS, UNIFORM, WIDTH, ZIPF, stored_table
from experiments.models.dlrm import HOTS
from fast.kernels.layers import embedding_bag as host
from fast.kernels.layers import sm90_embedding_bag as sm90
from fast.kernels.layers.sm90_embedding_bag import VARIANT, Variant
from reference import Quantized
from tests.gpu.harness.lines import on_gpu, run_parts, say
from tests.gpu.harness.timing import captured, elapsed, measured
from tests.support.embedding import CASES, bags_of, table_of

REPLAYS, BATCHES = 15, 3


def bits() -> None:
    """Values that differ."""
    for case in CASES:
        q = table_of(case)
        ids, offsets, weights = bags_of(case, q.shape[0])
        expected = reference.embedding_bag(
            q, ids, offsets, weights, mode=case.mode, padding=case.padding, dtype=case.dtype
        )
        call = partial(
            fast.embedding_bag, on_gpu(q), ids.cuda(), offsets.cuda(), None if weights is None else weights.cuda(),
            mode=case.mode, padding=case.padding, dtype=case.dtype, features=case.features,
        )  # fmt: skip
        carrier = torch.int32 if case.dtype == "float32" else torch.int16
        for kernel, hopper in (("", sm90.taken), (", Triton", mock.Mock(return_value=None))):
            with mock.patch.object(sm90, "taken", hopper):
                found = call().cpu()
            wrong = int((found.view(carrier) != expected.view(carrier)).sum())
            say(
                "bits",
                f"{case.scheme} {case.mode} {case.dtype} {case.width}{kernel}",
                wrong,
                "differ",
                of=found.numel(),
            )
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


#: Forms of the kernel for Hopper with bags of a warp; the first one serves. By 23 bags there are 2.9 times as many warps as run
#: at once, by 26 2.6 times.
FORMS = (
    (VARIANT, None), (VARIANT, 13), (VARIANT, 23), (VARIANT, 32), (Variant(4, 32, 2, 4), None), (Variant(4, 32, 3, 4), None),
    (Variant(1, 32, 2, 22), None), (Variant(8, 32, 2, 3), None),
)  # fmt: skip
#: Rows of a table that lies in the second-level cache.
FEW_ROWS = 1000
#: Bytes from a row to the next one, codes and scale.
PITCHES = (144,)


def sweep(batch: int, rows: int) -> None:
    """Microseconds of a batch by forms of the kernel, in turn, beside Triton's; of ids of a 27th of the rows, where fewer pages
    are touched, and of Zipf ids. Of a thousand rows, which lie in the second-level cache: neighbours, whose scales are 32 of
    its lines; far from each other; with one scale, where instructions and codes are left. Copies of as many bytes and sectors.
    Sums are compared with Triton's."""
    q = stored_table("int8_rowwise", rows, "cuda")
    with mock.patch.object(table_speed, "BATCHES", BATCHES):
        drawn = {
            "all rows": table_speed.bags_of(UNIFORM, batch, rows, "cuda").batches,
            "Zipf": table_speed.bags_of(ZIPF, batch, rows, "cuda").batches,
            "a 27th of the rows": table_speed.bags_of(UNIFORM, batch, rows // 27, "cuda").batches,
        }
    few = [(i % FEW_ROWS, o) for i, o in drawn["all rows"]]
    drawn["a thousand neighbours"] = few
    drawn["a thousand rows far apart"] = [(i * (rows // FEW_ROWS), o) for i, o in few]
    one = replace(q, scale=q.scale[:1].expand(q.scale.shape))
    for name, batches in drawn.items():
        calls = {"Triton": [partial(by_triton, q, i, o) for i, o in batches]}
        for variant, each in FORMS if name == "all rows" else FORMS[:1]:
            calls[f"{tuple(variant)}, {each or 'its'} bags a warp"] = forms(q, batches, variant, each)
        if name != "Zipf":
            calls["one scale for all"] = forms(one, batches)
        if name == "all rows":
            calls |= {
                f"rows of {pitch} bytes with their scale": forms(beside(q, pitch), batches)
                for pitch in PITCHES
            }
        timed(name, calls)
    for word, row in (("bytes", WIDTH + 4), ("sectors of 32", WIDTH + 32), ("pairs of sectors", WIDTH + 64)):
        size = batch * (sum(HOTS) * (row + 8) + len(HOTS) * WIDTH * 2)
        source = torch.empty(int(size / 2), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        say("sweep", f"a copy of as many {word}", graph_time([partial(target.copy_, source)] * 4), "us")


def timed(name: str, calls: dict[str, list[Callable[[], torch.Tensor]]]) -> None:
    """Lines of methods in turn: values that differ from the first one's, microseconds."""
    expected = next(iter(calls.values()))[0]().view(torch.int16)
    for form, several in calls.items():
        if not form.startswith("one scale"):
            say("bits", f"{name}: {form}", int((several[0]().view(torch.int16) != expected).sum()), "differ")
    found = measured(calls, REPLAYS)
    for form, us in found["us"].items():
        say("sweep", f"{name}: {form}", us, "us")
    for form, why in found.get("failed", {}).items():
        say("sweep", f"{name}: {form} FAILED {why}", float("nan"), "us", ok=False)


def by_triton(q: Quantized, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums by Triton's kernel."""
    with mock.patch.object(sm90, "taken", return_value=None):
        return fast.embedding_bag(q, ids, offsets, dtype="bfloat16", features=len(HOTS))


def forms(q: Quantized, batches: list[tuple[torch.Tensor, torch.Tensor]], variant: Variant = VARIANT,
          each: int | None = None) -> list[Callable[[], torch.Tensor]]:  # fmt: skip
    """Calls of a form of the kernel for Hopper."""
    out = torch.empty((len(batches[0][1]), q.shape[1]), dtype=torch.bfloat16, device="cuda")
    problem = sm90.problem_of(q, *batches[0], "sum", "bfloat16")
    return [partial(sm90.embedding_bag, q, i, o, out, problem, variant, each) for i, o in batches]


def beside(q: Quantized, pitch: int) -> Quantized:
    """The same table, each row's scale behind its codes."""
    rows = torch.empty((q.shape[0], pitch), dtype=torch.uint8, device="cuda")
    rows[:, :WIDTH] = q.codes
    scale = rows.view(torch.float32)[:, WIDTH // 4 : WIDTH // 4 + 1]
    scale.copy_(q.scale)
    return replace(q, codes=rows[:, :WIDTH], scale=scale)


#: CU_LIMIT_MAX_L2_FETCH_GRANULARITY, a hint of a process's context, and its values.
GRANULARITY, FETCHES = 5, (32, 64, 128)


def granularity(batch: int, rows: int) -> None:
    """Microseconds of the kernel, and of reading parts of as many rows at random, by how many bytes the second-level cache may
    fetch for a sector: a hint of this process's context (cuCtxSetLimit), set back at the end."""
    q = stored_table("int8_rowwise", rows, "cuda")
    with mock.patch.object(table_speed, "BATCHES", BATCHES):
        calls = {"bags": forms(q, table_speed.bags_of(UNIFORM, batch, rows, "cuda").batches)}
    calls |= {f"{4 * words} bytes a row": reading(q.codes, batch * sum(HOTS), words) for words in (8, 16, 32)}
    graphs = {name: captured(several) for name, several in calls.items()}
    cuda, usual = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    cuda.cuCtxGetLimit(ctypes.byref(usual), GRANULARITY)
    for wanted in (usual.value, *FETCHES, usual.value):
        status, now = cuda.cuCtxSetLimit(GRANULARITY, ctypes.c_size_t(wanted)), ctypes.c_size_t()
        cuda.cuCtxGetLimit(ctypes.byref(now), GRANULARITY)
        for name, (graph, count) in graphs.items():
            us = statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / count
            say("granularity", f"{name}: {now.value} (asked for {wanted}, status {status})", us, "us")


def reading(codes: torch.Tensor, count: int, words: int) -> list[Callable[[], object]]:
    """Calls that read the first words of rows at random."""
    together = 8
    programs = -(-count // (LANES * together * TURNS))
    out = torch.empty((programs * LANES, words), dtype=torch.int32, device="cuda")
    drawn = [torch.randint(0, len(codes), (count,), device="cuda") for _ in range(BATCHES)]
    return [
        partial(rows_kernel[(programs,)], codes.view(torch.int32), None, ids, out, count, WORDS, NOWHERE, words, LANES,
                together, TURNS, num_warps=1) for ids in drawn
    ]  # fmt: skip


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
        "granularity": lambda: granularity(options.batch, options.rows),
    }
    return run_parts(parts, options.part, "embedding_bag.csv", options.out)


if __name__ == "__main__":
    sys.exit(main())
