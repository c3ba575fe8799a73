"""What one candidate loses at one site: estimates from sampled tokens, for `Probe.report` and `probe_`.

Whether a candidate would be quicker than 16-bit products is a model of one H200, not a measurement (`ao_lab.tune` measures): a
product takes the longer of its multiply-adds and its bytes; a cast reads 16 bits of each input and writes its codes. Rates
were measured on an H200 and stand in `fast/coefficients.toml`, section `h200`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ao_lab.probe.candidates import DOUBLE, gradient_errors, output_operands, products_of, reason_against
from ao_lab.probe.report import SiteErrors, SiteLine
from ao_lab.probe.sites import Site
from fast.cost import Coefficients
from reference.probe import errors
from reference.probe.estimates import Estimate
from reference.training.recipe import Operand, Recipe


def measured_site(
    site: Site,
    recipes: Mapping[str, Recipe],
    x: torch.Tensor,
    g: torch.Tensor | None,
    *,
    tokens: int,
    more: Mapping[str, dict[str, Estimate]] | None = None,
    seed: int = 0,
) -> SiteLine:
    """The line of a site from sampled inputs x (rows, K), and gradients g (rows, N) of the same tokens where there are some.

    tokens: of a batch, for what it costs in time. more: by candidate, estimates that were found elsewhere.
    """
    w = site.weight().to(x.device, x.dtype)
    peak = x.abs().amax(1).to(DOUBLE) / x.to(DOUBLE).square().mean(1).sqrt().clamp_min(1e-300)
    found = {
        name: _measured(recipe, site, x, w, g, tokens, (more or {}).get(name, {}), seed)
        for name, recipe in recipes.items()
    }
    return SiteLine(site.name, site.shape, len(x), float(peak.median()), found)


def _measured(
    recipe: Recipe,
    site: Site,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor | None,
    tokens: int,
    more: dict[str, Estimate],
    seed: int,
) -> SiteErrors:
    reason = reason_against(recipe, site.shape)
    if reason is not None:
        return SiteErrors(reason=reason)
    a, b = output_operands(recipe, x, w, seed)
    read, stored = (one.to(DOUBLE) for one in (x, w))
    if recipe.output.a.hadamard:
        # Mixed operands have the products of plain ones: the parts are told by quantizing one of both.
        read, stored = _mixed(read, recipe.output.a.hadamard), _mixed(stored, recipe.output.b.hadamard)
    y = host(read @ stored.T)
    e = host(a @ b.T) - y
    parts = host((a - read) @ stored.T), host(read @ (b - stored).T)
    return SiteErrors(
        norm_ratio=errors.norm_ratio(e, y),
        median=errors.median_ratio(e, y),
        worst_channel=errors.worst_channel(e, y),
        bias=errors.bias(e, y),
        mere=errors.mere(e, y),
        inputs=errors.norm_ratio(parts[0], y).value,
        weights=errors.norm_ratio(parts[1], y).value,
        gradients=_gradients(recipe, x, w, g, seed),
        speed=speed_of(recipe, site.shape, tokens),
        **more,  # type: ignore[arg-type]
    )


def _gradients(
    recipe: Recipe, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor | None, seed: int
) -> dict[str, Estimate]:
    if g is None or len(products_of(recipe)) < 2:
        return {}
    found = gradient_errors(recipe, x, w, g.to(x.dtype), seed)
    return {name: errors.norm_ratio(host(e), host(exact)) for name, (e, exact) in found.items()}


def _mixed(x: torch.Tensor, length: int) -> torch.Tensor:
    from fast.layers.hadamard import hadamard

    return hadamard(x.to(torch.float32), length).to(DOUBLE)


def host(x: torch.Tensor) -> Any:
    """As NumPy float64."""
    return np.asarray(x.to("cpu", DOUBLE).numpy())


H200 = Coefficients("h200")
#: What lengths of products of 8-bit operands are multiples of.
STEP = 16


def speed_of(recipe: Recipe, shape: tuple[int, int], tokens: int) -> float | None:
    """The time of the 16-bit product of (tokens, K) by (N, K) over that of the candidate; None where it has no such kernel."""
    n, k = shape
    x, w = recipe.output.a, recipe.output.b
    if w.scheme is None or not tokens:
        return None
    both = x.scheme is not None
    if both and not (bits(x) <= 8 and bits(w) <= 8 and n % STEP == 0 and k % STEP == 0):
        return None
    plain = product_seconds(tokens, n, k, 2 * k, 2 * n * k, H200.bfloat16)
    stored = n * k * bits(w) / 8
    if not both:
        return plain / product_seconds(tokens, n, k, 2 * k, stored, H200.bfloat16)
    cast: float = tokens * k * (2 + bits(x) / 8) / H200.copy
    return plain / (product_seconds(tokens, n, k, k * bits(x) / 8, stored, H200.eight_bits) + cast)


def product_seconds(m: int, n: int, k: int, row: float, weight: float, rate: float) -> float:
    """Of (m, k) by (n, k) with 16-bit outputs: `row` bytes of a row of inputs, `weight` of all weights, `rate` in FLOP/s."""
    bytes_moved = m * row + weight + 2 * m * n
    seconds: float = max(2 * m * n * k / rate, bytes_moved / H200.copy)
    return seconds


def bits(operand: Operand) -> float:
    """Bits of an element, 16 where nothing is quantized."""
    return 16 if operand.scheme is None else operand.scheme.format.bits
