"""Experiment `fp8_training`: the speed of low-precision training beside published tables, its losses beside bfloat16."""

from experiments.harness.registry import WINDOWS, Experiment

EXPERIMENT = Experiment(order=57, compressed=True, windows=WINDOWS)
