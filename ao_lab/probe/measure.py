"""What one candidate loses at one site: estimates from sampled tokens, for `Probe.report` and `probe_`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ao_lab.probe.candidates import DOUBLE, gradient_errors, output_operands, products_of, reason_against
from ao_lab.probe.report import SiteErrors, SiteLine
from ao_lab.probe.sites import Site
from ao_lab.probe.speed import speed_of
from reference.probe import errors
from reference.probe.estimates import Estimate
from reference.training.recipe import Recipe


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
