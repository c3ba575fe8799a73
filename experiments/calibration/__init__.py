"""Experiment `calibration`: methods that quantize with data, in every scheme, on real models."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=22, always=False, trained=True, real=True, tasks=("language model", "encoder"))
