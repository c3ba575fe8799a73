"""The optimizer kernel on CPU tensors in Triton's interpreter, against `reference.optim.update`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process optim
"""

from __future__ import annotations

import numpy as np
import torch

from fast.kernels.optim import host
from fast.optim import update as module
from fast.optim.update import Moment, Slot, Updates
from tests.support.optim import CASES, SHAPES, compared, slots_of

FEW, SMALL = (0, 5, 11), ((1, 256), (1, 150))


def main(few: str = "") -> None:
    """Three steps of each case."""
    host.ELEMENTS = 512
    module.INTERPRETED = True
    for case in [CASES[at] for at in FEW] if few else CASES:
        shapes = SMALL if few else SHAPES
        rule, slots, stored = slots_of(case, torch.device("cpu"), np.random.default_rng(0), shapes)
        print(case.name, compared(case, rule, slots, stored, steps=2 if few else 3))
    rule, slots, _ = slots_of(CASES[0], torch.device("cpu"), np.random.default_rng(0), ((1, 256),))
    moments = [
        Moment(one.codes[:0], one.scale[:0]) for one in (slots[0].first_moment, slots[0].second_moment)
    ]
    empty = Slot(slots[0].p[:0], slots[0].g[:0], torch.zeros(()), *moments)
    Updates()([empty], rule)
    assert empty.step == 1
    print("a shard without rows, alone")
