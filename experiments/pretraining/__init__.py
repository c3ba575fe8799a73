"""Experiment `pretraining`: language models from scratch in bfloat16, the baseline of low-precision training."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=55, always=False, folders=())
