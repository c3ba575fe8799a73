"""A training step: forward and backward of one model on one batch, its memory, and a stopwatch by the host's clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.harness.outcome import Values, Wrong
from experiments.harness.timing import Call
from experiments.models.llama import LlamaConfig
from experiments.qat_overhead.model import DecoderLayers, ModelWithLoss, layers_of, random_model

GB, MB = 1e9, 1e6


@dataclass
class Trainer:
    """A model with its batch. Decoder layers take the residual stream and the gradient of their output, a whole model tokens.

    result: the output before anything was timed, float32.
    """

    model: DecoderLayers | ModelWithLoss
    inputs: Tensor
    gradient: Tensor | None
    result: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(
        cls, config: LlamaConfig, batch: int, length: int, device: str, seed: int, *, whole: bool
    ) -> Trainer:
        """A random model and a random batch, the same for the same seed."""
        model = random_model(config, length, device, seed, whole=whole)
        generator = torch.Generator(device).manual_seed(seed + 1)
        options: dict[str, Any] = {"generator": generator, "device": device}
        if whole:
            return cls(model, torch.randint(0, config.vocabulary, (batch, length), **options), None)
        size = (batch, length, config.width)
        x, g = (torch.randn(size, dtype=torch.bfloat16, **options) for _ in range(2))
        return cls(model, x.requires_grad_(), g)

    def compile(self, backend: str) -> None:
        """Compile each decoder layer; they are alike, so one program serves them all."""
        for layer in layers_of(self.model).layers:
            layer.compile(backend=backend)

    def output(self) -> Tensor:
        """The model's output, float32, without gradients; called before it is compiled."""
        with torch.no_grad():
            return self.model(self.inputs).float()

    def step(self) -> None:
        """Forward and backward; gradients are freed, as the next step's are new."""
        self.backward(self.model(self.inputs))
        self.clear()

    def backward(self, y: Tensor) -> None:
        """Backward from the output of forward."""
        torch.autograd.backward([y], None if self.gradient is None else [self.gradient])

    def clear(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)
        self.inputs.grad = None

    def first_step(self) -> Tensor:
        """The output of a step, float32; `Wrong` where a gradient is missing or not finite.

        A compiled model is compiled here, once: without gradients it would be another program.
        """
        y = self.model(self.inputs)
        self.backward(y)
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
            and (parameter.grad is None or not torch.isfinite(parameter.grad).all())
        ]
        self.clear()
        if bad:
            raise Wrong(f"{len(bad)} parameters have no finite gradient: {', '.join(bad[:3])}")
        return y.detach().float()

    def memory(self) -> Values:
        """Bytes saved for backward, and on a GPU the peak of a step, this model's own tensors included."""
        values: Values = {"kept for backward": (self.saved_bytes() / MB, "MB")}
        if self.inputs.is_cuda:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before + self.own_bytes()
            values["peak memory"] = (peak / GB, "GB")
        return values

    def own_bytes(self) -> int:
        """Bytes of the model's weights and of its batch."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Weights, buffers and batch; of a quantized weight its parts."""
        return [
            part
            for tensor in (*self.model.parameters(), *self.model.buffers(), self.inputs)
            for part in parts_of(tensor)
        ]

    def saved_bytes(self) -> int:
        """Bytes that autograd saves between forward and backward, without those of `own_bytes`; each tensor once."""
        own = {id_of(tensor) for tensor in self.tensors()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if id_of(tensor) not in own:
                saved[id_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        # Saved tensors stay alive until all are counted, so that no two have the same address.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.model(self.inputs)
        total = sum(saved.values())
        self.backward(y)
        self.clear()
        return total


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in a tensor subclass; a plain tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def id_of(tensor: Tensor) -> int:
    """The address that identifies a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


class HostWatch:
    """A stopwatch by the host's clock, for devices whose work is done when a call returns."""

    def sync(self) -> None:
        """Nothing to wait for."""

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Seconds of each call, in turn."""
        times = []
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times


__all__ = ["HostWatch", "Trainer"]
