"""Quantized tensors and scales as JAX pytrees: arrays are leaves, the record, shape and axis are static.

Registered when a JAX array first reaches this package, when it is imported after JAX, or by hand.
"""

from __future__ import annotations

_done = False


def register_pytrees() -> None:
    """Register `Quantized` and `Scales` with JAX; calling it again does nothing. Needs JAX."""
    global _done
    if _done:
        return
    import jax

    from reference.quantize import Quantized
    from reference.scales import Scales

    jax.tree_util.register_dataclass(Scales, data_fields=["scale", "outer", "zero"], meta_fields=[])
    jax.tree_util.register_dataclass(
        Quantized,
        data_fields=["codes", "scale", "outer", "zero"],
        meta_fields=["shape", "axis", "scheme"],
    )
    _done = True
