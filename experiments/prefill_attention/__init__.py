"""Experiment `prefill_attention`: what attention in 8 bits costs in accuracy, on a model's own activations and predictions."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=60,
    trained=False,
    real=True,
    parts=(
        "models", "speed", "int8", "int8_block", "fp8", "int8, not rotated", "int8, mean key left", "int8, neither",
        "fp8, neither",
    ),
)  # fmt: skip
