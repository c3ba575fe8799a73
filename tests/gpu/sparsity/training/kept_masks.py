"""Masks of 2:4 training layers on a GPU: bits beside bytes, where an eager step's time goes, and the peak of memory.

    PYTHONPATH=. python tests/gpu/sparsity/training/kept_masks.py [--seconds 85]

First bits: masks that kernels write as bits, weights that are masked by bits as they are and compressed, each against the same
by a bool mask, in a first and a remembered call; and steps with masks that are kept as bits against steps with bytes. Then
microseconds of these kernels by bytes and by bits in CUDA graphs, over weights of more than 50 MB in turn. Then a linear layer,
float16, forward and backward, at the published shapes: dense, masks found in each step, kept without any step of theirs (on one
stream too), and fixed. "host": after which a step returns, the GPU being idle before; "steady": of forty steps in a row from an
idle GPU on, which is the larger one of host and GPU; "after dense": the same behind a hundred dense steps, whose launches hide
the host until the queue is empty. Then what parts of a kept step take the host. Last the peak of a training step of MLP blocks
of ViT-L, dense, 2:4 with masks as bits and as bytes. Exits with 1 where a bit differs or a call raises, with 2 where something
was left out.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import ao_lab
from ao_lab.sparsity.training import api, layers, products
from experiments.sparsity.products import SHAPES, layer_of, linear_dense, step_of
from fast.kernels import cublaslt
from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.bits import pack_bits
from fast.layers import linear_gradients
from fast.sparsity.compress import DTYPES, compress_masked, masked
from fast.sparsity.prune import prune_into
from tests.gpu.sparsity.progress import Progress
from tests.gpu.sparsity.training.column_sums import replayed
from tests.gpu.sparsity.training.masked_weights import weights
from tests.gpu.sparsity.training.profile_mlp_blocks import model_of
from tests.gpu.sparsity.training.profile_training_layer import CALLS, graph_of, host_time

Step = Callable[[], object]
CUT = ((4096, 1024), (1024, 4096), (80, 144), (16, 16), (1040, 528))
#: Weights in turn, of 8 MB each; steps in a row, and dense ones before; tokens and blocks of the training step.
SETS, STEPS, BEFORE, TOKENS, BLOCKS = 8, 40, 100, 32768, 4
#: The layer whose steps are compared, and dtypes of weights.
SMALL, FLOATS = (640, 256, 512), (torch.float16, torch.bfloat16, torch.float32)


def same(one: Any, other: Any) -> bool:
    """Bit for bit, of NaN too."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def compile_one(job: tuple[str, torch.dtype, tuple[int, ...], torch.dtype, bool]) -> None:
    """Into the folders of compiled kernels, in a process of its own."""
    name, dtype, shape, kind, flag = job
    if name == "layer":
        layer((shape[0], shape[1], shape[2]), config_of("recomputed"), counts=True)()
        return
    w, mask = (
        torch.zeros(shape, dtype=dtype, device="cuda"),
        torch.zeros(shape, dtype=torch.bool, device="cuda"),
    )
    marks = mask if kind == torch.bool else pack_bits(mask)
    if name == "prune":
        prune_into(w, marks, transposable=flag)
    else:
        compress_masked(w, marks, flag)


def compile_all(progress: Progress) -> None:
    """Side by side what takes seconds each; failures show again where a kernel is used."""
    sizes, kinds = (CUT[0], CUT[2]), (torch.bool, torch.uint8)
    jobs: list[Any] = [("layer", torch.float16, shape, torch.uint8, True) for shape in (*SHAPES, SMALL)]
    jobs += [("prune", dtype, size, kind, True) for dtype in FLOATS for size in sizes for kind in kinds]
    jobs += [
        ("compress", dtype, size, kind, turned)
        for dtype in DTYPES for size in sizes for kind in kinds for turned in (False, True)
    ]  # fmt: skip
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        failed = [
            str(one.exception())[:300]
            for one in [pool.submit(compile_one, job) for job in jobs]
            if one.exception()
        ]
    progress.say(f"{len(jobs)} kernels compiled, {len(failed)} not: {failed[:1]}")


def check_bits(progress: Progress, dtype: torch.dtype) -> None:
    """Of random bits, and of normal ones for the masks by magnitude."""
    for shape in CUT:
        for transposable in (False, True):
            for again in range(2):
                w = torch.randn(shape, device="cuda").to(dtype)
                mask = torch.zeros(shape, dtype=torch.bool, device="cuda")
                bits = torch.full((shape[0], shape[1] // 8), 255, dtype=torch.uint8, device="cuda")
                for out in (mask, bits):
                    prune_into(w, out, transposable=transposable)
                progress.check(
                    f"prune {dtype} {shape} {transposable} {again}", same([pack_bits(mask)], [bits])
                )
        for w, mask in weights(shape, torch.float16, False, "cuda"):
            w = w.to(dtype) if dtype == torch.float32 else w.view(dtype)
            right, bits = torch.where(mask, w, 0), pack_bits(mask)
            for again in range(2):
                own = w.clone()
                masked(own, bits, own)
                progress.check(f"kept {dtype} {shape} {again}", same([masked(w, bits), own], [right, right]))
        for turned in (False, True) if dtype != torch.float32 else ():
            for w, mask in weights(shape, dtype, turned, "cuda"):
                for again in range(2):
                    pair = [compress_masked(w, one, turned) for one in (pack_bits(mask), mask)]
                    progress.check(f"compressed {dtype} {shape} {turned} {again}", same(*pair))


def config_of(masks: str, gradient: str = "straight-through") -> ao_lab.SparseTrainingConfig:
    """A layer by our own kernels."""
    return ao_lab.SparseTrainingConfig(
        masks=masks, transposable=True, gradient=gradient, products="sparse_wgmma"
    )


def layer(shape: tuple[int, int, int], config: ao_lab.SparseTrainingConfig, *, counts: bool) -> Step:
    """A step of a layer, with `step_sparsity_` or without."""
    model, x, g = layer_of(shape, "cuda", 0, torch.float16)
    ao_lab.sparsify_(model, config)
    step = step_of(model, x, g)

    def counted() -> tuple[torch.Tensor, ...]:
        made: Any = step()
        ao_lab.step_sparsity_(model)
        return (*made, model[0].weight.detach(), model[0].sparse_mask)

    return counted if counts else step


def check_steps(progress: Progress) -> None:
    """Gradients, weights and masks by bits and by bytes."""
    for masks, gradient in (
        ("fixed", "masked"),
        ("recomputed", "sr-ste"),
        ("recomputed", "straight-through"),
    ):
        made = []
        for dtype in (torch.uint8, torch.bool):
            with mock.patch.object(api, "stored_dtype", lambda config, dtype=dtype: dtype):
                made.append(layer(SMALL, config_of(masks, gradient), counts=True))
        for again in range(3):
            progress.check(f"step {masks} {gradient} {again}", same(*(one() for one in made)))  # type: ignore[arg-type]


def time_kernels(progress: Progress, shape: tuple[int, int]) -> None:
    """Bytes beside bits, in turn."""
    ws = [torch.randn(shape, device="cuda").half() for _ in range(SETS)]
    marks = [torch.zeros(shape, dtype=torch.bool, device="cuda") for _ in ws]
    for w, mask in zip(ws, marks, strict=True):
        prune_into(w, mask, transposable=True)
    every = {"bytes": marks, "bits": [pack_bits(mask) for mask in marks]}
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "prune": lambda w, mask: prune_into(w, mask, transposable=True),
        "compress": compress_masked,
        "compress turned": lambda w, mask: compress_masked(w, mask, True),
        "zero": lambda w, mask: masked(w, mask, w),
        "mask a gradient": masked,
    }
    for name, call in calls.items():
        graphs = {
            kind: graph_of(
                lambda call=call, masks=masks: [call(*one) for one in zip(ws, masks, strict=True)]
            )[0]
            for kind, masks in every.items()
        }
        times: dict[str, list[float]] = {kind: [] for kind in graphs}
        for _ in range(7):
            for kind, graph in graphs.items():
                times[kind].append(replayed(graph) / SETS)
        told = ", ".join(f"{kind} {statistics.median(found):.2f}" for kind, found in times.items())
        progress.say(f"{name} {shape}, us: {told}")


def steady(step: Step, before: Step | None = None) -> float:
    """Milliseconds of a step, of STEPS in a row that begin on an idle GPU, or behind BEFORE others."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(BEFORE if before else 0):
        before()  # type: ignore[misc]
    start.record()
    for _ in range(STEPS):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / STEPS


def one_stream(step: Step) -> Step:
    """A step whose gradients come one after the other: what the stream beside costs the host."""

    def run() -> object:
        kept = products.beside_work, linear_gradients.beside
        products.beside_work, linear_gradients.beside = (
            lambda g, x, work: (None, work()),
            linear_gradients.apart,
        )
        try:
            return step()
        finally:
            products.beside_work, linear_gradients.beside = kept

    return run


def time_layers(progress: Progress, shape: tuple[int, int, int]) -> None:
    """All sides, in turn."""
    steps = {
        "dense": linear_dense(shape, "cuda", 0),
        "found": layer(shape, config_of("recomputed"), counts=True),
        "kept": layer(shape, config_of("recomputed"), counts=False),
        "kept, one stream": one_stream(layer(shape, config_of("recomputed"), counts=False)),
        "fixed": layer(shape, config_of("fixed"), counts=True),
        "fixed, masked": layer(shape, config_of("fixed", "masked"), counts=True),
    }
    for step in (*steps.values(), *steps.values()):
        step()
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(3):
        for name, step in steps.items():
            times[name].append((host_time(step), steady(step), steady(step, steps["dense"])))
    for name, found in times.items():
        host_ms, own, after = (statistics.median(each) for each in zip(*found, strict=True))
        progress.say(f"{shape} {name}: host {host_ms:.3f} ms, steady {own:.3f}, after dense {after:.3f}")
    shares(progress, f"{shape} kept", steps["kept"])


def shares(progress: Progress, label: str, step: Step) -> None:
    """Microseconds of the host in parts of a step, those that they call included; the GPU is idle before each."""
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return run

    places = (
        (layers.MaskedLinear, "forward"), (layers.MaskedLinear, "backward"), (products, "compress_masked"),
        (products, "execute"), (products, "beside_work"), (products, "weight_and_bias_gradients"),
        (cublaslt, "weight_and_bias_gradients"), (linear_gradients, "product_stream"),
        (linear_gradients, "execute"), (torch, "mm"), (torch.cuda.Stream, "wait_stream"), (torch.cuda, "current_stream"),
        (host, "tensor_map"), (torch.autograd, "grad"),
    )  # fmt: skip
    patches = []
    for owner, name in places:
        found = getattr(owner, name)
        wrapped: Any = timed(f"{getattr(owner, '__name__', owner)}.{name}", found)
        static = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        patches.append(mock.patch.object(owner, name, staticmethod(wrapped) if static else wrapped))
    for patch in patches:
        patch.start()
    try:
        step()
        spent.clear()
        whole = host_time(step)
    finally:
        for patch in patches:
            patch.stop()
    progress.say(f"{label}, of {whole * 1e3:.0f} us of the host, timers included:")
    for name, seconds in sorted(spent.items(), key=lambda one: -one[1]):
        progress.say(f"    {seconds / CALLS * 1e6:7.1f} us {name}")


def peak(sparse: bool, dtype: torch.dtype = torch.uint8) -> int:
    """Bytes at the peak of a step of MLP blocks, weights, masks and gradients included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with mock.patch.object(api, "stored_dtype", return_value=dtype):
        model = model_of(BLOCKS, sparse)
    x = torch.randn(TOKENS, 1024, device="cuda", dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum(dtype=torch.float32).backward()
        optimizer.step()
        if sparse:
            ao_lab.step_sparsity_(model)
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
    return found


def memory(progress: Progress) -> None:
    """Dense and 2:4; masks as bits and as bytes."""
    whole, bits, marks = peak(False), peak(True), peak(True, torch.bool)
    progress.say(
        f"peak of {BLOCKS} MLP blocks, {TOKENS} rows: dense {whole / 1e6:.1f} MB, bits {bits / 1e6:.1f} ({bits / whole:.4f}), "
        f"bytes {marks / 1e6:.1f} ({marks / whole:.4f})"
    )
    progress.check("bits take less than bytes", bits < marks, f"{bits} and {marks}")


def main() -> int:
    """Bits, kernels, layers, memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=85.0)
    progress = Progress(parser.parse_args().seconds)
    progress.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    compile_all(progress)
    for dtype in FLOATS:
        progress.attempt(f"bits {dtype}", partial(check_bits, progress, dtype))
    progress.attempt("steps", partial(check_steps, progress))
    progress.attempt("memory", partial(memory, progress))
    for shape in ((4096, 1024), (1024, 4096)):
        progress.attempt(f"kernels {shape}", partial(time_kernels, progress, shape))
    for wide in SHAPES:
        progress.attempt(f"layers {wide}", partial(time_layers, progress, wide))
    return progress.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
