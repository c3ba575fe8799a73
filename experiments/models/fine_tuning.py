"""Fine-tuning a causal language model of transformers on token sequences: the same text for all models of a seed.

AdamW on float32 weights, on a GPU with products in bfloat16 (autocast) and the step captured in a CUDA graph where it can be; a
model whose float32 states do not fit the GPU trains in bfloat16 weights and recomputes activations in backward, and rows say
so. Learned scales of quantization-aware training have a rate of their own, relative to their mean.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.cli.terminal import say
from ao_lab.measure.memory import Peak, synchronize
from experiments.harness.measuring import Values, Wrong
from experiments.models.train import Steps, parameter_groups, set_rates, with_full_rates

#: Bytes of a parameter in training: float32 weight, gradient and two moments; and the part of a GPU that they may take.
STATES, PART = 16, 0.6
BETAS, CLIP, WARMUP = (0.9, 0.95), 1.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a model is trained: steps, sequences a step, tokens of a sequence, AdamW's peak rate (a cosine to zero after a
    warm-up over this share of the steps) and betas, and the rate of learned scales relative to their mean (None: that of
    weights)."""

    steps: int
    batch: int
    length: int
    rate: float
    scale_rate: float | None
    warmup: float = WARMUP
    betas: tuple[float, float] = BETAS

    @property
    def sequences(self) -> int:
        """Sequences that a training reads."""
        return self.steps * self.batch

    def factor(self, step: int) -> float:
        """Of the rates in a step, the first being 0."""
        warm = min(1.0, (step + 1) / max(1, round(self.warmup * self.steps)))
        return warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def training_dtype(model: nn.Module, device: str) -> torch.dtype:
    """Of the weights in training: float32 where the states fit the device, else bfloat16."""
    if device != "cuda":
        return torch.float32
    states = STATES * sum(one.numel() for one in model.parameters())
    fits = states <= PART * torch.cuda.get_device_properties(0).total_memory
    return torch.float32 if fits else torch.bfloat16


def trainable(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in a dtype, in training mode, all floating-point parameters trainable; weights that are shared stay so."""
    made: Any = copy.deepcopy(model).to(dtype).train().requires_grad_(True)
    if dtype == torch.bfloat16:
        made.gradient_checkpointing_enable()
    return made  # type: ignore[no-any-return]


def fine_tune(
    model: nn.Module, sequences: Tensor, tuning: Tuning, step: Callable[[str], None] = lambda word: None
) -> Values:
    """Train a model in place on token ids (steps * batch, length), in their order; seconds of a step and memory. Wrong where
    the loss is not finite.

    The time of a step is the median of the second half of steps. Peak memory is over what was in use before, the model itself
    excluded.
    """
    device = next(model.parameters()).device
    peak, times, losses = Peak(device), list[float](), list[Tensor]()
    peak.begin()
    optimizer = optimizer_of(model, tuning)
    run = Steps(lambda ids: _step(model, optimizer, ids), captured=device.type == "cuda")
    for number in range(tuning.steps):
        set_rates([optimizer], tuning.factor(number))
        batch = sequences[number * tuning.batch : (number + 1) * tuning.batch].to(device)
        started = time.perf_counter()
        losses.append(_guarded(run, batch, model))
        synchronize(device)
        times.append(time.perf_counter() - started)
        step(f"loss {float(losses[-1]):.3f}" if number % 10 == 0 else "")
    model.zero_grad(set_to_none=True)
    last = float(torch.stack(losses[-max(1, tuning.steps // 10) :]).mean())
    if not math.isfinite(last):
        raise Wrong(f"the loss of training is {last}")
    late = sorted(times[len(times) // 2 :])
    found: Values = {
        "time of a step": (late[len(late) // 2], "s"),
        "loss of the last training steps": (last, "nat"),
    }
    over = peak.over()
    return found if over is None else {**found, "memory of training": (over, "byte")}


def _guarded(run: Steps, batch: Tensor, model: nn.Module) -> Tensor:
    """A step; one that cannot be captured runs as it is from then on."""
    try:
        return run(batch)
    except RuntimeError as error:
        if not run.captured or run.graph is not None or isinstance(error, torch.OutOfMemoryError):
            raise
        say(f"a training step of {type(model).__name__} is not captured in a CUDA graph: {str(error)[:200]}")
        # What a broken capture left of gradients was never computed.
        model.zero_grad(set_to_none=True)
        run.captured = False
        return run(batch)


def optimizer_of(model: nn.Module, tuning: Tuning) -> torch.optim.Optimizer:
    """AdamW of all parameters that train; learned scales in a group of their own unless they have the rate of weights."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    device = next(iter(named.values())).device
    cuda = device.type == "cuda"
    together: list[Any] = [{"params": list(named.values())}]
    groups = together if tuning.scale_rate is None else parameter_groups(named, tuning.scale_rate)
    optimizer = torch.optim.AdamW(
        groups, lr=tuning.rate, betas=tuning.betas, weight_decay=0.0, fused=cuda, capturable=cuda
    )
    return with_full_rates([optimizer], device)[0]


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One step of AdamW on the loss of the next token; the loss."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.grad is not None], CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
