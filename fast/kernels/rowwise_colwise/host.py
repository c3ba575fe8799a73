"""The host side of quantizing along rows and columns: which matrices the kernels take, and what they leave."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.launch.call import FLOAT_NAMES, Call
from fast.kernels.launch.launcher import same_device
from fast.kernels.rowwise_colwise import kernel
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.quantize.provided_scales import check_scales
from reference.schemes.schemes import Scheme, scheme_of

Both = tuple[Quantized, Quantized]
# The names of the results' codes and scales.
NAMES = (("codes", "scale"), ("transposed", "transposed_scale"))


def fused_both(
    x: torch.Tensor, record: str | Scheme, scales: Any, tiled: bool, packed: bool = False, key: Any = None
) -> Both | None:
    """Both results from one read, or None where no kernel does that. key: of the call, see `launch.cache`."""
    scheme = scheme_of(record)
    call = _launched(x, scheme, scales, tiled)
    if call is None:
        return None
    # 8-bit codes are their own packed storage.
    both = tuple(
        Quantized(*names, None, None, shape, 1, scheme, packed, tiled)
        for names, shape in zip(NAMES, (tuple(x.shape), tuple(x.shape)[::-1]), strict=True)
    )
    result: Both = call.result(both, key, record)
    return result


def _launched(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool) -> Call | None:
    name = FLOAT_NAMES.get(x.dtype)
    if name is None or not x.is_contiguous() or x.numel() == 0 or scheme.scale.block not in (32, "tensor"):
        return None
    rule = constants_of(scheme, name)
    if scales is None and scheme.scale.block == 32 and kernel.covers_mx(x, rule):
        return kernel.mx_both(x, rule, tiled)
    if scales is not None and not tiled and scheme.scale.block == "tensor" and kernel.covers_given(x, rule):
        return _given(x, scheme, rule, scales)
    return None


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
