"""Scales given by the caller: checked against the record, and converted to the form the quantizer computes with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.arrays.namespace import Namespace, namespace_of
from reference.formats.storage import load, storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import Chosen, double_scale, floored, scale_groups, unpack_zero
from reference.quantize.stored import Scales
from reference.quantize.tiled_scales import tiled_size
from reference.schemes.schemes import Scheme

#: dtype and shape of a stored array; None where there is none.
Part = tuple[str, tuple[int, ...]] | None


def given_scales(
    ns: Namespace, given: Scales | None, blocks: Blocks, scheme: Scheme, dtype: str = "float32"
) -> Chosen:
    """Stored scales as float32 bit patterns of shape (..., blocks, 1); ValueError where there are none."""
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
    groups = scale_groups(blocks, outer, scheme)
    bits = groups.accept(load(ns, given.outer, "float32"), ns)
    center = load(ns, given.zero, "float32").reshape((1,))
    scale = double_scale(ns, given.scale, bits, center, groups, scheme, dtype)
    scale = scale.reshape((*blocks.scale_shape, 1))
    return Chosen(given, scale, scale, None, None)


def usable(ns: Namespace, chosen: Chosen, scheme: Scheme, dtype: str) -> Chosen:
    """Given scales raised to the floors of a default scheme, for dividing x of this dtype: a scale of 0 gives no NaN then.

    A NaN or infinite scale turns its block NaN; a negative one is replaced by the floor. Only codes are computed with these:
    `stored` has the scales as given, by which `dequantize` multiplies. Other conventions and powers of two are unchanged.
    """
    if scheme.nan != "block" or scheme.scale.power_of_two:
        return chosen
    outer = chosen.outer
    if outer is not None and scheme.outer is not None:
        outer = floored(ns, outer, scheme.outer, dtype)
    return replace(chosen, scale=floored(ns, chosen.scale, scheme.scale, dtype), outer=outer)


def check_scales(ns: Namespace, scales: Any, scheme: Scheme, blocks: Blocks) -> Scales | None:
    """`scales` as a complete `Scales` (or one with only an outer level), or None; ValueError where it does not fit."""
    if scales is None:
        return None
    if not isinstance(scales, Scales) and not hasattr(scales, "shape"):
        raise TypeError(f"scales is a Scales or an array, got {type(scales).__name__}; see choose_scales")
    given = scales if isinstance(scales, Scales) else Scales(scales)
    only_outer = given.scale is None and given.outer is not None and not _is_double(scheme)
    for part, want in stored_parts(scheme, blocks).items():
        want = None if only_outer and part != "outer" else want
        _check_part(ns, getattr(given, part), want, part, scheme, "x's")
    return given


def check_stored(ns: Namespace, stored: Any, scheme: Scheme, blocks: Blocks, tiled: bool) -> None:
    """ValueError unless `stored` (a `Scales` or `Quantized`) has every scale as `quantize` stores it."""
    expected = stored_parts(scheme, blocks)
    if tiled:
        rows, columns = blocks.scale_shape
        expected["scale"] = ("uint8", (tiled_size((rows, columns)),))
    for part, want in expected.items():
        _check_part(ns, getattr(stored, part), want, part, scheme, "the codes'")


def _is_double(scheme: Scheme) -> bool:
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"


def stored_parts(scheme: Scheme, blocks: Blocks) -> dict[str, Part]:
    """dtype and shape of scale, outer scale and zero point as `quantize` stores them for a tensor in these blocks."""
    double = _is_double(scheme)
    groups = scale_groups(blocks, scheme.outer, scheme).scale_shape if double and scheme.outer else ()
    zero: Part = ("float32", ()) if double else None
    if scheme.zero is not None:
        zero = (storage_dtype(scheme.zero.storage), blocks.scale_shape)
    return {
        "scale": (storage_dtype(scheme.scale.storage), blocks.scale_shape),
        "outer": None if scheme.outer is None else ("float32", groups),
        "zero": zero,
    }


def _check_part(ns: Namespace, got: Any, want: Part, part: str, scheme: Scheme, like: str) -> None:
    """like: whose library the array has to be of."""
    rule = "none" if want is None else f"{want[0]} of shape {want[1]}"
    if got is None and rule == "none":
        return
    if got is None or rule == "none" or not hasattr(got, "dtype") or namespace_of(got) is not ns:
        given = "none" if got is None else f"a {type(got).__name__}"
        raise ValueError(
            f"scheme {scheme.name} takes {part} = {rule} in {like} library, got {given}; see choose_scales"
        )
    have = f"{ns.dtype_name(got)} of shape {ns.shape(got)}"
    if have != rule:
        raise ValueError(f"scheme {scheme.name} takes {part} = {rule}, got {have}; see choose_scales")
