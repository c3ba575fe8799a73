"""Experiment `ladder`: models of several modalities from eager bfloat16 to the last lever, one rung after the other."""

from experiments.harness.registry import Experiment

EXPERIMENT = Experiment(
    order=53,
    parts=(
        "llama-3.1-8b", "code-llama-34b", "chameleon-7b-text", "chameleon-7b-image", "seamless-m4t-v2", "seamless-m4t-v2-beams",
        "hstu-dlrmv3", "batch 1", "largest batch", "ends", "rungs", "levers", "trace", "acceptance",
    ),
)  # fmt: skip
