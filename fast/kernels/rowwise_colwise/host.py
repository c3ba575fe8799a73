"""The host side of `both`: which matrices its kernels take, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fast.kernels.launch import cache as ready
from fast.kernels.launch.launcher import together
from fast.kernels.launch.plans import NAMES
from fast.kernels.launch.replay import Recording
from fast.kernels.rowwise_colwise import kernel as both
from fast.kernels.scheme.constants import Rule, rule_of
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.quantize.provided_scales import check_scales
from reference.quantize.tiled_scales import tiled_size
from reference.schemes.schemes import Scheme, scheme_of

Both = tuple[Quantized, Quantized]
# Both results, and the call that made them.
Made = tuple[Both, Recording]
# Parts of the second result, and the names of their tensors.
SECOND = {"codes": "transposed", "scale": "transposed_scale"}


def fused_both(
    x: torch.Tensor,
    asked_scheme: str | Scheme,
    scales: Any,
    tiled: bool,
    packed: bool = False,
    key: Any = None,
) -> Both | None:
    """Both results from one read, or None where no kernel does that. key: of the call, see `ready`."""
    made = _fused(x, scheme_of(asked_scheme), scales, tiled)
    if made is None:
        return None
    results, call = made
    if packed:
        # 8-bit codes are their own packed storage.
        results = replace(results[0], packed=True), replace(results[1], packed=True)
    call.remember(key, asked_scheme, lambda names: _finishing(results, names))
    return results


def _finishing(results: Both, names: list[str]) -> Callable[[list[Any]], Both]:
    """What makes results like these of tensors of these names."""
    first, second = ready.like(results[0], names), ready.like(results[1], names, SECOND)
    return lambda made: (first(made), second(made))


def _fused(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool) -> Made | None:
    name = NAMES.get(x.dtype)
    if name is None or not x.is_contiguous() or x.numel() == 0 or scheme.scale.block not in (32, "tensor"):
        return None
    rule = rule_of(scheme, name)
    if scales is None and scheme.scale.block == 32 and both.covers_mx(x, rule):
        return _mx(x, scheme, rule, tiled)
    pair = isinstance(scales, tuple) and len(scales) == 2
    if pair and not tiled and scheme.scale.block == "tensor" and both.covers_given(x, rule):
        return _given(x, scheme, rule, scales)
    return None


def _mx(x: torch.Tensor, scheme: Scheme, rule: Rule, tiled: bool) -> Made:
    rows, columns = x.shape
    made = {"codes": _bytes(x, rows, columns), "transposed": _bytes(x, columns, rows)}
    scale = _tiled_bytes if tiled else _bytes
    made["scale"], made["transposed_scale"] = scale(x, rows, columns // 32), scale(x, columns, rows // 32)
    call = both.mx_both(x, rule, made, tiled)
    shapes = ((rows, columns), (columns, rows))
    first = Quantized(made["codes"], made["scale"], None, None, shapes[0], 1, scheme, tiled=tiled)
    second = (made["transposed"], made["transposed_scale"], None, None, shapes[1], 1, scheme)
    return (first, Quantized(*second, tiled=tiled)), call


def _bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _tiled_bytes(x: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Tiled scales to be written, padding 0."""
    size = tiled_size((rows, blocks))
    make = torch.empty if size == rows * blocks else torch.zeros
    return make(size, dtype=torch.uint8, device=x.device)


def _given(x: torch.Tensor, scheme: Scheme, rule: Rule, scales: Any) -> Made | None:
    shapes = ((x.shape[0], x.shape[1]), (x.shape[1], x.shape[0]))
    kept: list[Scales] = []
    for given, shape in zip(scales, shapes, strict=True):
        checked = check_scales(namespace_of(x), given, scheme, Blocks.of(shape, scheme.scale, -1))
        if checked is None:
            return None
        kept.append(checked)
    if not together(x, kept[0].scale, kept[1].scale):
        return None
    made = {"scale": kept[0].scale, "transposed_scale": kept[1].scale}
    made["codes"], made["transposed"] = _bytes(x, *shapes[0]), _bytes(x, *shapes[1])
    call = both.given_both(x, rule, made)
    first = Quantized(made["codes"], kept[0].scale, None, None, shapes[0], 1, scheme)
    return (first, Quantized(made["transposed"], kept[1].scale, None, None, shapes[1], 1, scheme)), call
