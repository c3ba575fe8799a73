"""Experiment `sparsity`: what 2:4 sparsity costs in accuracy, and what it gains in time, beside published tables."""

from experiments.harness.registry import WINDOWS, Experiment

EXPERIMENT = Experiment(
    compressed=True,
    order=58,
    windows=WINDOWS,
    folders=("reference", "fast", "ao_lab", "experiments/fp8_training"),
    parts=("vision", "language", "products", "linear", "blocks", "vit", "sam", "decode"),
)
