"""`smoothing_factors` and `awq_factors` for torch tensors; `reference.calibration.smoothing` states the rules.

`smoothing_factors` of CPU tensors is the reference's. Else the same steps run as float64 operations of torch, `awq_factors` on
every device: its weights are rounded by the kernels of `fake_quantize`, on CPUs too. Powers may differ by a unit in the last
place of float64 before they are rounded to float32. Sums over K are those of matrix products, elements across the diagonal of
the Hessian added first (half of the products), so a ratio's error agrees to about 1e-12 of itself, and the chosen ratio
unless two nearly tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fast.calibration.hessian import quadratic
from fast.calibration.inputs import (
    float_tensor,
    input_values,
    numpy_of,
    rounded,
    second_moments,
    torch_of,
    weight_matrix,
)
from fast.calibration.search import search_scales
from fast.quantize.fake_quantize import fake_quantize
from reference.calibration import smoothing as rule
from reference.calibration.smoothing import AWQFactors, check_alpha, check_ratios
from reference.schemes.schemes import Scheme, scheme_of

#: Elements of a weight whose errors are multiplied at a time.
CHUNK = 1 << 26


def smoothing_factors(x_absmax: torch.Tensor, w_absmax: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """max|x|^alpha / max|w|^(1 - alpha), (K,) float64 on x_absmax's device: see `reference.smoothing_factors`."""
    x = float_tensor(x_absmax, "smoothing_factors", "x_absmax")
    w = float_tensor(w_absmax, "smoothing_factors", "w_absmax")
    if x.device.type != "cpu":
        return smoothing_factors_on_device(x, w, alpha)
    return torch_of(rule.smoothing_factors(numpy_of(x), numpy_of(w), alpha))  # type: ignore[no-any-return]


def smoothing_factors_on_device(x: torch.Tensor, w: torch.Tensor, alpha: float) -> torch.Tensor:
    """The same by torch operations on x's device, whatever it is."""
    size = x.shape[0] if x.dim() else 0
    x = input_values(x, size, "smoothing_factors", "x_absmax")
    w = input_values(w.to(x.device), size, "smoothing_factors", "w_absmax")
    check_alpha(alpha)
    return rule.balanced(x, w, alpha)  # type: ignore[no-any-return]


def awq_factors(
    ws: Sequence[torch.Tensor] | torch.Tensor,
    hessian: torch.Tensor,
    x_mean: torch.Tensor,
    scheme: str | Scheme,
    *,
    ratios: int = 20,
    search: bool = False,
) -> AWQFactors:
    """The factors of least output error, with the errors of all ratios, on the weights' device: see `reference.awq_factors`."""
    weights = [float_tensor(w, "awq_factors", "ws") for w in (ws if isinstance(ws, (list, tuple)) else [ws])]
    scheme, size = scheme_of(scheme), _common_inputs(weights)
    device = weights[0].device
    h = float_tensor(hessian, "awq_factors", "the hessian").to(device)
    h = second_moments(h, size, "awq_factors")
    x = float_tensor(x_mean, "awq_factors", "x_mean").to(device)
    x = input_values(x, size, "awq_factors", "x_mean")
    check_ratios(ratios)
    live = (x > 0) & torch.stack([(w != 0).any(dim=0) for w in weights]).any(dim=0)
    table = torch.stack([rule.power_factors(x, live, step / ratios) for step in range(ratios)])
    errors = torch.stack(
        [sum((_error(w, h, s, scheme, search) for w in weights), h.new_zeros(())) for s in table]
    )
    # The first of equals, where torch.argmin may return any.
    best = int((errors == errors.min()).int().argmax())
    return AWQFactors(table[best], errors, best / ratios)


def _error(
    w: torch.Tensor, h: torch.Tensor, factors: torch.Tensor, scheme: Scheme, search: bool
) -> torch.Tensor:
    """tr(D H D^T) of one weight, 0-d; infinite where the scheme stores no number."""
    smoothed = rounded(w.double() * factors, w.dtype)
    scales = search_scales(smoothed, scheme, weights=h.diagonal() / factors**2) if search else None
    values = fake_quantize(smoothed, scheme, scales=scales)
    error = h.new_zeros(())
    step = max(CHUNK // max(w.shape[1], 1), 1)
    for start in range(0, len(w), step):
        rows = slice(start, start + step)
        d = values[rows].double() / factors - w[rows].double()
        error = error + quadratic(d, h, lower=False)
    return torch.where(error.isnan(), torch.inf, error)


def _common_inputs(ws: Sequence[torch.Tensor]) -> int:
    """The K of all weights."""
    if not ws:
        raise ValueError("awq_factors takes the weights that read these inputs, got none; give at least one")
    sizes = {weight_matrix(w, "awq_factors", "ws").shape[1] for w in ws}
    if len(sizes) > 1:
        raise ValueError(
            f"awq_factors takes weights that read the same inputs, got {sorted(sizes)} of them; call it for each"
        )
    return sizes.pop()


__all__ = ["awq_factors", "smoothing_factors"]
