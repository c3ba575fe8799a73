"""The host side of quantizing along rows and columns: which matrices the kernels take, and what they leave."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.rowwise_colwise import kernel
from fast.kernels.rowwise_colwise.tiles_host import covers, launch_tiles
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.launch import cache
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import interpreted, same_device
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_scales
from reference.schemes.schemes import Scheme, scheme_of

Both = tuple[Quantized, Quantized]
# The names of the results' codes and scales.
NAMES = (("codes", "scale"), ("transposed", "transposed_scale"))


def fused_both(
    x: torch.Tensor, record: str | Scheme, scales: Any, tiled: bool, packed: bool = False, key: Any = None
) -> Both | None:
    """Both results from one read, or None where no kernel does that. key: of the call, see `launch.cache`."""
    scheme = scheme_of(record)
    call = _launched(x, scheme, scales, tiled, packed)
    if call is None:
        return None
    # 8-bit codes are their own packed storage.
    both = tuple(
        Quantized(*names, None, None, shape, 1, scheme, packed, tiled)
        for names, shape in zip(NAMES, (tuple(x.shape), tuple(x.shape)[::-1]), strict=True)
    )
    result: Both = call.result(both, key, record)
    return result


def _launched(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool, packed: bool) -> Call | None:
    name = FLOAT_NAMES.get(x.dtype)
    if name is None or not x.is_contiguous() or x.numel() == 0:
        return None
    if scheme.scale.block == 32 and scales is None:
        rule = constants_of(scheme, name)
        if kernel.covers_mx(x, rule) and not (packed and scheme.format.bits < 8):
            return kernel.mx_both(x, rule, tiled)
    if scales is None and not tiled and _serves(x, scheme, packed) and not _shares_codes(x, scheme):
        return launch_tiles(x, scheme, True)
    if scales is not None and not tiled and scheme.scale.block == "tensor":
        rule = constants_of(scheme, name)
        return _given(x, scheme, rule, scales) if kernel.covers_given(x, rule) else None
    return None


def _serves(x: torch.Tensor, scheme: Scheme, packed: bool) -> bool:
    """Whether `tiles` makes the codes: nearest ones, 8-bit codes or unpacked ones."""
    return not (packed and scheme.format.bits < 8) and covers(x, scheme) != ""


def _shares_codes(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether one tile of float32 codes would leave in both layouts: compiled so, some transposed bytes were other elements'
    (triton 3.6.0 on Hopper, every run: reports/LOG.md). Each copy by itself is right."""
    return x.dtype == torch.float32 and (
        scheme.scale.block == "tensor" or isinstance(scheme.scale.block, tuple)
    )


def columns_only(x: torch.Tensor, record: str | Scheme, packed: bool, key: Any = None) -> Quantized | None:
    """x.T along its last axis, from a contiguous x (M, K), or None where no kernel reads x so."""
    scheme = scheme_of(record)
    if not _serves(x, scheme, packed):
        return None
    made = Quantized(*NAMES[1], None, None, tuple(x.shape)[::-1], 1, scheme, packed)
    result: Quantized = _columns(x, scheme).result(made, key, record)
    return result


def batch_columns(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes (E * K, M) of a contiguous batch x (E, M, K), along M, and their scales; None where no kernel reads x so.

    Matrices have nothing in common. Scales stand as in `quantize` of the codes' shape, but where the scheme has one for the
    tensor: (E * K, 1), at each column that of its matrix.
    """
    key = cache.key_of("batch_columns", scheme, (), (x,))
    call = cache.find(key)
    made: tuple[torch.Tensor, torch.Tensor] | None = None if call is None else call(x)
    if made is not None:
        return made
    if x.dim() != 3 or not _serves(x, scheme, False):
        return None
    result: tuple[torch.Tensor, torch.Tensor] = _columns(x, scheme).result(NAMES[1], key, scheme)
    return result


def _columns(x: torch.Tensor, scheme: Scheme) -> Call:
    """The columns of a matrix, or of each of a batch."""
    name, sized = FLOAT_NAMES[x.dtype], scheme.scale.block == 32 and x.element_size() == 2
    if sized and kernel.covers_mx(x, constants_of(scheme, name)):
        return kernel.mx_columns(x, constants_of(scheme, name, not interpreted()))
    return launch_tiles(x, scheme, False)


def _given(x: torch.Tensor, scheme: Scheme, rule: SchemeConstants, scales: Any) -> Call | None:
    shapes = (tuple(x.shape), tuple(x.shape)[::-1])
    stored: list[Scales] = []
    for given, shape in zip(scales, shapes, strict=True):
        checked = check_scales(namespace_of(x), given, scheme, Blocks.of(shape, scheme.scale, -1))
        if checked is None:
            return None
        stored.append(checked)
    if not same_device(x, stored[0].scale, stored[1].scale):
        return None
    return kernel.given_both(x, rule, (stored[0].scale, stored[1].scale))
