"""Experiment `ptq`: post-training quantization of a trained language model."""

from experiments.harness.registry import WINDOWS, Experiment

EXPERIMENT = Experiment(
    order=20,
    compressed=True,
    windows=WINDOWS,
    tasks=("language model", "encoder", "speech"),
    parts=("encoders", "speech", "weights"),
    schemes=True,
)
