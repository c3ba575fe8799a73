"""`weight_and_bias_gradients` on a GPU: exact results of integers, bounds and repeated bits of random ones, times of its ways.

    PYTHONPATH=. python tests/gpu/sparsity/training/linear_gradients.py [--seconds 90] [--no-checks] [--no-times]

Each way computes each shape, whichever the rule takes: integers, whose sums are exact in float32, beside float64; random ones
beside float64 within the bound of float32 sums in any order, rounded once, the same bits a hundred times over; the weight's
gradient beside torch's product, bit for bit; a capture by a process that has made no plan before; the operator, compiled; what
lies elsewhere or begins at an odd address. Times are of CUDA graphs whose calls go over as many matrices as L2 does not hold;
the rule's way is marked. linear_gradients.json in the folder $OUT, where that is set, has the times. Exits with 1 where a bit
differs or a call raises, with 2 where something was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from fast.kernels import cublaslt
from fast.layers.linear_gradients import apart, beside, way_of, weight_and_bias_gradients
from tests.gpu.sparsity.progress import Progress
from tests.gpu.sparsity.training.column_sums import captured, replayed

#: Rows, outputs, inputs.
Shape = tuple[int, int, int]
Pair = tuple[torch.Tensor, torch.Tensor]
PUBLISHED: tuple[Shape, ...] = ((13008, 4096, 1024), (13008, 1024, 4096))
SHAPES: tuple[Shape, ...] = (*PUBLISHED, (8193, 1024, 264), (4099, 1040, 4096), (2048, 1024, 1024))
TIMED: tuple[Shape, ...] = (
    *PUBLISHED, (13008, 1024, 1024), (13008, 2048, 1024), (13008, 8192, 1024), (13008, 4096, 2048), (13008, 2048, 2048),
    (13008, 1024, 2048), (4096, 4096, 1024), (32768, 4096, 1024), (32768, 1024, 4096), (32768, 3072, 768),
    (13008, 4096, 4096), (4096, 1024, 4096), (13008, 2048, 8192), (8192, 14336, 4096),
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16)
REPEATS, ROUNDS, BYTES = 100, 7, 150_000_000
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair | None]] = {
    "apart": apart,
    "beside": beside,
    "epilogue": cublaslt.weight_and_bias_gradients,
}


def matrices(shape: Shape, dtype: torch.dtype, most: int | None = None) -> Pair:
    """g and x, random normal or random integers up to `most`."""
    rows, n, k = shape
    if most is None:
        g, x = (torch.randn(rows, width, device="cuda") for width in (n, k))
    else:
        g, x = (torch.randint(-most, most + 1, (rows, width), device="cuda") for width in (n, k))
    return g.to(dtype), x.to(dtype)


@contextmanager
def whole_sums() -> Iterator[None]:
    """Partial sums of torch's products are not rounded."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


def first_in_a_capture(progress: Progress) -> None:
    """A plan that is made while a graph is captured."""
    g, x = matrices(PUBLISHED[0], torch.float16, 2)
    g.t().mm(x), apart(g, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = weight_and_bias_gradients(g, x)
    g.copy_(g.roll(1, 1)), graph.replay()
    progress.check("a plan made in a capture", same(made, exact(g, x)))
    progress.check("the plan has an algorithm", not cublaslt.FAILED, str(cublaslt.FAILED))


def exact(g: torch.Tensor, x: torch.Tensor) -> Pair:
    """Of integers: float32 sums, rounded once."""
    return (g.float().t() @ x.float()).to(g.dtype), g.double().sum(0).to(g.dtype)


def same(one: Pair, other: Pair) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@whole_sums()
def check(progress: Progress, shape: Shape, dtype: torch.dtype) -> None:
    """Every way."""
    integers, (g, x) = matrices(shape, dtype, 2), matrices(shape, dtype)
    # Sums far from zero, where a sum of fewer bits would show.
    high = g.abs() + 1
    for name, way in WAYS.items():
        label = f"{name} {shape} {dtype}"
        made = way(*integers)
        if made is None:
            progress.say(f"  {label}: the library has none")
            continue
        right = exact(*integers)
        # Torch's products may round partial sums.
        wanted = right[0] if name == "epilogue" else integers[0].t().mm(integers[1])
        progress.check(f"{label}, weight of integers", torch.equal(made[0], wanted), "bits differ")
        progress.check(f"{label}, bias of integers", torch.equal(made[1], right[1]), "bits differ")
        for data in (g, high):
            dw, db = way(data, x)
            if name != "epilogue":
                progress.check(f"{label}, weight", torch.equal(dw, data.t().mm(x)), "not torch's bits")
            else:
                progress.check(f"{label}, weight", product_within(dw, data, x), "off")
            progress.check(f"{label}, bias", within(db, data), "off")
            again = sum(not same(way(data, x), (dw, db)) for _ in range(REPEATS))
            progress.check(f"{label}, {REPEATS} times", not again, f"{again} differ")


def product_within(dw: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> bool:
    """The same of products, each of which is exact in float32."""
    (a, b), unit = (g.double().t(), x.double()), len(g) * 2.0**-24
    right, allowed = a @ b, unit / (1 - unit) * (a.abs() @ b.abs())
    return bool((((right - allowed).to(dw.dtype) <= dw) & (dw <= (right + allowed).to(dw.dtype))).all())


def within(db: torch.Tensor, g: torch.Tensor) -> bool:
    """Whether sums are within M 2^-24 / (1 - M 2^-24) of the sum of absolute values before their rounding."""
    wide, unit = g.double(), len(g) * 2.0**-24
    right, allowed = wide.sum(0), unit / (1 - unit) * wide.abs().sum(0)
    low, high = (right - allowed).to(db.dtype), (right + allowed).to(db.dtype)
    return bool(((low <= db) & (db <= high)).all())


@whole_sums()
def check_elsewhere(progress: Progress) -> None:
    """The public function and its operator; operands that no fast way takes; two streams; another thread of autograd."""
    for dtype in DTYPES:
        for shape in PUBLISHED:
            g, x = matrices(shape, dtype, 2)
            right, compiled = exact(g, x), torch.compile(lambda g, x: weight_and_bias_gradients(g, x))
            for name, call in (
                ("function", weight_and_bias_gradients),
                ("operator", torch.ops.ao_lab.weight_and_bias_gradients),
                ("compiled", compiled),
            ):
                progress.check(f"{name} {shape} {dtype}", same(tuple(call(g, x)), right))
            wide = torch.cat([g, g], 1)[:, : g.shape[1]]
            moved = torch.cat([g.new_zeros(1), g.view(-1)])[1:].view(g.shape)
            for name, other in (
                ("columns", wide),
                ("odd address", moved),
                ("turned", g.t().contiguous().t()),
            ):
                progress.check(f"{name} {shape} {dtype}", same(weight_and_bias_gradients(other, x), right))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                made = weight_and_bias_gradients(g, x)
            torch.cuda.current_stream().wait_stream(side)
            progress.check(f"another stream {shape} {dtype}", same(made, right))


def times(progress: Progress, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds by way, all in turn, and of torch's product alone."""
    rows, n, k = shape
    data = [matrices(shape, dtype) for _ in range(max(2, -(-BYTES // (2 * rows * (n + k)))))]
    calls = {
        name: [partial(way, *one) for one in data] for name, way in WAYS.items() if way(*data[0]) is not None
    }
    calls["product alone"] = [partial(torch.mm, g.t(), x) for g, x in data]
    graphs = {name: captured(each) for name, each in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, done) in graphs.items():
            found[name].append(replayed(graph) / done)
    made: dict[str, Any] = {name: statistics.median(each) for name, each in found.items()}
    chosen = way_of(*shape, dtype)
    told = ", ".join(f"{name}{' (rule)' if name == chosen else ''} {one:.1f}" for name, one in made.items())
    progress.say(f"{shape} {dtype}, us: {told}")
    return {**made, "chosen": chosen}


def checks(progress: Progress) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name."""
    yield "a plan in a capture", partial(first_in_a_capture, progress)
    for dtype in DTYPES:
        for shape in SHAPES:
            yield f"gradients {shape} {dtype}", partial(check, progress, shape, dtype)
    yield "gradients elsewhere", partial(check_elsewhere, progress)


def main() -> int:
    """Bits, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    progress = Progress(options.seconds)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for label, call in () if options.no_checks else checks(progress):
        progress.attempt(label, call)
    for dtype in () if options.no_times else DTYPES:
        for shape in TIMED:

            def kept(shape: Shape = shape, dtype: torch.dtype = dtype) -> None:
                found[f"{shape} {dtype}"] = times(progress, shape, dtype)

            progress.attempt(f"times {shape} {dtype}", kept)
            if os.environ.get("OUT"):
                (Path(os.environ["OUT"]) / "linear_gradients.json").write_text(json.dumps(found, indent=1))
    return progress.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
