"""The device that kernels in CUDA C++ are for: GPUs of compute capability 9.0, and what of them sizes and choices go by."""

from __future__ import annotations

from functools import lru_cache

import torch

from fast.launch.launcher import interpreted
from fast.launch.nvrtc import missing_compiler

#: Compute capability.
HOPPER = (9, 0)
#: Multiprocessors of the GPU that times were measured on.
MULTIPROCESSORS = 132
#: Clusters that it runs at once, by their programs, one to a multiprocessor. A cluster lies in one of the GPU's groups of at
#: most 18 multiprocessors, and two of these have fewer than 16 (waves that say so: reports/LOG.md).
AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 14}
#: Bytes of shared memory of a multiprocessor.
SHARED = 233472
#: Bytes of it that each program takes besides its own.
SYSTEM = 1024
#: Bytes of it that a program has at most.
MOST_SHARED = 232448
#: Registers of a multiprocessor.
REGISTERS = 1 << 16
#: Tiles of rows that share their weights' values in the L2 cache.
GROUP = 8
#: Names of dtypes by the numbers that the sources give them.
KINDS = ("float32", "bfloat16", "float16", "int32")


def at_once(cluster: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Clusters of so many programs that a device of as many multiprocessors runs at once."""
    return max(1, AT_ONCE[cluster] * multiprocessors // MULTIPROCESSORS)


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=64)
def processors_of(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_served(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on such a GPU, and NVRTC is here, which comes with torch's wheels for CUDA."""
    return (
        tensor.is_cuda
        and not interpreted()
        and capability(tensor.get_device()) == HOPPER
        and missing_compiler() is None
    )


__all__ = [
    "AT_ONCE",
    "GROUP",
    "HOPPER",
    "KINDS",
    "MOST_SHARED",
    "MULTIPROCESSORS",
    "REGISTERS",
    "SHARED",
    "SYSTEM",
    "at_once",
    "capability",
    "is_served",
    "processors_of",
]
