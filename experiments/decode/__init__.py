"""Experiment `decode`: generation with quantized Llama-3.1-8B shapes."""

from experiments.harness.registry import Experiment

#: Speed and memory of a quantized model; on a CPU a tiny stand-in goes the same way.
EXPERIMENT = Experiment(order=50, trained=False, part_of="ptq", real=True)
