"""Scales that the caller brings: checked against the record, and brought into the quantizer's own form."""

from __future__ import annotations

from typing import Any

from reference.arrays import Namespace, namespace_of
from reference.blocks import Blocks
from reference.scales import Chosen, Scales, double_scale, unpack_zero
from reference.schemes import Scheme
from reference.storage import load, storage_dtype


def given_scales(
    ns: Namespace, given: Scales | None, blocks: Blocks, scheme: Scheme, dtype: str = "float32"
) -> Chosen:
    """Kept scales as the quantizer needs them."""
    if given is None:
        raise ValueError(f"scheme {scheme.name} needs its scales; see choose_scales")
    record = scheme.scale
    if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        return _given_double(ns, given, blocks, scheme, dtype)
    scale = blocks.accept(load(ns, given.scale, record.storage), ns)
    outer = None if scheme.outer is None else load(ns, given.outer, scheme.outer.storage).reshape((1,))
    zero = unpack_zero(ns, given.zero, scheme)
    return Chosen(given, scale, scale, outer, None if zero is None else blocks.accept(zero, ns))


def _given_double(ns: Namespace, given: Scales, blocks: Blocks, scheme: Scheme, dtype: str) -> Chosen:
    outer = scheme.outer
    if outer is None:
        raise ValueError(f"scheme {scheme.name} has no outer scale")
    groups = Blocks.of(blocks.scale_shape, outer, 0)
    bits = groups.accept(load(ns, given.outer, "float32"), ns)
    center = load(ns, given.zero, "float32").reshape((1,))
    scale = double_scale(ns, given.scale, bits, center, groups, scheme, dtype)
    scale = scale.reshape((*blocks.scale_shape, 1))
    return Chosen(given, scale, scale, None, None)


def check_scales(ns: Namespace, scales: Any, scheme: Scheme, blocks: Blocks) -> Scales | None:
    """`scales` as a complete `Scales` (or one with only an outer level), or None; ValueError where it does not fit."""
    if scales is None:
        return None
    if not isinstance(scales, Scales) and not hasattr(scales, "shape"):
        raise TypeError(f"scales is a Scales or an array, got {type(scales).__name__}; see choose_scales")
    given = scales if isinstance(scales, Scales) else Scales(scales)
    double = scheme.outer is not None and scheme.outer.statistic != "absmax_elements"
    groups = Blocks.of(blocks.scale_shape, scheme.outer, 0).scale_shape if double and scheme.outer else ()
    zero: tuple[str, tuple[int, ...]] | None = ("float32", ()) if double else None
    if scheme.zero is not None:
        zero = (storage_dtype(scheme.zero.storage), blocks.scale_shape)
    expected: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "scale": (storage_dtype(scheme.scale.storage), blocks.scale_shape),
        "outer": None if scheme.outer is None else ("float32", groups),
        "zero": zero,
    }
    only_outer = given.scale is None and given.outer is not None and not double
    for part, want in expected.items():
        _check_part(ns, getattr(given, part), want, part, scheme, only_outer and part != "outer")
    return given


def _check_part(
    ns: Namespace,
    got: Any,
    want: tuple[str, tuple[int, ...]] | None,
    part: str,
    scheme: Scheme,
    missing: bool,
) -> None:
    rule = "none" if want is None or missing else f"{want[0]} of shape {want[1]}"
    if got is None and rule == "none":
        return
    if got is None or rule == "none" or namespace_of(got) is not ns:
        given = "none" if got is None else f"a {type(got).__name__}"
        raise ValueError(
            f"scheme {scheme.name} takes {part} = {rule} in x's library, got {given}; see choose_scales"
        )
    have = f"{ns.dtype_name(got)} of shape {ns.shape(got)}"
    if have != rule:
        raise ValueError(f"scheme {scheme.name} takes {part} = {rule}, got {have}; see choose_scales")
