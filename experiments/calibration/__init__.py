"""Experiment `calibration`: methods that quantize with data, in every scheme, on real models."""

from experiments.harness.registry import WINDOWS, Experiment

EXPERIMENT = Experiment(
    order=22, always=False, trained=True, windows=WINDOWS, tasks=("language model", "encoder")
)
