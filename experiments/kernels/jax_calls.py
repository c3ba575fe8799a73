"""What a call from JAX costs beside the same call from torch, which launches the same kernel: rows of the table ``jax``.

Three ways to call: a concrete array (``eager``), a compiled function of one quantization (``jit``), and one of PROGRAM of them
(``program``), where one dispatch stands for several kernels as in a model. All ways, torch's too, quantize the same PROGRAM
tensors. Calls are queued, and what counts is the time per quantization until the last one is done: the larger of what the host
and what the GPU takes. ``XLA's cast`` to e4m3fn, also under jit, says what JAX's own dispatch of one operation costs. A row's
setting is the size of a tensor and its method the scheme.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from experiments.harness.outcome import Values, attempt, keep
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row
from experiments.harness.timing import Call
from experiments.kernels.gate import same
from experiments.kernels.outcome import Bench, rows_of, table

KIND = "jax"
SCHEMES = ("fp8_rowwise", "mxfp8_e4m3", "mxfp4", "nvfp4")
#: Rows of 4096 bfloat16, by what they are in MiB.
SIZES = {"64 MiB": 8192, "448 MiB": 57344}
COLUMNS = 4096
PROGRAM = 8
WAYS = ("eager", "jit", "program")
TORCH, CAST = "torch", "XLA's cast"
#: JAX may take a tenth longer than torch.
MOST = 1.1
ROUNDS, WARMUP = 9, 2
#: Bytes that are read in one round of queued calls.
QUEUED = 12_800 * 2**20


def installed() -> bool:
    """Whether there is a JAX to call."""
    return importlib.util.find_spec("jax") is not None


def measure(bench: Bench, journal: Journal, sizes: Mapping[str, int] = SIZES) -> list[Row]:
    """Rows of all schemes at all sizes; what failed is not stored in the journal. No rows without JAX."""
    failed: list[Row] = []
    if not installed():
        return failed
    # JAX would take three quarters of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name_of_table = table(bench, KIND)
    with bar("calls from JAX", len(sizes) * len(SCHEMES)) as step:
        for label, rows in sizes.items():
            for name in SCHEMES:
                if not journal.finished(name_of_table, label, name):
                    values = attempt(partial(timed, bench, name, rows))
                    limits: Values = {f"target: {way} over {TORCH}": (MOST, "ratio") for way in WAYS}
                    keep(journal, failed, rows_of(bench, KIND, label, name, {**values, **limits}))
                step(f"{name} {label}")
    return failed


def timed(bench: Bench, name: str, rows: int) -> Values:
    """Compare all codes with torch's bit for bit, then time."""
    shape = (rows, COLUMNS)
    tensors = [torch.randn(shape, device=bench.settings.device, dtype=torch.bfloat16) for _ in range(PROGRAM)]
    calls, divisors = calls_of(bench.fast, name, tensors)
    count = max(10, QUEUED // (2 * rows * COLUMNS))
    times = queued(calls, divisors, count, bench.clock)
    values: Values = {way: (seconds * 1e6, "us") for way, seconds in times.items()}
    for way in WAYS:
        values[f"{way} over {TORCH}"] = (times[way] / times[TORCH], "ratio")
    return values


def calls_of(fast: Any, name: str, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Call], dict[str, int]]:
    """Calls by name, and how many quantizations one of them is; Wrong where a result of JAX has other bits than torch's.

    Every call quantizes all tensors and keeps its results until the last is there: all ways read and write the same amount.
    """
    import jax
    import jax.numpy as jnp

    from ao_lab import jax as functions

    arrays = [jax.block_until_ready(functions.from_torch(x, copy=False)) for x in tensors]
    single = jax.jit(partial(functions.quantize, scheme=name))
    several = jax.jit(lambda *given: [functions.quantize(one, name) for one in given])
    cast = jax.jit(lambda one: one.astype(jnp.float8_e4m3fn))
    ways: dict[str, Callable[[], list[Any]]] = {
        TORCH: lambda: [fast.quantize(x, name).codes for x in tensors],
        "eager": lambda: [functions.quantize(one, name).codes for one in arrays],
        "jit": lambda: [single(one).codes for one in arrays],
        "program": lambda: [q.codes for q in several(*arrays)],
        CAST: lambda: [cast(one) for one in arrays],
    }
    wanted = ways[TORCH]()
    for way in WAYS:
        for number, (got, right) in enumerate(zip(ways[way](), wanted, strict=True)):
            same((f"{way}: codes of tensor {number}", np.asarray(got), right))
    return {way: partial(_last, results) for way, results in ways.items()}, dict.fromkeys(ways, len(tensors))


def _last(results: Callable[[], list[Any]]) -> Any:
    """The last of the results, for which `finish` waits."""
    return results()[-1]


def queued(
    calls: Mapping[str, Call],
    divisors: Mapping[str, int],
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a quantization, of `count` that are queued one after the other; in turn, round by round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARMUP + ROUNDS):
        for name, call in calls.items():
            finish(call())
            repeats = max(1, count // divisors[name])
            started = clock()
            for _ in range(repeats):
                result = call()
            finish(result)
            if number >= WARMUP:
                found[name].append((clock() - started) / (repeats * divisors[name]))
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def finish(result: Any) -> None:
    """Wait for the last result, and so for all that were queued before it."""
    if isinstance(result, torch.Tensor):
        if result.is_cuda:
            torch.cuda.synchronize()
    else:
        result.block_until_ready()
