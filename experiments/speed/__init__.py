"""Experiment `speed`: the reference on CPUs beside other libraries."""

from experiments.harness.registry import Experiment

#: Compares with libraries that the other experiments do without, so it runs when it is named.
EXPERIMENT = Experiment(order=30, always=False, trained=False)
