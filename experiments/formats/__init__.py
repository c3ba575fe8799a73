"""Experiment `formats`: what each scheme loses on data and on trained tensors."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=10, compressed=True)
