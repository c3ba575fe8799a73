"""The host side of quantizing along rows and columns: which matrices the kernels take, and what they leave."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.launch.cache import like
from fast.kernels.launch.call import FLOATS, Call
from fast.kernels.launch.launcher import same_device
from fast.kernels.rowwise_colwise import kernel
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.quantize.provided_scales import check_scales
from reference.quantize.tiled_scales import tiled_size
from reference.schemes.schemes import Scheme, scheme_of

Both = tuple[Quantized, Quantized]
# Parts of the second result, and the names of their tensors.
SECOND = {"codes": "transposed", "scale": "transposed_scale"}


def fused_both(
    x: torch.Tensor, record: str | Scheme, scales: Any, tiled: bool, packed: bool = False, key: Any = None
) -> Both | None:
    """Both results from one read, or None where no kernel does that. key: of the call, see `launch.cache`."""
    scheme = scheme_of(record)
    call = _launched(x, scheme, scales, tiled)
    if call is None:
        return None
    shapes = (tuple(x.shape), tuple(x.shape)[::-1])

    def finishing(names: list[str]) -> Any:
        # 8-bit codes are their own packed storage.
        first, second = (
            like(Quantized("codes", "scale", None, None, shape, 1, scheme, packed, tiled), names, renamed)
            for shape, renamed in zip(shapes, (None, SECOND), strict=True)
        )
        return lambda tensors: (first(tensors), second(tensors))

    result: Both = call.result(finishing, key, record)
    return result


def _launched(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool) -> Call | None:
    name = FLOATS.get(x.dtype)
    if name is None or not x.is_contiguous() or x.numel() == 0 or scheme.scale.block not in (32, "tensor"):
        return None
    rule = constants_of(scheme, name)
    if scales is None and scheme.scale.block == 32 and kernel.covers_mx(x, rule):
        return _mx(x, rule, tiled)
    if scales is not None and not tiled and scheme.scale.block == "tensor" and kernel.covers_given(x, rule):
        return _given(x, scheme, rule, scales)
    return None


def _mx(x: torch.Tensor, rule: SchemeConstants, tiled: bool) -> Call:
    rows, columns = x.shape
    made = {"codes": _bytes(x, rows, columns), "transposed": _bytes(x, columns, rows)}
    scale = _tiled_bytes if tiled else _bytes
    made["scale"], made["transposed_scale"] = scale(x, rows, columns // 32), scale(x, columns, rows // 32)
    return kernel.mx_both(x, rule, made, tiled)


def _bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _tiled_bytes(x: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Tiled scales to be written, padding 0."""
    size = tiled_size((rows, blocks))
    make = torch.empty if size == rows * blocks else torch.zeros
    return make(size, dtype=torch.uint8, device=x.device)


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
    made = {"scale": stored[0].scale, "transposed_scale": stored[1].scale}
    made["codes"], made["transposed"] = _bytes(x, *shapes[0]), _bytes(x, *shapes[1])
    return kernel.given_both(x, rule, made)
