"""The output error of a quantized weight, by which candidates are compared.

For weights alone it is tr(D H D^T), the mean over tokens of the squared change of the outputs, D what the weight is off by and
H the mean of x x^T. Where inputs are quantized too it is the mean of |Q q(x) - W x|^2 over a sample of tokens, q(x) the inputs
as the layer will see them. Both are of tokens that no method has read, where some are held out.

After smoothing, weights and inputs are other ones and the function is the same; where a layer's outputs are scaled (values,
whose factors the next layer divides out) the error is that of the outputs before.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.calibration.tokens import Moments, SplitMoments
from fast.calibration.hessian import quadratic_rows
from fast.dispatch import has_kernels
from reference import Quantized, Scales, Scheme

#: Rows of a weight whose errors are multiplied at a time.
ROWS = 4096


def weight_error(
    w: torch.Tensor, q: Quantized, moments: Moments | None, rows: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """tr(D H D^T) in float64, H the identity without moments.

    rows: (N,), by what each output is multiplied. shift: (N,), what is added to the outputs by a bias.
    """
    total, values = 0.0, fast.dequantize(q)
    hessian = None if moments is None else moments.hessian.to(w.device)
    for start in range(0, len(w), ROWS):
        part = slice(start, start + ROWS)
        d = values[part].to(torch.float64) - w[part].to(torch.float64)
        errors = (d * d).sum(-1) if hessian is None else quadratic_rows(d, hessian, lower=False)
        if shift is not None and moments is not None:
            errors += 2 * shift[part] * (d @ moments.mean.to(d.device)) + shift[part].square()
        total += float((errors if rows is None else errors / rows[part].to(d.device).square()).sum())
    return total


def output_error(
    w: torch.Tensor, q: Quantized, inputs: SplitMoments | None, activation: Scheme | None,
    input_scales: Scales | None = None, rows: torch.Tensor | None = None, shift: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """The error of a weight (N, K) in a layer that quantizes its inputs by a scheme, or not."""
    if inputs is None or activation is None:
        return weight_error(w, q, None if inputs is None else inputs.judge, rows, shift)
    x = inputs.sample.to(w.device)
    wide, shown = x.to(torch.float64), quantized_inputs(x, activation, input_scales).to(torch.float64)
    values, total = fast.dequantize(q), 0.0
    for start in range(0, len(w), ROWS):
        part = slice(start, start + ROWS)
        off = shown @ values[part].to(torch.float64).T - wide @ w[part].to(torch.float64).T
        off = off if shift is None else off + shift[part]
        off = off if rows is None else off / rows[part].to(off.device)
        total += float(off.square().sum())
    return total / max(len(x), 1)


def token_errors(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over channels of (y - wanted)^2 in float32, (..., tokens) of (..., tokens, channels); y has a gradient."""
    if has_kernels(y):
        from fast.kernels.calibration import token_errors as kernel

        if kernel.is_supported(y, wanted):
            return kernel.token_errors(y, wanted)
    return (y.to(torch.float32) - wanted.to(torch.float32)).square().mean(-1)


def quantized_inputs(x: torch.Tensor, scheme: Scheme, scales: Scales | None = None) -> torch.Tensor:
    """Inputs (tokens, channels) as a layer sees them that quantizes them so."""
    moved: Any = None if scales is None else _moved(scales, x.device)
    return fast.fake_quantize(x, scheme, scales=moved).detach()


def _moved(scales: Scales, device: torch.device) -> Scales:
    parts = (None if part is None else part.to(device) for part in (scales.scale, scales.outer, scales.zero))
    return Scales(*parts)
