"""Experiment `ptq`: post-training quantization of a trained language model."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=20,
    compressed=True,
    real=True,
    tasks=("language model", "encoder", "speech"),
    parts=("encoders", "speech", "weights"),
    schemes=True,
)
