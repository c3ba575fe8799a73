"""Experiment `ladder`: models of several modalities from eager bfloat16 to the last lever, one rung after the other."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=53)
