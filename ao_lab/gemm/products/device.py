"""What a product asks of the device that a weight is on, and of torch there."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU, asked for once."""
    return torch.cuda.get_device_capability(index)


def is_host(device: torch.device) -> bool:
    """Whether torch multiplies float8 as it does on CPUs."""
    return device.type == "cpu"


@lru_cache(maxsize=1)
def cpu_scales_rows() -> bool:
    """Whether torch's float8 product on CPUs takes a scale for each row: some versions fail an assertion there."""
    with _disable_current_modes():  # those that trace would answer for torch
        a, scale = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn), torch.ones(16, 1, device="cpu")
        try:
            torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32)
        except RuntimeError:
            return False
    return True


__all__ = ["capability", "cpu_scales_rows", "is_host"]
