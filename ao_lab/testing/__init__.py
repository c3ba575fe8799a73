"""Hypothesis strategies for the inputs that break quantization kernels, and comparisons that print bit patterns.

`ao_lab.testing.strategies` has the documentation and an example.
"""

from ao_lab.testing.strategies import *  # noqa: F403  the names of its __all__
from ao_lab.testing.strategies import __all__ as __all__
