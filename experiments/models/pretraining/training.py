"""Train a byte-level model from random weights within a budget; `convert` makes its linear layers low-precision ones first.

A step draws `batch` stretches of the training text, with replacement, by a generator of its own: the same for every method of
a seed. AdamW trains all parameters, matrices with weight decay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data.corpus import Corpus
from experiments.harness.compiled import compiled_runs
from experiments.harness.progress import share
from experiments.models.language_model import ModelSettings
from experiments.models.pretraining.model import ByteLevelModel, mean_loss
from experiments.models.pretraining.settings import PretrainSettings
from experiments.models.train import text_of
from experiments.models.training_checkpoint import Checkpoint, Run

# How long the steps of a training took, and on how many bytes: stopped while it warms up, is stored, or is evaluated.


@dataclass
class Clock:
    """Seconds of steps and the bytes trained in them, over all processes of a training.

    On a GPU it waits for the device when it starts and stops. In between it is read without waiting: the device may be some
    steps behind, at most `training.LOOK`. alone: whether nothing else had the device in any of the processes; otherwise the
    seconds are not those of the steps.
    """

    device: str
    seconds: float = 0.0
    bytes: int = 0
    since: float | None = None
    alone: bool = True

    def start(self) -> None:
        """Run on."""
        if self.since is None:
            self._wait()
            self.since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        if self.since is not None:
            self._wait()
            self.seconds, self.since = self.now(), None

    def now(self) -> float:
        """Seconds so far."""
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)

    def trained(self, count: int) -> None:
        """A step on so many bytes; it counts where the clock runs."""
        if self.since is not None:
            self.bytes += count

    @property
    def rate(self) -> float:
        """Bytes a second; 0 where nothing was timed."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class TimedRun(Run):
    """The state of a training with its clock."""

    clock: Clock = field(default_factory=lambda: Clock("cpu"))

    def state(self) -> dict[str, Any]:
        """What `Run` has, and the clock."""
        clock = {"seconds": self.clock.now(), "timed_bytes": self.clock.bytes, "alone": self.clock.alone}
        return {**super().state(), **clock}

    def restore(self, state: dict[str, Any]) -> None:
        """Likewise."""
        super().restore(state)
        self.clock.seconds, self.clock.bytes = state["seconds"], state["timed_bytes"]
        self.clock.alone = self.clock.alone and state["alone"]


#: Steps of a process that the clock leaves out: compilation, and the first allocations.
WARMUP_STEPS = 5
#: Steps between two looks at the loss, which wait for the GPU.
LOOK = 10
#: Makes the linear layers of a model low-precision ones, in place.
Convert = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Pretrained:
    """A trained model, in evaluation mode, and its training.

    losses: bits per byte of every step (steps), float64 on the CPU. bytes_per_second, seconds: of the clock, which leaves out
    compilation and checkpoints. resumed_at: the step at which this process began. alone: whether the device was this training's
    in all its steps, without which neither the seconds nor the rate say how fast it is.
    """

    model: ByteLevelModel
    losses: Tensor
    bytes_per_second: float
    seconds: float
    resumed_at: int
    alone: bool = True

    @property
    def last_loss(self) -> float:
        """Bits per byte of training text, mean over the last twentieth of the steps."""
        return float(self.losses[-max(1, len(self.losses) // 20) :].mean())


def pretrain(
    settings: PretrainSettings,
    corpus: Corpus,
    device: str,
    convert: Convert | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    alone: bool = True,
) -> Pretrained:
    """A model of these settings, trained on the corpus until the budget is used.

    convert: called once on the new model, on its device, before the optimizer gets its parameters; None: bfloat16 on a GPU and
    float32 on a CPU. checkpoint: where a killed training is resumed from. With a budget of bytes, on a CPU, a resumed
    training ends with the weights of an uninterrupted one, bit for bit. alone: whether nothing else uses the device meanwhile.
    """
    torch.manual_seed(settings.seed)
    model = ByteLevelModel(settings.model).to(device).train()
    if convert is not None:
        convert(model)
    optimizer = adamw(model, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    run = TimedRun(model, [optimizer], generator, [], Clock(device, alone=alone))
    checkpoint = checkpoint or Checkpoint()
    checkpoint.resume(run, device)
    with share(f"{settings.model.name}, {settings.method}") as report:
        take_steps(run, settings, text_of(corpus).to(device), checkpoint, report)
    losses = torch.stack(run.losses).double().cpu() / math.log(2)
    clock = run.clock
    return Pretrained(model.eval(), losses, clock.rate, clock.seconds, checkpoint.resumed, clock.alone)


def take_steps(
    run: TimedRun,
    settings: PretrainSettings,
    text: Tensor,
    checkpoint: Checkpoint,
    report: Callable[[float, str], None],
) -> None:
    """Steps until the budget is used. `text`: (bytes), uint8, on the model's device."""
    loss_of = mean_loss
    if settings.compiled and text.is_cuda:
        loss_of = compiled(settings.model, settings.batch, settings.method)
    clock, losses = run.clock, run.losses
    begin = len(losses) + WARMUP_STEPS
    while (done := settings.budget.fraction(len(losses) * settings.step_bytes, clock.now())) < 1:
        if len(losses) == begin:
            clock.start()
        set_rate(run.optimizers[0], settings.rate_at(done))
        with compiled_runs(loss_of is not mean_loss and len(losses) == begin - 1):
            losses.append(take_step(run, loss_of, sample(text, settings, run.generator), settings.clip))
        clock.trained(settings.step_bytes)
        if len(losses) % LOOK == 0:
            report(done, f"{losses[-1].item() / math.log(2):.3f} bits per byte")
        store(run, checkpoint)
    clock.stop()


@lru_cache(maxsize=1)
def compiled(model: ModelSettings, batch: int, method: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """`mean_loss` by torch.compile. Trainings that differ in seed or rate share it.

    For others what was compiled is forgotten: torch runs a function uncompiled that it has compiled for many kinds of
    arguments.
    """
    torch.compiler.reset()
    return torch.compile(mean_loss, dynamic=False)


def take_step(
    run: TimedRun, loss_of: Callable[[nn.Module, Tensor], Tensor], tokens: Tensor, clip: float
) -> Tensor:
    """One step on (batch, context + 1) bytes; its loss before it."""
    loss = loss_of(run.model, tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def store(run: TimedRun, checkpoint: Checkpoint) -> None:
    """A checkpoint where it is time for one; the clock stands still meanwhile."""
    if checkpoint.path is not None and time.monotonic() - checkpoint.written >= checkpoint.seconds:
        running = run.clock.since is not None
        run.clock.stop()
        checkpoint.reached(run)
        if running:
            run.clock.start()


def sample(text: Tensor, settings: PretrainSettings, generator: torch.Generator) -> Tensor:
    """Stretches of the text, (batch, context + 1), int64, on its device."""
    length = settings.model.context + 1
    starts = torch.randint(len(text) - length, (settings.batch,), generator=generator)
    if text.is_cuda:
        # A copy from pageable memory would let the host wait for the device in every step.
        starts = starts.pin_memory().to(text.device, non_blocking=True)
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


def adamw(model: nn.Module, settings: PretrainSettings) -> torch.optim.AdamW:
    """AdamW over all parameters: matrices with weight decay, norms without."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


__all__ = ["WARMUP_STEPS", "Clock", "Convert", "Pretrained", "TimedRun", "pretrain"]
