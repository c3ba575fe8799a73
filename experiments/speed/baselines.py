"""Comparisons of experiment `speed`: ours and another library's function, on the same input.

Each pair is built by a function that returns two calls and a check. The check runs first: a call whose result is wrong is not
timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

import fast
import reference
from experiments.harness.workers import cores

#: Threads that a runtime computes on: one in NumPy's loops, a pool over all cores in XLA, as set in torch.
THREADS: dict[str, Callable[[], int]] = {"numpy": lambda: 1, "jax": cores, "torch": torch.get_num_threads}


@dataclass(frozen=True)
class Pair:
    """Two calls to time, each complete when it returns, and a check that raises ValueError where ours is wrong."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Comparison:
    """A pair by name.

    baseline: what ours is compared with. target: the least ratio, their time over ours. library: what has to be installed.
    build: the pair on an input. runtime: of both sides, a key of THREADS.
    """

    name: str
    baseline: str
    target: float
    library: str
    build: Callable[[np.ndarray], Pair]
    runtime: str

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return importlib.util.find_spec(self.library) is None


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


COMPARISONS = (
    Comparison("NumPy encode to e4m3", "ml_dtypes astype", 1.0, "ml_dtypes", numpy_encode, "numpy"),
    Comparison("JAX jit encode to e4m3", "XLA's own cast", 1.0, "jax", jax_encode, "jax"),
    Comparison("JAX jit MXFP8 quantizer", "XLA's plain cast", 0.5, "jax", jax_mxfp8, "jax"),
    Comparison("MXFP8 on torch CPU tensors", "torchao's eager to_mx", 1.0, "torchao", torch_mxfp8, "torch"),
)


def _equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    """ValueError that shows the first difference."""
    if ours.shape != theirs.shape:
        raise ValueError(
            f"shapes differ: ours {ours.shape}, theirs {theirs.shape}; a wrong result is not timed"
        )
    wrong = np.flatnonzero(ours != theirs)
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"{wrong.size} of {ours.size} codes differ, first at {first}: ours {ours.flat[first]:#x}, theirs "
            f"{theirs.flat[first]:#x}; a wrong result is not timed"
        )
