"""Experiment `kv_cache`: what keys and values in low precision cost in accuracy, and sums over long contexts."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(order=59, trained=False, real=True)
