"""Hypothesis strategies for the inputs that break quantization kernels, comparisons of bits, and `probe_kernel`.

`ao_lab.testing.strategies` has the documentation and an example, `ao_lab.testing.kernels` that of `probe_kernel`.
"""

from ao_lab.testing import kernels, strategies
from ao_lab.testing.kernels import *  # noqa: F403  the names of its __all__
from ao_lab.testing.strategies import *  # noqa: F403

__all__ = [*strategies.__all__, *kernels.__all__]
