"""Quantized tensors and scales as JAX pytrees: arrays are leaves, the record, shape and axis are static.

Registered when `reference` is imported after JAX, and otherwise by the first call of one of its functions after JAX is
imported. One case is left: a program that imports JAX after it has made a `Quantized` from NumPy arrays, and hands that to
`jax.jit` before it calls anything here again, calls `reference.register_jax()` once. (Importing JAX here for everyone would
make `import reference` slow.)
"""

from __future__ import annotations

import sys

_done = False


def register_jax() -> None:
    """Register `Quantized` and `Scales` as JAX pytrees; calling it again does nothing. Imports JAX."""
    global _done
    if _done:
        return
    import jax

    from reference.quantize.quantize import Quantized
    from reference.quantize.scales import Scales

    jax.tree_util.register_dataclass(Scales, data_fields=["scale", "outer", "zero"], meta_fields=[])
    jax.tree_util.register_dataclass(
        Quantized,
        data_fields=["codes", "scale", "outer", "zero"],
        meta_fields=["shape", "axis", "scheme", "packed", "tiled"],
    )
    _done = True


def register_if_imported() -> None:
    """`register_jax` where JAX is already imported (completely: another thread may be at it)."""
    if hasattr(sys.modules.get("jax"), "tree_util"):
        register_jax()
