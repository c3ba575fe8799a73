"""Experiment `distributed`: what several ranks compute beside one process, what they send and how long it takes, and what holds
when one of them fails."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=61, always=False, trained=False)
