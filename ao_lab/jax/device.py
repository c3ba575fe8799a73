"""Which arrays the kernels take: those on CUDA devices of Hopper or later, with triton installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import lru_cache
from typing import Any

import jax

OLDEST = 90


def require_array(value: Any, what: str) -> Any:
    """`value` if it is a JAX array; TypeError that names the way out otherwise."""
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"ao_lab.jax.{what} takes JAX arrays, got {type(value).__name__}; use jax.numpy.asarray, ao_lab.jax.from_torch, "
            f"or ao_lab.{what} for NumPy arrays and torch tensors"
        )
    return value


def is_traced(value: Any) -> bool:
    """Whether an array stands for others, inside jit, vmap or grad."""
    return isinstance(value, jax.core.Tracer)


def place_of(value: Any) -> str:
    """Where kernels may run on an array: "cuda" (it lies there), "any" (a traced one: the compiler will know) or ""."""
    if not has_kernels():
        return ""
    if is_traced(value):
        return "any"
    return "cuda" if all(device.platform == "gpu" for device in value.devices()) else ""


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether this process can run kernels. Where there is a GPU and they cannot run, a warning says once why."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return False
    reason = missing(devices)
    if reason:
        warnings.warn(
            f"ao_lab's kernels do not run in JAX here: {reason}. The same functions run as XLA operations, with the same bits, "
            f"more slowly.",
            RuntimeWarning,
            stacklevel=4,
        )
    return not reason


def missing(devices: list[Any]) -> str:
    """Why there are no kernels on these devices, or nothing."""
    oldest = min(devices, key=lambda device: float(device.compute_capability))
    if float(oldest.compute_capability) * 10 < OLDEST:
        return f"{oldest.device_kind} is older than compute capability {OLDEST / 10}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not hasattr(jax.ffi, "ffi_call"):
        return f"JAX {jax.__version__} has no jax.ffi.ffi_call; 0.6 and later do"
    return (
        ""
        if _registered()
        else f"JAX {jax.__version__} has no custom call for Triton kernels in its CUDA plugin"
    )


def _registered() -> bool:
    """Whether the CUDA plugin brought the custom call: importing this module registers it."""
    try:
        return hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernelCall")
    except ImportError:
        return False
