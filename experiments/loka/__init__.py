"""Experiment `loka`: where low precision is safe in recommendation models, which kernels are right (after arXiv 2605.10886)."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=60,
    trained=False,
    parts=("probe", "cost", "kernels", "schemes", "trajectory", "policies", "speed", "shapes"),
)
