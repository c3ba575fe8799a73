"""Which rows and schemes `columns` covers, and its launches."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from fast.kernels.grouped.columns import group_columns_kernel
from fast.kernels.grouped.layout import GRAIN
from fast.kernels.grouped.maxima import group_maxima_kernel
from fast.kernels.quantize.geometry import ceil_div
from fast.kernels.rowwise_colwise import kernel as mx
from fast.kernels.scheme.constants import constants_of
from fast.kernels.scheme.fast_path_rules import HARDWARE
from fast.launch import cache
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, interpreted
from reference.formats.storage import storage_dtype
from reference.schemes.schemes import Scheme

#: Grains of a strip of `maxima`.
TURNS = 16
#: Columns of such a strip.
COLUMNS = 256
#: Warps of a program of `maxima`.
MAXIMA_WARPS = 4
#: Patches of a tile of `columns`, down and across.
DOWN, ACROSS = 4, 2
#: Tiles of a band.
BAND = 2
#: Registers of a thread, at most.
REGISTERS = {"vectors": 80, "tensor": 80, "blocks": 80, "mx": 80}
#: More would overflow numbers of programs.
LONGEST = 2**24
KINDS = {-1: "vectors", "tensor": "tensor", 128: "blocks", 32: "mx"}


def kind_of(x: torch.Tensor, scheme: Scheme, step: int) -> str:
    """What `columns` calls the scheme's blocks where it serves rows x (T, C) in groups filled up to `step`; else ""."""
    block = scheme.scale.block
    kind = "" if isinstance(block, tuple) else KINDS.get(block, "")
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.statistic == "absmax"
    sized = x.element_size() == 2 and x.shape[1] % 64 == 0 and x.numel() > 0 and max(x.shape) < LONGEST
    if not (kind and plain and sized and x.dtype in FLOAT_NAMES) or scheme.rounding == "stochastic":
        return ""
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype])
    if kind == "mx":
        return kind if mx.is_mx(x, rule) and step % 32 == 0 else ""
    known = rule.fast_path.value in HARDWARE and scheme.scale.storage == "float32" and scheme.format.bits == 8
    return kind if known and step % (128 if kind == "blocks" else GRAIN) == 0 else ""


def group_columns(
    x: torch.Tensor, scheme: Scheme, source: torch.Tensor, owners: torch.Tensor, experts: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """(codes (C, P), scales (C, P / step or the block), table (E, C) of scales where a group has one) of contiguous rows x.

    source, owners: of `layout.group_layout`. None where the kernels do not serve.
    """
    key = cache.key_of("group_columns", scheme, (experts, step), (x, source, owners))
    call = cache.find(key)
    made = None if call is None else call(x, source, owners)
    if made is None:
        kind = kind_of(x, scheme, step)
        if not kind:
            return None
        given = Call({"x": x, "source": source, "owners": owners}, words=("x",))
        names = ("codes", "scale", "table" if kind in ("vectors", "tensor") else None)
        made = _described(given, scheme, kind, experts, step).result(names, key, scheme)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = made
    return found


def _described(call: Call, scheme: Scheme, kind: str, experts: int, step: int) -> Call:
    """Allocate and launch."""
    (places,), columns = call.tensors["source"].shape, call.tensors["x"].shape[1]
    rule = constants_of(scheme, FLOAT_NAMES[call.tensors["x"].dtype], not interpreted())
    block: Any = step if kind in ("vectors", "tensor") else scheme.scale.block
    call.allocate("codes", (columns, places), torch.uint8)
    call.allocate("scale", (columns, places // block), storage_dtype(scheme.scale.storage))
    if kind in ("vectors", "tensor"):
        call.allocate("table", (experts, columns), torch.float32, (0,))
        _leave_maxima(call, kind == "tensor", bool(rule.has_ptx), experts)
    across = gcd(columns // 64, ACROSS)
    grid = ceil_div(places, 32 * DOWN) * (columns // (64 * across))
    masked = places % (32 * DOWN) != 0
    tail = (places, columns, experts, rule, kind, step, masked, BAND, DOWN, across)
    launch = CompiledLaunch(group_columns_kernel, grid, tail, DOWN * across, maxnreg=REGISTERS[kind])
    call.launch(launch, ("x", "source", "owners", "statistic", "codes", "scale", "table"))
    return call


def _leave_maxima(call: Call, whole: bool, has_ptx: bool, experts: int) -> None:
    """Allocate `statistic`, and leave maxima of groups there, those of no group last."""
    (places,), columns = call.tensors["source"].shape, call.tensors["x"].shape[1]
    call.allocate("statistic", ((experts + 1) * (1 if whole else columns),), torch.int32, (0,))
    tail = (places, columns, whole, has_ptx, TURNS, MAXIMA_WARPS, GRAIN, COLUMNS)
    grid = ceil_div(places, TURNS * GRAIN) * ceil_div(columns, COLUMNS)
    launch = CompiledLaunch(group_maxima_kernel, grid, tail, MAXIMA_WARPS)
    call.launch(launch, ("x", "source", "owners", "statistic"))


__all__ = ["group_columns", "kind_of"]
