"""Experiment `qat_overhead`: time and memory of quantization-aware training."""

from experiments.harness.registry import Experiment

#: Time and memory of training; on a CPU tiny stand-ins go the same way.
EXPERIMENT = Experiment(
    order=70, trained=False, part_of="qat", parts=("eager", "compiled", "whole", "products")
)
