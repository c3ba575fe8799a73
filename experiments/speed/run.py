"""Experiment `speed`: how fast the reference is on the CPU, as ratios to other libraries' functions, and import times.

No numbers are published beside these rows: the other libraries run here, in the same process. Both sides of a pair are called
in turn, after a check that ours is right; a ratio is the baseline's median time over ours, and its quantiles (20 and 80
percent) are those of the ratios of neighbouring calls. A library that is not installed is a row that says so. Threads are left
as the runtimes set them, and recorded: how many each side may use, and how many cores it kept busy. Import times are medians
over fresh processes, beyond the time of what is imported first.

Quantized linear layers of 2048 x 2048 stand beside the same layer dense: with one row of inputs, weights quantized by a scheme,
in float32 and bfloat16, eager and compiled; with several rows, eager, as `ao_lab.quantize_` makes them of each configuration of
experiment `linear`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

import fast
import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.tensor.quantized_tensor import quantized
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import bar, bits_that_differ, cores
from experiments.harness.rows import ROOT, Journal, Row
from experiments.linear.tables import ACTIVATIONS, WEIGHTS, Method, checked
from experiments.report.results import Results
from experiments.report.targets import Target, limit_of
from experiments.runs.settings import Settings

# Targets of experiment `speed`: the least ratios to other libraries, stored with each comparison, and import times.

EXPERIMENT = "speed"
#: Metrics of rows: the target of a comparison, and why there is no ratio.
TARGET_METRIC, MISSING = "bar", "peer missing"


def target_of(results: Results, setting: str, method: str) -> Target | None:
    """The target of a comparison (a ratio) or of an import (a time); None where a row has none."""
    limit = results.value(setting, method, TARGET_METRIC)
    if limit is None:
        return None
    day = results.day(setting, method)
    if method.startswith("import "):
        return Target(
            method, results.value(setting, method, "time"), limit, at_least=False, unit="ms", day=day
        )
    return Target(method, results.value(setting, method, "ratio"), limit, day=day)


COUNTS = {"quick": 2**24, "full": 2**24}
REPEATS = 15


@dataclass(frozen=True)
class Pair:
    """Two calls to time, each complete when it returns, and a check that raises ValueError where ours is wrong."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Comparison:
    """A pair by name.

    baseline: what ours is compared with. library: what has to be installed.
    build: the pair on an input. runtime: of both sides, a key of THREADS.
    """

    name: str
    baseline: str
    library: str
    build: Callable[[np.ndarray], Pair]
    runtime: str

    @property
    def target(self) -> float:
        """The least ratio, their time over ours."""
        return limit_of(EXPERIMENT, self.name, "ratio").bound

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return importlib.util.find_spec(self.library) is None


#: Schemes of weights.
ONE_ROW = (
    "int8_rowwise", "int4_g32", "int4_g128_asymmetric", "int8_g32_asymmetric", "ternary_rowwise", "int2_g32", "int3_g32",
    "int5_g32", "int6_g32", "fp8_rowwise", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "nf4",
)  # fmt: skip
COMPILED = ("int8_rowwise", "int4_g32", "int6_g32", "fp8_rowwise", "mxfp4", "nvfp4", "nf4")


def cpu_linear_pair(x: np.ndarray, scheme: str, dtype: torch.dtype, compiled: bool) -> Pair:
    """A layer with quantized weights, and the dense one; the check compares ours with `reference.linear_error_bound`."""
    elements = torch.from_numpy(x.reshape(-1)[: SIZE * (SIZE + 1)].copy()).to(dtype)
    dense = torch.nn.Linear(SIZE, SIZE, bias=False).to(dtype).requires_grad_(False)
    dense.weight.copy_(elements[: SIZE * SIZE].view(SIZE, SIZE))
    row = elements[SIZE * SIZE :].view(1, SIZE)
    quantized_layer = copy.deepcopy(dense)
    weight = quantized(dense.weight, Recipe(weight=named(scheme) or reference.SCHEMES[scheme]))
    quantized_layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if compiled:
        # All linear layers have one forward, of which torch compiles eight programs and runs what follows uncompiled.
        torch.compiler.reset()
    ours, theirs = (torch.compile(layer) if compiled else layer for layer in (quantized_layer, dense))

    def check() -> None:
        for layer in (ours, theirs):
            layer(row)
            with compiled_runs(compiled):
                layer(row)
        q = weight.quantized
        exact = row.double() @ reference.dequantize(q).double().t()
        error = (ours(row).double() - exact).abs()
        if not bool((error <= reference.linear_error_bound(row, q)).all()):
            raise ValueError(
                f"the output of a layer in {scheme} exceeds its error bound; a wrong result is not timed"
            )

    return Pair(lambda: ours(row), lambda: theirs(row), check)


def _comparison(scheme: str, dtype: torch.dtype, compiled: bool) -> Comparison:
    name = f"one row, {scheme}, {str(dtype).removeprefix('torch.')}{', compiled' if compiled else ''}"
    build = partial(cpu_linear_pair, scheme=scheme, dtype=dtype, compiled=compiled)
    return Comparison(name, "the dense layer", "torch", build, "torch")


SIZE = 2048


CPU_LINEAR_LAYERS = tuple(
    _comparison(scheme, dtype, compiled)
    for compiled in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
    for scheme in (COMPILED if compiled else ONE_ROW)
)
#: Configurations that people run on CPUs, which are measured in both dtypes.
COMMON = ("int4 g128", "int4 g32", "int4 g128, zero points", "int8", "int8 g128")
ROWS, ROWS_OF_OTHERS = (2, 4, 16, 64, 512), (2, 16, 512)


@lru_cache(maxsize=1)
def layers(method: Method, dtype: torch.dtype, size: int) -> tuple[Any, Any]:
    """The quantized layer and the dense one."""
    generator = torch.Generator().manual_seed(size)
    dense = torch.nn.Linear(size, size, bias=False).to(dtype).requires_grad_(False)
    dense.weight.copy_(torch.randn(size, size, generator=generator) * size**-0.5)
    return method.quantize(copy.deepcopy(dense)), dense


def cpu_row_pair(x: np.ndarray, method: Method, rows: int, dtype: torch.dtype) -> Pair:
    """Both with some rows of x; the check is experiment `linear`'s."""
    ours, dense = layers(method, dtype, SIZE)
    inputs = torch.from_numpy(x.reshape(-1)[: rows * SIZE].reshape(rows, SIZE).copy()).to(dtype)

    def check() -> None:
        checked(method, ours, ours(inputs), inputs, dense.weight)

    return Pair(partial(ours, inputs), partial(dense, inputs), check)


def comparisons(method: Method, dtype: torch.dtype) -> list[Comparison]:
    """Those of a configuration, fewest rows first."""
    common = method.name in COMMON
    word = str(dtype).removeprefix("torch.")
    return [
        Comparison(
            f"{rows} rows, {method.name}, {word}",
            "the dense layer",
            "torch",
            partial(cpu_row_pair, method=method, rows=rows, dtype=dtype),
            "torch",
        )
        for rows in (ROWS if common else ROWS_OF_OTHERS)
    ]


CPU_ROW_LAYERS = tuple(
    comparison
    for dtype in (torch.bfloat16, torch.float32)
    for method in (*WEIGHTS, *ACTIVATIONS)
    if dtype == torch.bfloat16 or method.name in COMMON
    for comparison in comparisons(method, dtype)
)
#: Quantized layers beside dense ones: with one row of inputs, with several.
LAYERS = (*CPU_LINEAR_LAYERS, *CPU_ROW_LAYERS)
IMPORT_REPEATS = 9
#: Name: (what is imported first, what is timed).
IMPORTS = {"reference": ("numpy", "reference"), "ao_lab": ("numpy, torch", "ao_lab")}


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, and the installed libraries with their versions."""
    libraries = dict.fromkeys(comparison.library for comparison in COMPARISONS if not comparison.missing)
    return "-".join(
        [f"seed{settings.seed}", *(name + importlib.metadata.version(name) for name in libraries)]
    )


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all comparisons and import times."""
    journal = journal if journal is not None else Journal()
    x = np.random.default_rng(settings.seed).standard_normal(COUNTS[settings.scale], dtype=np.float32)
    x = x.reshape(-1, 4096)
    table = f"speed/{settings.scale}/random-normal"
    with bar("speed", len(COMPARISONS) + len(LAYERS) + len(IMPORTS)) as step:
        for comparison in (*COMPARISONS, *LAYERS):
            if not journal.finished(table, comparison.baseline, comparison.name):
                journal.add(rows_of(settings, comparison.name, comparison.baseline, compared(comparison, x)))
            step(comparison.name)
        for name, (first, timed) in IMPORTS.items():
            method = f"import {name}"
            if not journal.finished(table, f"beyond {first}", method):
                journal.add(rows_of(settings, method, f"beyond {first}", import_times(first, timed)))
            step(method)
    return journal.rows


def rows_of(settings: Settings, method: str, setting: str, values: dict[str, tuple[float, str]]) -> list[Row]:
    """Rows of one method."""
    return [
        settings.row(EXPERIMENT, "speed", "random-normal", setting, method, metric, value, unit)
        for metric, (value, unit) in values.items()
    ]


def compared(comparison: Comparison, x: np.ndarray) -> dict[str, tuple[float, str]]:
    """Ratio and times of a pair; of a missing library its status."""
    if comparison.missing:
        target = {TARGET_METRIC: (comparison.target, "ratio")}
        return {**target, f"{MISSING}: install {comparison.library}": (1, "")}
    pair = comparison.build(x)
    pair.check()
    ours, theirs = interleaved(pair)
    ratios = np.array(theirs) / np.array(ours)
    return {
        "ratio": (statistics.median(theirs) / statistics.median(ours), "ratio"),
        "ratio, 20%": (float(np.quantile(ratios, 0.2)), "ratio"),
        "ratio, 80%": (float(np.quantile(ratios, 0.8)), "ratio"),
        TARGET_METRIC: (comparison.target, "ratio"),
        "ours": (statistics.median(ours) * 1e3, "ms"),
        "theirs": (statistics.median(theirs) * 1e3, "ms"),
        "threads": (THREADS[comparison.runtime](), ""),
        "ours, cores busy": (cores_busy(pair.ours), ""),
        "theirs, cores busy": (cores_busy(pair.theirs), ""),
        "elements": (x.size, ""),
    }


def interleaved(pair: Pair) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and theirs in turn, without the first of each."""
    ours, theirs = [], []
    for _ in range(REPEATS + 1):
        ours.append(seconds(pair.ours))
        theirs.append(seconds(pair.theirs))
    return ours[1:], theirs[1:]


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cores_busy(call: Callable[[], object], times: int = 5) -> float:
    """Processor time of all threads over elapsed time, in a few calls."""
    started, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - used) / (time.perf_counter() - started)


def import_times(first: str, timed: str) -> dict[str, tuple[float, str]]:
    """Milliseconds to import `timed` after `first`, in fresh processes."""
    code = (
        f"import time, {first}; started = time.perf_counter(); import {timed}; "
        "print(time.perf_counter() - started)"
    )
    times = list(_printed(code, IMPORT_REPEATS))
    low, middle, high = np.quantile(times, (0.2, 0.5, 0.8))
    return {
        "time": (float(middle) * 1e3, "ms"),
        "time, 20%": (float(low) * 1e3, "ms"),
        "time, 80%": (float(high) * 1e3, "ms"),
        TARGET_METRIC: (limit_of(EXPERIMENT, f"import {timed}", "time").bound, "ms"),
    }


def _printed(code: str, times: int) -> Iterable[float]:
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ValueError(f"a fresh Python could not run {code!r}: {done.stderr.strip()}")
        yield float(done.stdout)


#: Threads that a runtime computes on: one in NumPy's loops, a pool over all cores in XLA, as set in torch.
THREADS: dict[str, Callable[[], int]] = {"numpy": lambda: 1, "jax": cores, "torch": torch.get_num_threads}


def numpy_encode(x: np.ndarray) -> Pair:
    """NumPy: float32 to float8_e4m3fn codes. ml_dtypes overflows to NaN, so both do."""

    def ours() -> np.ndarray:
        return reference.encode(x, "float8_e4m3fn", overflow="nan")

    def theirs() -> np.ndarray:
        return x.astype(ml_dtypes.float8_e4m3fn)

    return Pair(ours, theirs, lambda: _equal(ours(), theirs().view(np.uint8)))


def jax_encode(x: np.ndarray) -> Pair:
    """JAX under jit: the same, against XLA's own cast."""
    import jax
    import jax.numpy as jnp

    on_device = jax.device_put(x)
    encode = jax.jit(lambda y: reference.encode(y, "float8_e4m3fn", overflow="nan"))
    cast = jax.jit(lambda y: y.astype(jnp.float8_e4m3fn))

    def check() -> None:
        _equal(np.asarray(encode(on_device)), np.asarray(cast(on_device)).view(np.uint8))

    return Pair(
        lambda: encode(on_device).block_until_ready(), lambda: cast(on_device).block_until_ready(), check
    )


def jax_mxfp8(x: np.ndarray) -> Pair:
    """JAX under jit: the MXFP8 quantizer, codes and scales, against XLA's plain cast."""
    import jax
    import jax.numpy as jnp

    on_device = jax.device_put(x)

    @jax.jit
    def quantize(y: object) -> tuple[object, object]:
        q = reference.quantize(y, "mxfp8_e4m3")
        return q.codes, q.scale

    cast = jax.jit(lambda y: y.astype(jnp.float8_e4m3fn))

    def check() -> None:
        q = reference.quantize(x, "mxfp8_e4m3")
        codes, scale = quantize(on_device)
        _equal(np.asarray(codes), q.codes)
        _equal(np.asarray(scale), q.scale)

    return Pair(
        lambda: jax.block_until_ready(quantize(on_device)), lambda: cast(on_device).block_until_ready(), check
    )


def torch_mxfp8(x: np.ndarray) -> Pair:
    """torch on the CPU: MXFP8 against torchao's eager to_mx."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    tensor = torch.from_numpy(x)

    def ours() -> reference.Quantized:
        return fast.quantize(tensor, "mxfp8_e4m3")

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        return to_mx(tensor, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)

    def check() -> None:
        q, (scale, codes) = ours(), theirs()
        _equal(q.codes.numpy(), codes.view(torch.uint8).numpy())
        _equal(q.scale.numpy(), scale.view(torch.uint8).numpy())

    return Pair(ours, theirs, check)


def _equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    """ValueError that shows the first difference."""
    if said := bits_that_differ(ours, theirs, "theirs"):
        raise ValueError(f"codes differ: {said}; a wrong result is not timed")


COMPARISONS = (
    Comparison("NumPy encode to e4m3", "ml_dtypes astype", "ml_dtypes", numpy_encode, "numpy"),
    Comparison("JAX jit encode to e4m3", "XLA's own cast", "jax", jax_encode, "jax"),
    Comparison("JAX jit MXFP8 quantizer", "XLA's plain cast", "jax", jax_mxfp8, "jax"),
    Comparison("MXFP8 on torch CPU tensors", "torchao's eager to_mx", "torchao", torch_mxfp8, "torch"),
)
