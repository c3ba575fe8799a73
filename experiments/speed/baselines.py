"""The pairs that experiment `speed` compares: ours and a library that people use, on the same numbers.

Each pair is made by a function that gives two calls and a check, or None where the other library is not installed. The check
runs first: no speed is reported of a call whose result is wrong.
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

#: How many threads a runtime may compute on: NumPy's loops have one, XLA takes a pool over all cores, torch says.
THREADS: dict[str, Callable[[], int]] = {"numpy": lambda: 1, "jax": cores, "torch": torch.get_num_threads}


@dataclass(frozen=True)
class Pair:
    """Two calls to time, each finished when it returns, and a check that raises ValueError where ours is wrong."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Comparison:
    """A pair by name, the least ratio (their time over ours) that is asked of it, and the runtime that both sides use."""

    name: str
    peer: str
    bar: float
    needs: str
    make: Callable[[np.ndarray], Pair]
    runtime: str

    @property
    def missing(self) -> bool:
        """Whether the library is not installed."""
        return importlib.util.find_spec(self.needs) is None


def numpy_encode(x: np.ndarray) -> Pair:
    """NumPy: float32 to float8_e4m3fn codes. ml_dtypes overflows to NaN, so that is what is asked of both."""

    def ours() -> np.ndarray:
        return reference.encode(x, "float8_e4m3fn", overflow="nan")

    def theirs() -> np.ndarray:
        return x.astype(ml_dtypes.float8_e4m3fn)

    return Pair(ours, theirs, lambda: _equal(ours(), theirs().view(np.uint8)))


def jax_encode(x: np.ndarray) -> Pair:
    """JAX under jit: the same, against XLA's own cast."""
    import jax
    import jax.numpy as jnp

    placed = jax.device_put(x)
    encode = jax.jit(lambda y: reference.encode(y, "float8_e4m3fn", overflow="nan"))
    cast = jax.jit(lambda y: y.astype(jnp.float8_e4m3fn))

    def check() -> None:
        _equal(np.asarray(encode(placed)), np.asarray(cast(placed)).view(np.uint8))

    return Pair(lambda: encode(placed).block_until_ready(), lambda: cast(placed).block_until_ready(), check)


def jax_mxfp8(x: np.ndarray) -> Pair:
    """JAX under jit: the MXFP8 quantizer, codes and scales, against XLA's plain cast."""
    import jax
    import jax.numpy as jnp

    placed = jax.device_put(x)

    @jax.jit
    def quantize(y: object) -> tuple[object, object]:
        q = reference.quantize(y, "mxfp8_e4m3")
        return q.codes, q.scale

    cast = jax.jit(lambda y: y.astype(jnp.float8_e4m3fn))

    def check() -> None:
        q = reference.quantize(x, "mxfp8_e4m3")
        codes, scale = quantize(placed)
        _equal(np.asarray(codes), q.codes)
        _equal(np.asarray(scale), q.scale)

    return Pair(
        lambda: jax.block_until_ready(quantize(placed)), lambda: cast(placed).block_until_ready(), check
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
        raise ValueError(f"shapes differ: ours {ours.shape}, theirs {theirs.shape}; no speed is reported")
    wrong = np.flatnonzero(ours != theirs)
    if wrong.size:
        place = int(wrong[0])
        raise ValueError(
            f"{wrong.size} of {ours.size} codes differ, first at {place}: ours {ours.flat[place]:#x}, theirs "
            f"{theirs.flat[place]:#x}; no speed is reported of a wrong result"
        )
