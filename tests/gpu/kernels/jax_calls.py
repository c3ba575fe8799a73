"""ao_lab.jax on a GPU: every default scheme eagerly, under jit, vmap and grad; memory shared with torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# JAX would take three quarters of the memory, and torch and other processes want some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from tests.gpu.harness.inputs import REPRESENTATIVE, default_schemes, normals, random_inputs
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, outcome

ROWS = 256
BATCH = (4, 64, 256)
DTYPES = ("bfloat16", "float32", "float16")
#: Blocks beyond a tile, short last blocks, columns, vectors, one element, nothing.
SHAPES = (
    ((3, 20000), -1),
    ((5, 33, 96), 1),
    ((300, 40), 0),
    ((512,), 0),
    ((1, 32), -1),
    ((0, 32), -1),
    ((2, 8), -1),
)
PARTS = ("codes", "scale", "outer", "zero")


def jobs(settings: Settings) -> list[Job]:
    """Families "jax", "jax shapes" and "jax torch"; none where JAX is not installed."""
    if importlib.util.find_spec("jax") is None:
        return []
    names = default_schemes() if settings.fraction > 0.2 else [n for n in REPRESENTATIVE if "." not in n][::3]
    made = [Job("jax", name, "quantize", scheme_case, (name, i), 8.0) for i, name in enumerate(names)]
    few = REPRESENTATIVE[:: 1 if settings.fraction > 0.2 else 6]
    made += [Job("jax shapes", name, "quantize", shape_case, (name,), 8.0) for name in few]
    return made + [Job("jax torch", name, "quantize", exchange_case, (name,), 3.0) for name in few]


class Side:
    """ao_lab.jax on the device of a run, with NumPy arrays in and out."""

    def __init__(self, run: Run) -> None:
        import jax

        from ao_lab import jax as functions

        self.run, self.jax, self.functions = run, jax, functions
        self.device = jax.devices("cpu" if run.device.type == "cpu" else "cuda")[0]

    def put(self, value: Any) -> Any:
        """Arrays on the device, also inside containers."""
        return self.jax.tree.map(lambda leaf: self.jax.device_put(leaf, self.device), value)

    def host(self, value: Any) -> Any:
        """Arrays as NumPy's; failures stay."""
        return value if isinstance(value, Failure) else self.jax.tree.map(np.asarray, value)

    def program(self, function: str, label: str, call: Callable[..., Any], x: Any, wanted: Any) -> None:
        """Compare a program that a user might write."""
        got = outcome(lambda: call(*self.put(x if isinstance(x, tuple) else (x,))))
        self.run.compare(function, label, self.host(got), wanted)


def scheme_case(run: Run, name: str, index: int) -> None:
    """All functions on random bits, normal numbers, subnormals and NaNs; then the same within transformations."""
    side, dtype = Side(run), DTYPES[index % len(DTYPES)]
    functions = side.functions
    for label, x in random_inputs(dtype, ROWS, seed=index):
        for function in ("quantize", "choose_scales", "fake_quantize"):
            eager(side, function, f"{dtype} {label}", x, name)
        eager(side, "quantize", f"{dtype} {label}", x, name, packed=True)
        q = run.expect("quantize", x, name)
        given = side.put(q.scales)
        side.program("quantize", f"{label} given", lambda v, s=given: functions.quantize(v, name, scales=s), x,
                     run.expect("quantize", x, name, scales=q.scales))  # fmt: skip
        for out in DTYPES[: 1 if label != "normals" else 3]:
            wanted = run.expect("dequantize", q, out)
            side.program(
                "dequantize", f"{label} {out}", lambda v, o=out: functions.dequantize(v, o), (q,), wanted
            )
    transformed(side, name, dtype)


def eager(side: Side, function: str, label: str, x: Any, name: str, **keywords: Any) -> None:
    """One eager call, the scheme by name."""
    wanted = side.run.expect(function, x, name, **keywords)
    placed = side.put(x)
    got = side.run.guarded(lambda: getattr(side.functions, function)(placed, name, **keywords))
    text = " ".join([label, *keywords])
    side.run.compare(function, text, side.host(got), wanted, x=x)


def transformed(side: Side, name: str, dtype: str) -> None:
    """jit, vmap over the first and another axis, both, and gradients of plain and mapped calls."""
    run, jax, functions = side.run, side.jax, side.functions
    x, g = normals(BATCH, dtype, seed=1), normals(BATCH, dtype, seed=2)
    quantize = lambda v: functions.quantize(v, name)  # noqa: E731
    side.program("quantize", "jit", jax.jit(quantize), x, run.expect("quantize", x, name))
    rows = [run.expect("quantize", part, name) for part in x]
    if not any(isinstance(row, Failure) for row in rows):
        wanted = stacked(rows)
        side.program("quantize", "vmap", lambda v: arrays(jax.vmap(quantize)(v)), x, wanted)
        both = jax.jit(jax.vmap(quantize, in_axes=1))
        moved = np.ascontiguousarray(np.moveaxis(x, 0, 1))
        side.program("quantize", "jit of vmap over axis 1", lambda v: arrays(both(v)), moved, wanted)
    fake = lambda v: functions.fake_quantize(v, name)  # noqa: E731
    pull = lambda v, u: jax.vjp(fake, v)[1](u)[0]  # noqa: E731
    dx = run.expect("fake_quantize_vjp", g, x, name)
    side.program("fake_quantize_vjp", "grad", pull, (x, g), dx if isinstance(dx, Failure) else dx[0])
    parts = [run.expect("fake_quantize_vjp", b, a, name) for a, b in zip(x, g, strict=True)]
    if not any(isinstance(part, Failure) for part in parts):
        mapped = jax.jit(jax.vmap(pull))
        side.program(
            "fake_quantize_vjp", "jit of vmap of grad", mapped, (x, g), np.stack([part[0] for part in parts])
        )


def arrays(q: Any) -> tuple[Any, ...]:
    """The arrays of a Quantized."""
    return tuple(value for value in (getattr(q, name) for name in PARTS) if value is not None)


def stacked(rows: list[Any]) -> tuple[Any, ...]:
    """The arrays of several Quantized, one above the other."""
    return tuple(np.stack(parts) for parts in zip(*(arrays(row) for row in rows), strict=True))


def shape_case(run: Run, name: str) -> None:
    """Odd shapes and axes; errors too are the reference's."""
    side = Side(run)
    for number, (shape, axis) in enumerate(SHAPES):
        x = normals(shape, DTYPES[number % 3], seed=number)
        for function in ("quantize", "fake_quantize"):
            eager(side, function, f"{shape} axis {axis}", x, name, axis=axis)


def exchange_case(run: Run, name: str) -> None:
    """What torch's kernels made is JAX's without a copy and dequantizes to the same bits, and back."""
    side = Side(run)
    x = normals((ROWS, 256), "bfloat16", seed=3)
    q = run.guarded(lambda: run.fast.quantize(run.put(x), name))
    made = outcome(lambda: side.functions.from_torch(q, copy=False if run.device.type == "cuda" else None))
    run.compare("from_torch", "bits", side.host(made), run.expect("quantize", x, name))
    if isinstance(made, Failure):
        return
    wanted = run.expect("dequantize", run.expect("quantize", x, name), "bfloat16")
    run.compare(
        "dequantize",
        "from torch",
        side.host(outcome(lambda: side.functions.dequantize(made, "bfloat16"))),
        wanted,
    )
    back = outcome(lambda: side.functions.to_torch(made, copy=False))
    run.compare("to_torch", "bits", back, run.expect("quantize", x, name))
    if run.device.type == "cuda" and not isinstance(back, Failure):
        moved = [a.data_ptr() != b.data_ptr() for a, b in zip(arrays(q), arrays(back), strict=True)]
        run.record("to_torch", "same memory", len(moved), sum(moved), ["memory was copied"])
