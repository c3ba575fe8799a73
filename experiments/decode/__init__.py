"""Experiment `decode`: generation with quantized Llama-3.1-8B shapes."""

from experiments.harness.registry import WINDOWS, Experiment

#: Speed and memory of a quantized model; on a CPU a tiny stand-in goes the same way.
EXPERIMENT = Experiment(order=50, trained=False, part_of="ptq", windows=WINDOWS, schemes=True, parts=(
    "ours", "torchao", "baseline", "bfloat16", "bfloat16, compiled whole", "bfloat16, dependent launches",
    "bfloat16, library products", "float8dq per-row", "float8dq per-tensor", "float8wo", "int4wo-64",
    "int4wo-64, integer zeros", "int8dq", "int8wo", "mxfp4wo", "mxfp8wo", "nvfp4wo",
))  # fmt: skip
