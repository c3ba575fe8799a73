"""Kernels compiled beforehand for one compute capability, launched through the CUDA driver: no compiler is needed to run them.

A module's file is made by the command that stands beside its source. Nothing here touches the driver before a launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fast.kernels.launch.direct import current_stream

#: Of `cuda.h`: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
MAX_SHARED = 8
#: Of `cuda.h`: CU_TENSOR_MAP_DATA_TYPE_UINT8 and _FLOAT32, SWIZZLE_NONE and _128B, L2_PROMOTION_L2_256B.
UINT8, FLOAT32 = 0, 7
NO_SWIZZLE, SWIZZLE_128 = 0, 3
L2_256 = 3
#: INTERLEAVE_NONE and FLOAT_OOB_FILL_NONE, which fills with zeros.
PLAIN, ZEROS = 0, 0
#: Bytes of a `CUtensorMap`, and their alignment.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
#: What addresses and strides of tensor maps are multiples of, in bytes.
TENSOR_MAP_STEP = 16
#: Bytes of a swizzled row of a box.
BOX_BYTES = 128


@cache
def driver() -> Any:
    """The CUDA driver's library; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise RuntimeError for a status of the driver that is no success."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


class Module:
    """The kernels of a file on a CUDA device."""

    def __init__(self, path: Path, device: int) -> None:
        self.device = device
        self._module, self._kernels = ctypes.c_void_p(), dict[str, ctypes.c_void_p]()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # from here on the device's context is current
            check(driver().cuModuleLoadData(ctypes.byref(self._module), path.read_bytes()), path.name)

    def launch(self, name: str, grid: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream of the device. shared: bytes of dynamic memory; arguments: ctypes objects."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(name, grid, threads, shared, arguments)
        kernel = self._kernels.get(name) or self._find(name, shared)
        stream = ctypes.c_void_p(current_stream(self.device))  # type: ignore[misc]
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        status = driver().cuLaunchKernel(kernel, grid, 1, 1, threads, 1, 1, shared, stream, places, None)
        return check(status, f"launching {name}")

    def _find(self, name: str, shared: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        check(driver().cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()), name)
        check(driver().cuFuncSetAttribute(found, MAX_SHARED, shared), f"shared memory of {name}")
        self._kernels[name] = found
        return found


def codes_map(address: int, rows: int, length: int, box: int) -> bytes:
    """How the tensor copy engine copies `box` rows x 128 bytes of a matrix (rows, length) of bytes, zeros outside of it.

    length: a multiple of 16; box: at most 256. The copy is swizzled by 128 bytes, as wgmma reads it.
    """
    return _tensor_map(address, UINT8, (length, rows), length, (BOX_BYTES, box), SWIZZLE_128)


def scales_map(address: int, rows: int, blocks: int, stride: int, box: int) -> bytes:
    """How it copies `box` neighbours among float32 scales (blocks, rows), `stride` elements between blocks, a multiple of 4."""
    return _tensor_map(address, FLOAT32, (rows, blocks), 4 * stride, (box, 1), NO_SWIZZLE)


def _tensor_map(
    address: int, kind: int, sizes: tuple[int, int], stride: int, box: tuple[int, int], swizzle: int
) -> bytes:
    memory = (ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT))()
    made = (ctypes.c_char * MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
    status = driver().cuTensorMapEncodeTiled(
        made, kind, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(*sizes), (ctypes.c_uint64 * 1)(stride),
        (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), PLAIN, swizzle, L2_256, ZEROS,
    )  # fmt: skip
    check(status, f"a tensor map of {sizes} at {address:#x}, {stride} bytes between rows")
    return bytes(made)


__all__ = ["TENSOR_MAP_STEP", "Module", "codes_map", "scales_map"]
