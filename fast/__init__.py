"""The functions of `reference` for torch tensors, under the same names.

CPU tensors run the reference itself (there is no third copy of a rule). CUDA tensors run Triton kernels (`fast.kernels`), the
same bits; where no kernel covers a tensor, the same rules run as torch operations on its device. `fake_quantize` takes part
in autograd. Arrays that are no torch tensors raise TypeError.

Public names are those of `__init__.pyi`, imported when they are first used (`reference.lazy`).
"""

from fast.matmul.matmul import matmul as matmul
from fast.quantize.quantize import quantize as quantize
from reference.lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)
