"""The optimizer kernel on CPU tensors in Triton's interpreter, against `reference.optim.update`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process optim
"""

from __future__ import annotations

import numpy as np
import torch

from fast.kernels.optim import host
from fast.optim import update as module
from tests.support.optim import CASES, SHAPES, compared, slots_of

FEW, SMALL = (0, 5), ((1, 256), (1, 150))


def main(few: str = "") -> None:
    """Three steps of each case."""
    host.ELEMENTS = 512
    module.INTERPRETED = True
    for case in [CASES[at] for at in FEW] if few else CASES:
        shapes = SMALL if few else SHAPES
        rule, slots, stored = slots_of(case, torch.device("cpu"), np.random.default_rng(0), shapes)
        print(case.name, compared(case, rule, slots, stored, steps=2 if few else 3))
