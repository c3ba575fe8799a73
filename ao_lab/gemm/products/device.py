"""What a product asks of the device that a weight is on, of torch there, and of sizes that a tracer leaves open."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU, asked for once."""
    return torch.cuda.get_device_capability(index)


def is_host(device: torch.device) -> bool:
    """Whether torch multiplies float8 as it does on CPUs."""
    return device.type == "cpu"


def is_unbacked(size: Any) -> bool:
    """Whether a program is traced for any value of a size, of which nothing may be asked (`mark_unbacked`)."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


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


__all__ = ["capability", "cpu_scales_rows", "is_host", "is_unbacked"]
