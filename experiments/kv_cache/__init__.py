"""Experiment `kv_cache`: what keys and values in low precision cost in accuracy, and sums over long contexts."""

from experiments.harness.registry import Experiment, Windows

#: Every token of a window is predicted by itself.
WINDOWS = Windows(count={"quick": 2, "full": 32}, length={"quick": 192, "full": 2048}, texts={"quick": 1})
EXPERIMENT = Experiment(
    order=59,
    trained=False,
    windows=WINDOWS,
    parts=(
        "sums", "needle", "models", "speed", "generate", "generate_long", "step", "bfloat16", "fp8", "fp8_residual", "int8",
        "int8_channels", "int4", "int4_tokens", "mxfp8", "mxfp4", "nvfp4", "nf4", "int2",
    ),
)  # fmt: skip
