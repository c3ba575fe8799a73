"""Experiment `linear`: times of quantized linear layers over rows of inputs, beside bfloat16 and torchao."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=45, compressed=True, trained=False, parts=("weights", "activations", "experts", "torchao")
)
