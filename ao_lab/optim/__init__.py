"""Optimizers whose states, and if wanted parameters, are stored in low precision: torchao's names and arguments.

    optimizer = ao_lab.optim.AdamW8bit(model.parameters(), lr=1e-4)

`states=` names how moments are stored (`reference.optim.states.STATES`): the default ones of this package, whose second moment
never becomes 0, or torchao's by name.
"""

from ao_lab.optim.base import LowBitOptimizer
from ao_lab.optim.classes import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8, Lion8bit
from ao_lab.optim.offload import CPUOffloadOptimizer

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "Lion8bit",
    "LowBitOptimizer",
]
