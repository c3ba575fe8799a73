"""`times_power_of_two` for torch tensors; see `reference.formats.storage`."""

from __future__ import annotations

import torch

from fast.dispatch import require_tensor
from reference.formats.storage import SCALED


def times_power_of_two(
    stored: torch.Tensor, storage: str, exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored scales times 2**exponent, and where that is exact, as in the reference; on their device, without gradient.

    Values that are not exact may differ from the reference's: they mean nothing.
    """
    stored = require_tensor(stored, "times_power_of_two").detach()
    if storage not in SCALED:
        raise ValueError(
            f"scales stored as {storage} times a power of two are not exact; {', '.join(SCALED)} are"
        )
    if storage == "float8_e8m0fnu":
        codes = stored.to(torch.int32)
        moved = torch.where(codes == 255, codes, codes + exponent)
        return moved.to(stored.dtype), ((moved >= 1) & (moved < 255)) | (codes == 255)
    numbers = stored if storage == "float32" else stored.view(getattr(torch, storage))
    moved = _times(numbers, exponent)
    # Zeros, infinities and NaN have no other exponent.
    special = (numbers == 0) | ~numbers.isfinite()
    exact = (_times(moved, -exponent) == numbers) & (
        moved.abs() >= torch.finfo(numbers.dtype).smallest_normal
    )
    return torch.where(special, numbers, moved).view(stored.dtype), special | exact


def _times(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """Times 2**exponent in float64, which float32 cannot leave by a product that is exact, rounded to their dtype."""
    return torch.ldexp(numbers.double(), torch.tensor(exponent, device=numbers.device)).to(numbers.dtype)


__all__ = ["times_power_of_two"]
