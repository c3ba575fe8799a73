"""ao_lab: a laboratory for low-precision deep learning.

Every number format and every algorithm has a bit-exact specification in `reference`, for NumPy, JAX and torch alike. This
package is what users import: the names of the specification, `ao_lab.jax` with kernels for JAX arrays on GPUs,
`ao_lab.testing` with Hypothesis strategies for the inputs that break kernels, and the command line `ao-lab`.

Nothing is imported before it is used: `import ao_lab` takes milliseconds and needs neither torch nor JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_lab import jax as jax
    from ao_lab import testing as testing
    from reference import FORMATS as FORMATS
    from reference import SCHEMES as SCHEMES
    from reference import choose_scales as choose_scales
    from reference import compress as compress
    from reference import decode as decode
    from reference import decompress as decompress
    from reference import dequantize as dequantize
    from reference import encode as encode
    from reference import fake_quantize as fake_quantize
    from reference import fake_quantize_vjp as fake_quantize_vjp
    from reference import matmul as matmul
    from reference import matmul_error_bound as matmul_error_bound
    from reference import pack as pack
    from reference import prune as prune
    from reference import quantize as quantize
    from reference import quantize_both as quantize_both
    from reference import rms_norm as rms_norm
    from reference import rms_norm_quantize as rms_norm_quantize
    from reference import swiglu as swiglu
    from reference import swiglu_quantize as swiglu_quantize
    from reference import tile_scales as tile_scales
    from reference import unpack as unpack
    from reference import untile_scales as untile_scales

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "SCHEMES",
    "__version__",
    "choose_scales",
    "compress",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "jax",
    "matmul",
    "matmul_error_bound",
    "pack",
    "prune",
    "quantize",
    "quantize_both",
    "rms_norm",
    "rms_norm_quantize",
    "swiglu",
    "swiglu_quantize",
    "testing",
    "tile_scales",
    "unpack",
    "untile_scales",
]

SUBMODULES = ("jax", "testing")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'ao_lab' has no attribute {name!r}")
    if name in SUBMODULES:
        return importlib.import_module(f"ao_lab.{name}")
    from ao_lab.dispatch import dispatched

    value = getattr(importlib.import_module("reference"), name)
    value = dispatched(name) if callable(value) else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
