"""Experiments: one module per table or figure. They measure, and contain no quantization algorithm.

`reproduce` runs them, and `python -m experiments` the same from a shell; `ao-lab reproduce` is the comfortable way. Modules
are imported when an experiment runs, so importing this package is quick.
"""

import os

# Threads that wait for each other sleep instead of spinning: on a busy machine torch is several times faster so. It is
# read when torch's OpenMP library is loaded, so it is set before any experiment imports torch; a user's own value stands.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from experiments.harness.paths import Places
from experiments.harness.registry import EXPERIMENTS, reproduce

__all__ = ["EXPERIMENTS", "Places", "reproduce"]
