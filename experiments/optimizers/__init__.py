"""Experiment `optimizers`: how far stored states change an optimizer's updates, and what they cost in convergence."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=58, parts=("updates", "speed", "paired"))
