"""Experiment `generate`: transformers' `generate()` with quantized Llama-3.1-8B layers, beside bfloat16 and torchao."""

from experiments.harness.registry import Experiment

#: The stage of users, beside the generation loop of `decode`.
EXPERIMENT = Experiment(compressed=True, order=51, trained=False, parts=("eager", "prefill", "decode"))
