"""Times of two Llama-3-8B blocks, forward and backward: eager and compiled, by recipe, with fused layers and without.

    python -m tests.gpu.training.blocks_speed bf16 bf16:compile rowwise rowwise:fuse --profile rowwise:fuse

A variant is a recipe ("bf16": the model as it is) with ":qat" (weights rounded to int4 in groups of 128 first), ":fuse" (norms,
SwiGLU, rotary embedding) and ":compile" behind it. All run in one process on one batch, one step after the other in each round,
so that clocks are the same for all; a table follows of medians, peak memory and the ratio to the first variant, and for
--profile the kernels of one step by their time.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from statistics import median

import torch

import ao_lab
from ao_lab.training.fused_modules import fuse_layers_, fusions
from experiments.models.llama import LLAMA_3_8B_TWO_LAYERS
from experiments.qat_overhead.step import GB, Trainer
from reference.training import RECIPES

SHOWN = 28


def trainer(variant: str, batch: int, length: int, layers: int) -> Trainer:
    """The blocks of a variant; compiled by its first step."""
    name, *options = variant.split(":")
    config = replace(LLAMA_3_8B_TWO_LAYERS, layers=layers)
    made = Trainer.of(config, batch, length, "cuda", 0, whole=False)
    if "qat" in options:
        ao_lab.quantize_(made.model, ao_lab.QATConfig(ao_lab.Int4WeightOnlyConfig(), step="prepare"))
    if name in RECIPES and name != "bf16":
        ao_lab.convert_for_training_(made.model, name)
    fuse_layers_(made.model, fusions("fuse" in options))
    if "compile" in options:
        made.compile("inductor")
    return made


def peak(one: Trainer) -> float:
    """Bytes at most while a step runs, beyond the model and the batch of this and other variants."""
    one.step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + one.own_bytes()


def milliseconds(trainers: dict[str, Trainer], rounds: int) -> dict[str, float]:
    """Medians by events on the device, which include waits for the host."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(rounds + 2):
        for name, one in trainers.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            one.step()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(begin.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


def host_milliseconds(one: Trainer) -> float:
    """What the host needs to start a step, without waiting for it."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    one.step()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e3 * spent


def profile(one: Trainer, label: str) -> None:
    """The kernels of a step by their time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        one.step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    print(f"kernels of {label}: {sum(row.device_time_total for row in rows) / 1e3:.1f} ms")
    for row in rows[:SHOWN]:
        print(f"  {row.device_time_total / 1e3:7.2f} ms {row.count:4d}  {row.key[:90]}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--profile", nargs="*", default=[])
    for name, value in (("batch", 2), ("length", 8192), ("layers", 2), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    trainers, memory, outputs = {}, {}, {}
    for variant in asked.variants:
        started = time.perf_counter()
        one = trainer(variant, asked.batch, asked.length, asked.layers)
        outputs[variant] = one.first_step()
        trainers[variant], memory[variant] = one, peak(one)
        print(f"{variant}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    first = outputs[asked.variants[0]]
    times = milliseconds(trainers, asked.rounds)
    for name, spent in times.items():
        apart = ((outputs[name] - first).norm() / first.norm()).item()
        host = host_milliseconds(trainers[name])
        print(f"{name:24s} {spent:7.2f} ms  {times[asked.variants[0]] / spent:5.2f}x  peak {memory[name] / GB:6.2f} GB  "
              f"host {host:6.1f} ms  output {apart:.1e} from the first", flush=True)  # fmt: skip
    for name in asked.profile:
        profile(trainers[name], name)


if __name__ == "__main__":
    main()
