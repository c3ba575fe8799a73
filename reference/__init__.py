"""The specification: every format and algorithm of ao_lab, bit for bit, for NumPy, JAX and torch arrays.

Public names are those of `__init__.pyi`, imported when they are first used (`reference.lazy`). Nothing here imports torch or,
before a JAX array arrives, JAX. `Quantized` and `Scales` are JAX pytrees: see `register_jax` for the one case in which that
takes a call.
"""

from reference.lazy import exported
from reference.matmul.matmul import matmul as matmul
from reference.quantize.quantize import quantize as quantize
from reference.schemes.conventions import load_schemes

load_schemes()

__getattr__, __dir__, __all__ = exported(__name__, __file__)
