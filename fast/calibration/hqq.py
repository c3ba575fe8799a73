"""`hqq` for torch tensors; `reference.calibration.hqq` states the algorithm.

CPU tensors run the reference. On a GPU one kernel holds a block in registers over all steps (`fast.kernels.calibration.hqq`);
where it takes no such block, and on other devices, the same steps run as float64 operations of torch, some blocks at a time.
Sums have the reference's order. Powers may differ from NumPy's in the last bit of float64, so a zero point may differ where a
weight lies as near to a boundary, or two mean errors are as equal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import reference
from fast.calibration.inputs import float_tensor, numpy_of, torch_of, weight_matrix
from fast.dispatch import has_kernels
from fast.quantize.quantize import choose_scales, dequantize, quantize
from reference.calibration.hqq import ZeroSteps, check_options, check_scheme, scales_by_steps, zero_points
from reference.quantize.blocks import Blocks
from reference.quantize.stored import Quantized
from reference.schemes.schemes import Scheme, scheme_of

#: Elements that are split at a time.
CHUNK = 1 << 24


def hqq(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    steps: int = 20,
    p: float = 0.7,
    beta: float = 10.0,
    stop: str = "block",
) -> Quantized:
    """w (N, K) in a scheme whose zero points, or scales, are found by half-quadratic splitting: see `reference.hqq`."""
    w = float_tensor(w, "hqq", "w")
    if w.device.type != "cpu":
        return hqq_on_device(w, scheme, steps=steps, p=p, beta=beta, stop=stop)
    result = reference.hqq(numpy_of(w), scheme, steps=steps, p=p, beta=beta, stop=stop)
    return torch_of(result)  # type: ignore[no-any-return]


def hqq_on_device(
    w: torch.Tensor,
    scheme: str | Scheme,
    *,
    steps: int = 20,
    p: float = 0.7,
    beta: float = 10.0,
    stop: str = "block",
) -> Quantized:
    """The same on w's device, whatever it is."""
    w, scheme = weight_matrix(w, "hqq"), scheme_of(scheme)
    check_scheme(scheme, stop)
    check_options(steps, p, beta)
    blocks = Blocks.of(tuple(w.shape), scheme.scale, -1)
    scales = choose_scales(w, scheme)
    if not steps or not w.numel():
        return quantize(w, scheme, scales=scales)
    if scheme.zero is None:
        stored = scales_by_steps(w, scheme, blocks, scales, (steps, p, beta), (quantize, dequantize))
        return quantize(w, scheme, scales=stored)
    rule = ZeroSteps.of(scheme, steps, p, beta)
    zero = zero_points(w, scheme, blocks, scales, rule, _by_tensor if stop == "tensor" else _by_blocks)
    return quantize(w, scheme, scales=replace(scales, zero=zero))


def _by_tensor(rows: torch.Tensor, s: torch.Tensor, value: torch.Tensor, rule: ZeroSteps) -> torch.Tensor:
    """Zero points as values (n, 1) where the mean |error| of the tensor decides."""
    z = rule.by_tensor(rows.double(), s, rule.codes_of(value, s))
    return rule.values_of(z, s)  # type: ignore[no-any-return]


def _by_blocks(rows: torch.Tensor, s: torch.Tensor, value: torch.Tensor, rule: ZeroSteps) -> torch.Tensor:
    """Zero points as values (n, 1) of the least mean |error| of each block."""
    if has_kernels(rows):
        from fast.kernels.calibration import hqq as kernel

        if kernel.covers(rows, rule.steps):
            options = (rule.storage, rule.middle, rule.top, rule.steps, rule.p, rule.beta)
            short = (part.flatten().float() for part in (s, value))
            return kernel.zero_points(rows, *short, *options).double()[:, None]
    z = rule.codes_of(value, s)
    best = torch.empty_like(z)
    count = max(CHUNK // rows.shape[1], 1)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        best[part] = _search(rows[part].double(), s[part], z[part], rule)
    return rule.values_of(best, s)  # type: ignore[no-any-return]


def _search(w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, rule: ZeroSteps) -> torch.Tensor:
    """A block that has ended goes on in step with the others, and nothing of it is taken: the host never waits."""
    best, least = z, torch.full_like(z, torch.inf)
    active = torch.ones_like(z, dtype=torch.bool)
    for _ in range(rule.steps):
        error, following = rule.step(w, s, z)
        active = active & (error < least)
        best, least = torch.where(active, z, best), torch.where(active, error, least)
        z = rule.as_stored(following, s)
    return best


__all__ = ["hqq"]
