"""What `ao-lab doctor` says of processors: the CPU and the first GPU that torch sees."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from types import ModuleType

from ao_lab.install.packages import module_name

# First compute capability with FP8 matrix instructions, and with block-scaled ones.
FP8_CAPABILITY = (8, 9)
MX_CAPABILITY = (10, 0)


def cpu_found(torch: ModuleType) -> tuple[str, str]:
    """What the CPU is and multiplies quickly, as torch uses it; and its limit, or nothing."""
    found = importlib.import_module(f"{module_name('fast')}.cpu.capability").cpu_capability()
    detail = f"{cpu_name()}, {cores()} cores, torch on {torch.get_num_threads()} threads: {found}"
    return detail, "" if found.bfloat16 else "no bfloat16 instructions: such products are slow"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_found(torch: ModuleType) -> str:
    """The first GPU in words."""
    capability = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}, {memory:.0f} GiB, "
        f"CUDA {torch.version.cuda}"
    )


def limits(capability: tuple[int, int]) -> str:
    """What the matrix units of this generation lack."""
    if capability < FP8_CAPABILITY:
        return "no FP8 matrix instructions before compute capability 8.9"
    return "no block-scaled (MX, NVFP4) matrix instructions before 10.0" if capability < MX_CAPABILITY else ""


def torch_of() -> ModuleType:
    """torch, imported when it is asked for."""
    return importlib.import_module("torch")


__all__ = ["cpu_found", "gpu_found", "limits", "torch_of"]
