"""Experiment `prefill_attention`: what attention in 8 bits costs in accuracy, on a model's own activations and predictions."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=60, trained=False, real=True)
