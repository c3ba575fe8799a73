"""A step of training: forward and backward of one model on one batch, what it keeps in between, and a host's watch."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.decode.model import Shape
from experiments.harness.timing import Call
from experiments.kernels.gate import Wrong
from experiments.kernels.outcome import Values
from experiments.qat_overhead.model import Blocks, Whole, blocks_of, random_model

GB, MB = 1e9, 1e6


@dataclass
class Trainee:
    """A model with its batch. Blocks get the residual stream and the gradient of what they give, a whole model tokens."""

    model: Blocks | Whole
    inputs: Tensor
    gradient: Tensor | None
    #: What the model gave before anything was timed.
    result: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, shape: Shape, batch: int, length: int, device: str, seed: int, *, whole: bool) -> Trainee:
        """A random model and a random batch, the same for the same seed."""
        model = random_model(shape, length, device, seed, whole=whole)
        generator = torch.Generator(device).manual_seed(seed + 1)
        options: dict[str, Any] = {"generator": generator, "device": device}
        if whole:
            return cls(model, torch.randint(0, shape.vocabulary, (batch, length), **options), None)
        size = (batch, length, shape.width)
        x, g = (torch.randn(size, dtype=torch.bfloat16, **options) for _ in range(2))
        return cls(model, x.requires_grad_(), g)

    def compile(self, backend: str) -> None:
        """Compile each block; blocks are alike, so that one program serves them all."""
        for layer in blocks_of(self.model).layers:
            layer.compile(backend=backend)

    def look(self) -> Tensor:
        """What the model gives, float32; before it is compiled."""
        with torch.no_grad():
            return self.model(self.inputs).float()

    def step(self) -> None:
        """Forward and backward; gradients are freed, as the next step's are new."""
        self.backward(self.model(self.inputs))
        self.clear()

    def backward(self, y: Tensor) -> None:
        """Backward of what forward gave."""
        torch.autograd.backward([y], None if self.gradient is None else [self.gradient])

    def clear(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)
        self.inputs.grad = None

    def first_step(self) -> Tensor:
        """What forward gives, of a step after which gradients are looked at; Wrong where one is missing or not finite.

        A compiled model is compiled here, once: without gradients it would be another program.
        """
        y = self.model(self.inputs)
        self.backward(y)
        lost = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
            and (parameter.grad is None or not torch.isfinite(parameter.grad).all())
        ]
        self.clear()
        if lost:
            raise Wrong(f"{len(lost)} parameters have no finite gradient: {', '.join(lost[:3])}")
        return y.detach().float()

    def memory(self) -> Values:
        """What is kept for backward, and on a GPU the most that a step has allocated, this model's own tensors included."""
        values: Values = {"kept for backward": (self.kept() / MB, "MB")}
        if self.inputs.is_cuda:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - before + self.own()
            values["peak memory"] = (most / GB, "GB")
        return values

    def own(self) -> int:
        """Bytes of the model's weights and of its batch."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Weights, buffers and batch; of a quantized weight its parts."""
        return [
            part
            for tensor in (*self.model.parameters(), *self.model.buffers(), self.inputs)
            for part in parts_of(tensor)
        ]

    def kept(self) -> int:
        """Bytes of all memory that autograd holds between forward and backward, beside what `own` counts; each once."""
        mine = {id_of(tensor) for tensor in self.tensors()}
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if id_of(tensor) not in mine:
                held[id_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        # Alive until all is counted, so that no two tensors have had one address.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.model(self.inputs)
        total = sum(held.values())
        self.backward(y)
        self.clear()
        return total


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in a tensor subclass; a plain tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def id_of(tensor: Tensor) -> int:
    """What tells memory from other memory."""
    return tensor.untyped_storage().data_ptr()


class HostWatch:
    """A watch by the host's clock, where work is done when a call returns."""

    def sync(self) -> None:
        """Nothing is under way."""

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Seconds of each call, in turn."""
        found = []
        for call in calls:
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        return found


__all__ = ["HostWatch", "Trainee"]
