"""Experiment `qat`: what quantization-aware training recovers."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=60, real=True)
