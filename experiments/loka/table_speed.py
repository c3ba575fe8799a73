"""Part "table speed" of `loka`, on a GPU alone: bags of embedding tables in low precision, at all rows of DLRMv2 on one GPU.

The 26 tables are one, of 204 million rows of random codes; a batch of 8192 has its bags of 1 to 100 ids, drawn uniformly or by
Zipf. "bytes" is the rate of the bytes that have to move (a row with its scale for each id, the sums in bfloat16) over that of a
copy of as many in the same process. Beside the stored tables torch's bags of a bfloat16 one, and DLRMv2 whole, compiled, whose
tables are int8. Methods are timed in turn, as CUDA graphs over several batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.measure.turns import Call, Plan, Span, Watch, interleaved, prepare, summary, watch_of
from ao_lab.tensor.quantized_tensor import from_quantized
from experiments.data.drawn_ratings import zipf
from experiments.harness.bench import copy_rate, repeated
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Deadline, Stages, Values, Wrong, kernel
from experiments.models.click_models import Tables
from experiments.models.dlrm import DLRM, DLRMV2, HOTS, SIZES
from reference import SCHEMES, Quantized, dequantize

TABLES = "table speed"
TIME, BYTES, MEMORY = "time", "bytes over a copy's", "table"
UNIFORM, ZIPF = "uniform ids", "Zipf ids"
STORED = ("int8_rowwise", "fp8_rowwise")
DENSE, WHOLE = "torch, bfloat16 table", "DLRMv2 forward, int8 tables"
METHODS = (*STORED, DENSE, WHOLE)
PLANS = {"cuda": Plan(rounds=12, warmup=1, seconds=2.0), "cpu": Plan(rounds=1, warmup=0, fewest=1)}
WIDTH, BATCH, BATCHES, ROWS = 128, 8192, 6, sum(SIZES)
#: Bags that are compared, and how far their sums may be off: bfloat16 rounds one once, other orders of float32 sums add little.
COMPARED, MOST_ERROR = 260, 2**-8


@dataclass(frozen=True)
class Bags:
    """Ids and offsets of several batches, sample after sample, table after table; dense features of one."""

    batches: list[tuple[Tensor, Tensor]]
    dense: Tensor

    @property
    def samples(self) -> int:
        """Of a batch."""
        return len(self.dense)


def bags_of(drawn: str, batch: int, rows: int, device: str) -> Bags:
    """DLRMv2's bags; tables are scaled to `rows` in all. Frequent ids lie anywhere in a table, as hashed ones do."""
    generator, sizes = np.random.default_rng(0), sizes_of(rows)
    starts = np.cumsum([0, *sizes])[:-1]
    firsts = np.cumsum([0, *HOTS])[:-1]
    offsets = torch.from_numpy((np.arange(batch)[:, None] * sum(HOTS) + firsts).reshape(-1)).to(device)
    made = []
    for _ in range(BATCHES):
        columns = []
        for start, size, hot in zip(starts, sizes, HOTS, strict=True):
            uniform = generator.random((batch, hot))
            ranks = (
                zipf(uniform, size) * 2654435761 % size
                if drawn == ZIPF
                else (uniform * size).astype(np.int64)
            )
            columns.append(start + ranks)
        made.append((torch.from_numpy(np.concatenate(columns, 1).reshape(-1)).to(device), offsets))
    return Bags(made, torch.randn((batch, DLRMV2.dense), device=device, dtype=torch.bfloat16))


def sizes_of(rows: int) -> list[int]:
    """Rows of each table, so many in all or few less."""
    return [max(1, int(size * rows / sum(SIZES))) for size in SIZES]


def stored_table(name: str, rows: int, device: str) -> Quantized:
    """Random codes and scales, made in pieces."""
    scheme = SCHEMES[name]
    packed = scheme.format.bits < 8
    codes = torch.empty((rows, WIDTH // 2 if packed else WIDTH), dtype=torch.uint8, device=device)
    for piece in codes.split(1 << 23):
        # No NaN of e4m3: bits of the exponent are not all set.
        piece.random_(0, 256).bitwise_and_(0xFF if scheme.format.kind == "int" else 0xBF)
    scale = torch.rand((rows, 1), device=device) * 0.01
    return Quantized(codes, scale, None, None, (rows, WIDTH), 1, scheme, packed)


def moved(name: str, samples: int) -> float:
    """Bytes: a row with its scale for each id, sums in bfloat16."""
    row = WIDTH * SCHEMES[name].format.bits / 8 + 4
    return samples * (sum(HOTS) * row + len(HOTS) * WIDTH * 2)


def whole_model(q: Quantized, device: str) -> DLRM:
    """DLRMv2 in bfloat16 over a stored table, the rest of random numbers."""
    sizes = tuple(sizes_of(q.shape[0]))
    tables = Tables(sizes, HOTS, 1, device)
    tables.width = WIDTH
    stored = from_quantized(q, Recipe(weight=q.scheme), torch.bfloat16)
    tables.bag.weight = nn.Parameter(stored, requires_grad=False)
    return DLRM(replace(DLRMV2, sizes=sizes), tables=tables, device=device).to(torch.bfloat16).eval()


@dataclass
class Bench:
    """What is measured with. tables: those that were made, kept for the model."""

    bags: Bags
    rows: int
    device: str
    watch: Watch
    compiled: bool = True
    tables: dict[str, Quantized] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)

    def make(self, method: str) -> Values:
        """Make a method's calls, compare the first one's sums, and capture them."""
        before = self.held()
        calls = self.calls(method)
        values: Values = {MEMORY: ((self.held() - before) / 1e9, "GB")} if self.device == "cuda" else {}
        values |= kernel(launched(calls[0]))
        self.spans[method] = prepare(self.watch, calls, PLANS[self.device])
        return values

    def held(self) -> int:
        """Bytes of tensors on a GPU."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def calls(self, method: str) -> list[Call]:
        """A call a batch."""
        if method == DENSE:
            table = torch.zeros((self.rows, WIDTH), dtype=torch.bfloat16, device=self.device)
            return [
                partial(nn.functional.embedding_bag, i, table, o, mode="sum") for i, o in self.bags.batches
            ]
        if method == WHOLE:
            return self.model_calls()
        q = self.tables[method] = stored_table(method, self.rows, self.device)
        check_sums(q, *self.bags.batches[0])
        options: Mapping[str, Any] = {"dtype": "bfloat16", "features": len(HOTS)}
        return [partial(fast.embedding_bag, q, i, o, **options) for i, o in self.bags.batches]

    def model_calls(self) -> list[Call]:
        """Of the whole model, which counts ids from where a table begins."""
        q = self.tables.get(STORED[0]) or stored_table(STORED[0], self.rows, self.device)
        model = whole_model(q, self.device)
        run: Callable[..., Any] = torch.compile(model, dynamic=False) if self.compiled else model
        starts = torch.from_numpy(np.cumsum([0, *sizes_of(self.rows)])[:-1]).to(self.device)
        starts = starts.repeat_interleave(torch.tensor(HOTS, device=self.device))
        ids = [i.view(self.bags.samples, -1) - starts for i, _ in self.bags.batches]
        return [partial(run, self.bags.dense, one) for one in ids]


def check_sums(q: Quantized, ids: Tensor, offsets: Tensor) -> None:
    """Wrong where sums of the first bags are not those of the rows in float32."""
    ids, offsets = ids[: int(offsets[COMPARED])], offsets[:COMPARED]
    found = fast.embedding_bag(q, ids, offsets, dtype="bfloat16").float()
    picked = Quantized(q.codes[ids], q.scale[ids], None, None, (len(ids), WIDTH), 1, q.scheme, q.packed)
    exact = nn.functional.embedding_bag(
        torch.arange(len(ids), device=ids.device), dequantize(picked, "float32"), offsets, mode="sum"
    )
    error = float((found - exact).norm() / exact.norm())
    if not error < MOST_ERROR:
        raise Wrong(f"the error of sums is {error:.3g}")


@torch.no_grad()
def measure(
    drawn: str, device: str, deadline: Deadline, batch: int = BATCH, rows: int = ROWS, compiled: bool = True
) -> dict[str, Values]:
    """Values of every method, timed in turn; of one that fails or comes too late its status."""
    torch.manual_seed(0)
    rows = sum(sizes_of(rows))
    stages = Stages(f"tables, {drawn}", deadline, told=device == "cuda")
    bench = Bench(bags_of(drawn, batch, rows, device), rows, device, watch_of(device), compiled)
    stages.done("ids drawn")
    plan, results = PLANS[device], dict[str, Values]()
    for method in METHODS:
        results[method] = stages.method(partial(bench.make, method))
        stages.done(f"{method}, drawn and compared")
    times = interleaved(bench.watch, bench.spans, plan) if bench.spans else {}
    stages.done("timed")
    for at, method in enumerate(bench.spans):
        found = summary(times[method])
        more = repeated(times, method) if at == 0 else {}
        if method in STORED:
            size = moved(method, batch)
            rate = copy_rate(bench.watch, int(size / 8), device, plan)
            more |= {BYTES: (size / found.median / rate, "ratio")}
        results[method] = {**results[method], **found.values("us"), **more}
    return results


__all__ = ["BYTES", "DENSE", "METHODS", "ROWS", "STORED", "TABLES", "TIME", "UNIFORM", "WHOLE", "WIDTH", "ZIPF", "bags_of",
           "measure", "stored_table"]  # fmt: skip
