"""What of the CUDA driver kernels in CUDA C++ need, by ctypes: contexts, modules, tensor maps, the structs of a launch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of `cuda.h`, from which all these numbers are.
MAX_SHARED = 8
#: CU_TENSOR_MAP_DATA_TYPE_UINT8.
UINT8 = 0
#: CU_TENSOR_MAP_L2_PROMOTION_L2_256B.
L2_256 = 3
#: CUDA_ERROR_INVALID_CONTEXT: the first launch of a thread that has not called the runtime.
NO_CONTEXT = 201
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
PROGRAMMATIC = 6
#: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.
CLUSTER_DIMENSION = 4
#: CU_TENSOR_MAP_SWIZZLE_64B and _128B by their bytes.
SWIZZLES = {64: 2, 128: 3}
#: CU_TENSOR_MAP_INTERLEAVE_NONE.
PLAIN = 0
#: CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, which fills with zeros.
ZEROS = 0
#: Bytes of a `CUtensorMap`.
MAP_BYTES = 128
#: Bytes that its address is a multiple of.
MAP_ALIGNMENT = 64
#: What addresses of tensor maps, and bytes of their rows, are multiples of.
STEP = 16


@lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver's library; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise RuntimeError for a status of the driver that is no success."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


def ensure_context(device: int) -> None:
    """Make a device's context the thread's where it has none, as torch does at its first call of the runtime.

    Nothing is asked of a stream, which may be one that a graph is captured from.
    """
    context = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        check(
            driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            f"the context of device {device}",
        )
        check(driver().cuCtxSetCurrent(context), f"the context of device {device}")


def function_of(cubin: bytes, name: str, shared: int, device: int) -> ctypes.c_void_p:
    """A kernel of a cubin on a device, which may have as many bytes of dynamic shared memory. Its module stays loaded."""
    module, result = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        ensure_context(device)
        check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        check(driver().cuModuleGetFunction(ctypes.byref(result), module, name.encode()), name)
        check(
            driver().cuFuncSetAttribute(result, MAX_SHARED, shared),
            f"{shared} bytes of shared memory for {name}",
        )
    return result


class LaunchAttribute(ctypes.Structure):
    """A `CUlaunchAttribute`: its number, and of 64 bytes of value the three first words."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """A `CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


def clusters_at_once(function: ctypes.c_void_p, cluster: int, threads: int, shared: int, device: int) -> int:
    """How many clusters of a kernel the device runs at once: those that fit into its groups of multiprocessors."""
    attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
    config = LaunchConfig(
        (cluster, 1, 1), (threads, 1, 1), shared, None, ctypes.addressof(attribute), 1
    )  # fmt: skip
    result = ctypes.c_int()
    with torch.cuda.device(device):
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(result), function, ctypes.byref(config))
    check(status, f"asking how many clusters of {cluster} programs run at once")
    return result.value


def tensor_map(address: int, rows: int, length: int, box: tuple[int, int]) -> bytes:
    """How the tensor copy engine copies a box (rows, bytes) of a matrix of bytes (rows, length), zeros outside of it.

    length: a multiple of STEP. A box has 64 or 128 bytes of at most 256 rows and is swizzled by as many, as wgmma reads it.
    """
    memory = (ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT))()
    result = (ctypes.c_char * MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
    status = driver().cuTensorMapEncodeTiled(
        result, UINT8, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(length, rows), (ctypes.c_uint64 * 1)(length),
        (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1), PLAIN, SWIZZLES[box[1]], L2_256, ZEROS,
    )  # fmt: skip
    check(status, f"a tensor map of {rows} rows of {length} bytes at {address:#x}, boxes {box}")
    return bytes(result)


__all__ = [
    "STEP",
    "LaunchAttribute",
    "LaunchConfig",
    "check",
    "clusters_at_once",
    "driver",
    "ensure_context",
    "function_of",
    "tensor_map",
]
