"""On a GPU: where the host's time of a compiled training step goes, of DLRMv2's dense part launched one by one.

    PYTHONPATH=. python tests/gpu/training/step_host.py [--part step products] [--methods rowwise] [--steps 30]
        [--out FOLDER]

step: milliseconds until the host has launched a step, and until the GPU is done; launches of Triton's and CUDA kernels by
`fast.launch`, those past Triton and those again through it, calls without a prepared launch, graph breaks and recompilations, a
step each; then functions of Python and C by their own time, backward on the calling thread, so that the profiler sees it.
products: microseconds of the host for the matmuls and casts of a layer, one call at a time with the GPU idle: torch's with a
scale for a row and for a tensor, in bfloat16, and cuBLASLt called with an algorithm that is kept, whose bits are compared with
torch's. A line each, and rows in FOLDER/step_host.csv (else $OUT). About 35 seconds, 15 of them compilation.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
import fast
from experiments.loka.dense_speed import WORKLOADS, both, changed
from fast import dispatch
from fast.kernels import cublaslt
from fast.launch.cuda import CudaLaunch
from fast.launch.launcher import Call, CompiledLaunch
from fast.quantize.rowwise_colwise import quantize_both
from tests.gpu.harness.lines import run_parts, say

#: Lines of the profile; calls of a product that are timed.
LINES, CALLS = 40, 60
#: M, N and K of the products of DLRMv2's widest layers at batch 8192, forward, input gradient, weight gradient.
SHAPES = ((8192, 512, 3456), (8192, 3456, 512), (512, 3456, 8192), (8192, 1024, 3456), (1024, 1024, 8192))


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """How often calls are launched, by which way."""

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            counts[name] += 1
            return function(*given, **more)

        return run

    places = (
        (Call, "_run", "prepared calls"), (Call, "_launch_again", "launched again through Triton"),
        (CompiledLaunch, "run", "launches of Triton's described anew"), (CudaLaunch, "run", "launches of CUDA described anew"),
        (dispatch, "_compute", "calls without a prepared launch"),
    )  # fmt: skip
    patches = [mock.patch.object(owner, at, counting(name, getattr(owner, at))) for owner, at, name in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def step(method: str, steps: int) -> None:
    """Times, counts and the profile of a method's compiled step."""
    workload, told = WORKLOADS["DLRMv2-DCN"], method
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, inputs = workload.make("cuda"), workload.inputs(workload.batch, "cuda")
    inputs[-1].requires_grad_()
    changed(model, method, inputs)
    model.compile(dynamic=False)
    run = partial(both, model, inputs)
    for _ in range(5):
        run()
    launched, done = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        launched.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - started)
    say("step", f"{told}, the host", 1e3 * statistics.median(launched), "ms")
    say("step", f"{told}, the GPU done", 1e3 * statistics.median(done), "ms")
    counts = Counter[str]()
    with counted(counts):
        for _ in range(5):
            run()
    for name, count in counts.items():
        say("step", f"{told}, {name}", count / 5, "a step")
    for name, count in torch._dynamo.utils.counters["graph_break"].items():
        say("step", f"{told}, graph break: {name[:60]}", count, "times")
    say("step", f"{told}, programs", torch._dynamo.utils.counters["stats"]["unique_graphs"], "graphs")
    profiled(run, steps)


def profiled(run: Callable[[], object], steps: int) -> None:
    """Print where the host's time goes."""
    profile = cProfile.Profile()
    torch.cuda.synchronize()
    with torch.autograd.set_multithreading_enabled(False):
        run()
        profile.enable()
        for _ in range(steps):
            run()
            torch.cuda.synchronize()
        profile.disable()
    stats = pstats.Stats(profile)
    stats.sort_stats("tottime").print_stats(LINES)
    sys.stdout.flush()


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds until a call returns, the GPU idle before each."""
    taken = []
    for _ in range(CALLS + 10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return 1e6 * statistics.median(taken[10:])


#: Of `cublasLt.h` and `library_types.h`: attributes of a product's descriptor, a scale for each row, element types.
TRANSA, SCALE_A, SCALE_B, FAST_SUMS, MODE_A, MODE_B = 3, 17, 18, 25, 31, 32
OUTER_VECTOR, E4M3 = 3, 28


class Kept:
    """torch's `_scaled_mm` of e4m3 codes by rows, with the descriptors and the algorithm of the first call kept."""

    def __init__(self, x: Any, w: Any, fast_sums: bool = True) -> None:
        (m, k), n = x.shape, w.shape[0]
        # To the library, whose matrices lie by columns, y (M, N) is N x M: w transposed, times x.
        attributes = {TRANSA: 1, FAST_SUMS: 1, MODE_A: OUTER_VECTOR, MODE_B: OUTER_VECTOR}
        self.product = cublaslt.descriptor(
            {at: ctypes.c_int32(value) for at, value in attributes.items() if at != FAST_SUMS}
        )
        flag = ctypes.c_int8(fast_sums)
        cublaslt.check(
            cublaslt.library().cublasLtMatmulDescSetAttribute(self.product, FAST_SUMS, ctypes.byref(flag), 1),
            "fast sums",
        )
        for at, one in ((SCALE_A, w), (SCALE_B, x)):
            cublaslt.set_attribute(self.product, at, ctypes.c_uint64(one.scale.data_ptr()))
        with mock.patch.dict(cublaslt.TYPES, {torch.float8_e4m3fn: E4M3}):
            self.left, self.right = (cublaslt.layout(torch.float8_e4m3fn, k, rows) for rows in (n, m))
        self.result = cublaslt.layout(torch.bfloat16, n, m)
        self.algorithm = cublaslt.best(0, self.product, (self.left, self.right, self.result))
        self.shape = m, n

    def __call__(self, x: Any, w: Any) -> torch.Tensor:
        """y on the current stream."""
        y = torch.empty(self.shape, dtype=torch.bfloat16, device="cuda")
        one, zero, to = ctypes.c_float(1), ctypes.c_float(0), y.data_ptr()
        cublaslt.set_attribute(self.product, SCALE_A, ctypes.c_uint64(w.scale.data_ptr()))
        cublaslt.set_attribute(self.product, SCALE_B, ctypes.c_uint64(x.scale.data_ptr()))
        status = cublaslt.library().cublasLtMatmul(
            cublaslt.handle(0), self.product, ctypes.byref(one), w.codes.data_ptr(), self.left, x.codes.data_ptr(), self.right,
            ctypes.byref(zero), to, self.result, to, self.result, ctypes.byref(self.algorithm), None, 0,
            torch._C._cuda_getCurrentRawStream(0),
        )  # fmt: skip
        cublaslt.check(status, "a matmul")
        return y


def by_torch(x: Any, w: Any) -> torch.Tensor:
    """torch's, whichever scales there are."""
    a, b = (one.codes.view(torch.float8_e4m3fn) for one in (x, w))
    scales = (x.scale, w.scale.t()) if x.scale.dim() else (x.scale, w.scale)
    found: torch.Tensor = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return found


def products() -> None:
    """The host's time of matmuls and casts."""
    torch.randn((64, 64), device="cuda", dtype=torch.bfloat16) @ torch.eye(
        64, device="cuda", dtype=torch.bfloat16
    )
    for m, n, k in SHAPES:
        x, w = (torch.randn((rows, k), device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        say("products", f"{m} x {n} x {k} bfloat16", host_us(lambda: x @ w.t()), "us")  # noqa: B023
        for name in ("fp8_rowwise", "fp8_tensorwise"):
            pair = fast.quantize(x, name), fast.quantize(w, name)
            say(
                "products",
                f"{m} x {n} x {k} torch._scaled_mm, {name}",
                host_us(partial(by_torch, *pair)),
                "us",
            )
            say(
                "products",
                f"{m} x {n} x {k} quantize of the weight, {name}",
                host_us(partial(fast.quantize, w, name)),
                "us",
            )
            both_ways = partial(quantize_both, x, name)
            say("products", f"{m} x {n} x {k} quantize_both of the input, {name}", host_us(both_ways), "us")
        pair = fast.quantize(x, "fp8_rowwise"), fast.quantize(w, "fp8_rowwise")
        own = partial(fast.linear_of_codes, *pair, dtype=torch.bfloat16, fast_sums=True)
        say("products", f"{m} x {n} x {k} ao_lab's matmul, fp8_rowwise", host_us(own), "us")
        kept(m, n, k, pair)


def kept(m: int, n: int, k: int, pair: tuple[Any, Any]) -> None:
    """cuBLASLt with its algorithm kept: the host's time, and values that differ from torch's."""
    plan = Kept(*pair)
    if plan.algorithm is None:
        say("products", f"{m} x {n} x {k} cuBLASLt, kept: no algorithm without workspace", float("nan"), "us")
        return
    wrong = int((plan(*pair).view(torch.int16) != by_torch(*pair).view(torch.int16)).sum())
    say("products", f"{m} x {n} x {k} cuBLASLt, kept", host_us(partial(plan, *pair)), "us", differ=wrong)


def main() -> int:
    """The parts that were asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["step", "products"])
    parser.add_argument("--methods", nargs="+", default=["rowwise"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    say("step", f"ao_lab {ao_lab.__version__}, torch {torch.__version__}", 1, "process")
    parts: dict[str, Callable[[], object]] = {
        "step": lambda: [step(method, options.steps) for method in options.methods],
        "products": products,
    }
    return run_parts(parts, options.part, "step_host.csv", options.out)


if __name__ == "__main__":
    sys.exit(main())
