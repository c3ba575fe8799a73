"""float32 bit patterns to an array of a float dtype: the inverse of `reference.arrays.widen`, with one rounding."""

from __future__ import annotations

from reference.arrays.namespace import Array, Namespace, codes_of
from reference.arrays.widen import INFINITY, MAGNITUDE
from reference.formats.encode_bits import encode_bits
from reference.formats.formats import FORMATS


def to_dtype_bits(ns: Namespace, bits: Array, name: str, *, saturate: bool = False) -> Array:
    """float32 bit patterns rounded to nearest even into an array of dtype `name`.

    A finite value beyond the target's range becomes infinity, or its largest finite value with `saturate`.
    """
    if name == "float32":
        return ns.bitcast(bits, "float32")
    if name == "float64":
        if ns.name == "jax" and not ns.jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(
                "JAX has no float64 unless jax_enable_x64 is set; ask for float32, which holds every value"
            )
        return ns.astype(ns.bitcast(bits, "float32"), "float64")
    fmt = FORMATS[name]
    wide = encode_bits(ns, bits, fmt, "nearest_even", "saturate" if saturate else "nonfinite")
    if saturate:
        # An infinity was infinite before this cast: it stays.
        infinite = ((bits >> 16) & 0x8000) | (fmt.infinity_code or 0)
        wide = ns.where((bits & MAGNITUDE) == INFINITY, infinite, wide)
    return ns.bitcast(codes_of(ns, wide, 16), name)
