"""The short divisions of `fast.kernels.sm90.division` against correctly rounded ones, for every significand.

A quotient or reciprocal of normal numbers depends on the exponents only by a power of two, so all 2**23 significands at a few
exponents are all cases, as long as nothing leaves the range that the functions promise.
"""

from __future__ import annotations

import torch

from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings

EXPONENTS = (-126, -124, -122, -118, -117, -110, -100, -65, -64, -63, -1, 0, 1, 2, 40, 100, 124)
FLOOR = 2.0**-126


def jobs(settings: Settings) -> list[Job]:
    """Family "quotients"; kernels only."""
    if settings.device != "cuda":
        return []
    return [Job("quotients", "all significands", "quantize", all_significands, (), 5.0)]


def all_significands(run: Run) -> None:
    """inverse, quotient by every target, and divided."""
    from fast.kernels.scheme.fast_path_rules import QUOTIENTS

    exponents = EXPONENTS[:: 1 if run.settings.fraction > 0.2 else 4]
    fraction = torch.arange(2**23, dtype=torch.int32, device=run.device)
    for exponent in exponents:
        a = (fraction + ((exponent + 127) << 23)).view(torch.float32)
        _count(run, f"inverse 2**{exponent}", _unary("inverse", a, 0.0), _true(torch.ones_like(a), a))
        for target in QUOTIENTS:
            got = _unary("quotient", a, target).clamp(min=FLOOR)
            _count(
                run,
                f"quotient {target} 2**{exponent}",
                got,
                _true(a, torch.full_like(a, target)).clamp(min=FLOOR),
            )
    _random_pairs(run, fraction)


def _random_pairs(run: Run, fraction: torch.Tensor) -> None:
    """Dividends with every significand over random divisors in [1, 2)."""
    generator = torch.Generator(device=run.device).manual_seed(0)
    for step in range(run.settings.few(40, 4)):
        random = torch.randint(
            0, 2**23, fraction.shape, generator=generator, device=run.device, dtype=torch.int32
        )
        a = (fraction + ((step % 20 + 117) << 23)).view(torch.float32)
        b = (random + (127 << 23)).view(torch.float32)
        _count(run, f"divided {step}", _binary(a, b), _true(a, b))


def _true(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 quotients rounded to float32: 53 >= 2 * 24 + 2, so rounding twice is rounding once."""
    return (a.double() / b.double()).float()


def _count(run: Run, label: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    bad = got.view(torch.int32) != wanted.view(torch.int32)
    different = int(bad.sum())
    detail = [f"got {got[bad][0].item().hex()}, expected {wanted[bad][0].item().hex()}"] if different else []
    run.record("quantize", label, got.numel(), different, detail)


def _unary(name: str, a: torch.Tensor, target: float) -> torch.Tensor:
    from fast.kernels.launch.launcher import UNFUSED
    from tests.gpu.kernels.numerics.quotient_kernels import unary_kernel

    y = torch.empty_like(a)
    reciprocal_rn = float((1 / torch.tensor(target or 1.0, dtype=torch.float32)).item())
    unary_kernel[(a.numel() // 1024,)](a, y, name, target, reciprocal_rn, **UNFUSED)
    return y


def _binary(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from fast.kernels.launch.launcher import UNFUSED
    from tests.gpu.kernels.numerics.quotient_kernels import divided_kernel

    y = torch.empty_like(a)
    divided_kernel[(a.numel() // 1024,)](a, b, y, **UNFUSED)
    return y
