"""Experiment `qat`: what quantization-aware training recovers."""

from experiments.harness.registry import WINDOWS, Experiment

EXPERIMENT = Experiment(order=60, windows=WINDOWS)
