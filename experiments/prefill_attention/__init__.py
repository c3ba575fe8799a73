"""Experiment `prefill_attention`: what attention in 8 bits costs in accuracy, on a model's own activations and predictions."""

from experiments.harness.registry import Experiment, Windows

#: Every token of a window is predicted with slow attention.
WINDOWS = Windows(count={"quick": 2, "full": 32}, length={"quick": 192, "full": 2048}, texts={"quick": 1})
EXPERIMENT = Experiment(
    order=60,
    trained=False,
    windows=WINDOWS,
    parts=(
        "models", "speed", "int8", "int8_block", "fp8", "int8, not rotated", "int8, mean key left", "int8, neither",
        "fp8, neither",
    ),
)  # fmt: skip
