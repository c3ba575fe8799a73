"""Experiment `optimizers`: how far stored states change an optimizer's updates, and what they cost in convergence."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=58,
    parts=(
        "updates", "speed", "paired", "8-bit states", "4-bit states", "8-bit states, 24-bit master",
        "float32 states, 24-bit master", "8-bit states, bfloat16 rounded stochastically", "torchao's 8-bit states",
        "torchao's FP8 states",
    ),
)  # fmt: skip
