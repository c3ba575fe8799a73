"""Parts "speed" and "mod speed" of `loka`, on a GPU alone: a step of the dense part of exact shapes, compiled.

Embeddings are random: what is timed is everything behind the lookups. DLRMv2-DCN at batch 8192 (65536 over eight GPUs), Wukong
at 6144; forward and backward, and forward alone. "dispatch" chooses by time on this GPU, without a limit to errors, and
confirms by whole steps; that of trained networks within a budget is part "policies".
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from experiments.harness.measuring import Values
from experiments.models.dlrm import DLRM, DLRMV2, DLRMConfig
from experiments.models.wukong import WUKONG, Wukong

SPEED, MOD_SPEED = "speed", "mod speed"
BOTH, FORWARD, MEMORY = "forward and backward", "forward", "peak memory"
METHODS = ("bfloat16", "rowwise", "tensorwise", "dispatch")
THREE = ("no_bias", "block_norm", "hard_swish")
#: Mods whose step is timed beside that of the model as it is: each alone, and together.
MODS: dict[str, tuple[str, ...]] = {"none": (), **{one: (one,) for one in THREE}, "all three": THREE}
#: What outputs may move by where only time counts, and steps that are timed after those that warm up.
ANY, STEPS, WARM = 1e6, 12, 4
#: Tokens of a probe whose errors nothing asks for.
TOKENS = 64


class Dense(nn.Module):
    """A model without its tables, called with what they would give."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits (B,)."""
        return self.run(self.model, *inputs)


@dataclass(frozen=True)
class Workload:
    """make: the dense part on a device; inputs: of a batch."""

    batch: int
    make: Callable[[str], Dense]
    inputs: Callable[[int, str], tuple[Tensor, ...]]


def dcn(config: DLRMConfig, batch: int) -> Workload:
    """DLRMv2, or what has its structure."""

    def make(device: str) -> Dense:
        with torch.device("meta"):
            nothing = nn.Identity()
        model = DLRM(config, tables=nothing, device=device).to(torch.bfloat16)
        return Dense(model, lambda m, dense, sums: m.interact(m.bottom(dense), sums))

    def inputs(rows: int, device: str) -> tuple[Tensor, ...]:
        shapes = ((rows, config.dense), (rows, len(config.sizes), config.width))
        return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)

    return Workload(batch, make, inputs)


def wukong(name: str, batch: int) -> Workload:
    """A Wukong of the paper."""
    config = WUKONG[name]

    def make(device: str) -> Dense:
        return Dense(Wukong(config, device=device).to(torch.bfloat16), lambda m, x: m.interact(x))

    def inputs(rows: int, device: str) -> tuple[Tensor, ...]:
        return (torch.randn((rows, config.features, config.width), device=device, dtype=torch.bfloat16),)

    return Workload(batch, make, inputs)


#: What is timed; "norms" is DLRMv2 with LayerNorm and SiLU in its feed-forward networks, which mods change.
WORKLOADS: dict[str, Workload] = {
    "DLRMv2-DCN": dcn(DLRMV2, 8192),
    "Wukong 5.6 GFLOP": wukong("Wukong 5.6 GFLOP", 6144),
    "Wukong 22.2 GFLOP": wukong("Wukong 22.2 GFLOP", 6144),
}
NORMS = replace(DLRMV2, name="DLRMv2-DCN, norms and SiLU", norm=True)


def changed(model: Dense, method: str, inputs: tuple[Tensor, ...]) -> None:
    """Let the layers of a model train by a method."""
    if method == "dispatch":
        # Errors do not count here, and those of 1024 tokens of the widest layers take the host minutes.
        recipes = ["rowwise", "tensorwise"]
        report = ao_lab.probe_(model, [inputs], recipes, filter_fn=is_wide, tokens=TOKENS, measure=False)
        ao_lab.dispatch_(
            model, lambda m: m(*inputs).float().mean(), report, budget=ANY, most_noise=ANY, confirm=True
        )
    elif method != "bfloat16":
        ao_lab.convert_for_training_(model, method, is_wide, pad=True)


def is_wide(module: nn.Module, name: str) -> bool:
    """Linear layers but those of few columns, the first and the last among them."""
    return isinstance(module, nn.Linear) and min(module.weight.shape) >= 128


def speed_values(
    name: str, method: str, device: str, workload: Workload | None = None, compiled: bool = True
) -> Values:
    """Times of a model by a method."""
    one = WORKLOADS[name] if workload is None else workload
    torch.manual_seed(0)
    model, inputs = one.make(device), one.inputs(one.batch, device)
    changed(model, method, inputs)
    return timed(model, inputs, device, compiled)


def mod_values(
    mods: str, batch: int, device: str, config: DLRMConfig = NORMS, compiled: bool = True
) -> Values:
    """Times with mods, all linear layers in bfloat16."""
    torch.manual_seed(0)
    one = dcn(config, batch)
    model, inputs = one.make(device), one.inputs(batch, device)
    if MODS[mods]:
        ao_lab.apply_mods_(model, MODS[mods])
    return timed(model, inputs, device, compiled)


def timed(model: Dense, inputs: tuple[Tensor, ...], device: str, compiled: bool) -> Values:
    """Medians of a step and of a forward, and the most memory."""
    step: Any = torch.compile(model) if compiled else model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def both() -> None:
        step(*inputs).float().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    @torch.no_grad()
    def forward() -> None:
        step(*inputs)

    values: Values = {
        BOTH: (1e3 * median(both, device), "ms"),
        FORWARD: (1e3 * median(forward, device), "ms"),
    }
    if device == "cuda":
        values[MEMORY] = (torch.cuda.max_memory_allocated() / 1e9, "GB")
    return values


def median(call: Callable[[], None], device: str) -> float:
    """Seconds of a call, the device idle before and after."""
    taken = []
    for _ in range(WARM + STEPS):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM:])


def wait(device: str) -> None:
    """For the device."""
    if device == "cuda":
        torch.cuda.synchronize()


__all__ = ["METHODS", "MODS", "MOD_SPEED", "SPEED", "WORKLOADS", "mod_values", "speed_values"]
