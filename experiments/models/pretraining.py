"""Train a byte-level model from random weights within a budget; `convert` makes its linear layers low-precision ones first.

A step draws `batch` stretches of the training text, with replacement, by a generator of its own: the same for every method of
a seed. AdamW trains all parameters, matrices with weight decay.

Sizes of the byte-level language models that are trained from scratch. Names are keys of rows.

Width and depth were chosen for matrix products of at least 768 x 768 and heads of 128 features, which GPUs run at a good share
of their peak; every width is a multiple of 256, so that every block size of every scheme divides every layer.

Bits per byte of a model on whole texts, by windows at fixed places.

A zero byte stands in front of a text, as between the files in training, so that each of its bytes is predicted once. Windows of
`context` bytes begin every half context. The first predicts all of its bytes; each later one predicts those of its second half,
which therefore have at least half a context in front of them. Nothing is drawn: every model is measured on the same windows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.corpus import Corpus
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import share
from experiments.models.llama import LanguageModel, LlamaConfig, ModelSettings, frequencies, rotary_tables
from experiments.models.train import Checkpoint, Run, text_of


@dataclass(frozen=True)
class Size:
    """A model, and what it is trained with unless told otherwise: sequences a step and AdamW's peak learning rate."""

    model: ModelSettings
    batch: int
    rate: float


#: 28.7 million parameters: for paired seeds.
SMALL = ModelSettings(
    name="byte-level-30m", width=768, layers=4, heads=6, kv_heads=6, feed_forward=2048, context=1024
)
#: 122.6 million parameters: for one long training.
LARGE = ModelSettings(
    name="byte-level-120m", width=1280, layers=6, heads=10, kv_heads=10, feed_forward=3584, context=1024
)
#: A stand-in for two cores.
TINY = ModelSettings(
    name="byte-level-tiny", width=256, layers=2, heads=2, kv_heads=2, feed_forward=512, context=128
)
SIZES = {
    "tiny": Size(TINY, batch=8, rate=4e-3),
    "30m": Size(SMALL, batch=8, rate=2.5e-4),
    "120m": Size(LARGE, batch=16, rate=2.5e-4),
}


# How long a model is trained and how fast it learns, as fractions of a budget that may be bytes or seconds.

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When training ends: after so many bytes of text, or so many seconds of steps, whichever is first.

    ValueError without either, and where one is not positive. Runs that are compared are given bytes: how far seconds reach
    depends on the machine, and a resumed run of seconds need not take the same steps.
    """

    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.bytes, self.seconds) if one is not None]
        if not given or min(given) <= 0:
            raise ValueError(
                f"a budget is a positive number of bytes, of seconds, or both, got {self.bytes} and {self.seconds}"
            )

    def fraction(self, trained: int, seconds: float) -> float:
        """The share of the budget that is used, from 0; training ends at 1."""
        used = [
            spent / limit
            for spent, limit in ((trained, self.bytes), (seconds, self.seconds))
            if limit is not None
        ]
        return max(used)

    def __str__(self) -> str:
        parts = [
            f"{self.bytes / 1e6:g} MB" if self.bytes else "",
            f"{self.seconds:g} s" if self.seconds else "",
        ]
        return " or ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """One training from random weights.

    batch: sequences of `model.context` bytes a step. rate: AdamW's peak learning rate. warmup, decay: the fractions of the
    budget over which the rate rises linearly from 0, and falls linearly to `last_rate` of itself at the end. clip: the
    largest norm of the gradients. seed: fixes the initial weights and the text of each step, so runs of one seed are paired
    whatever their method. method: what the layers were converted to, a name for rows and checkpoints. compiled: whether
    torch.compile is used on a GPU. ValueError for fractions that do not fit and values that are not positive.
    """

    model: ModelSettings
    budget: Budget
    batch: int
    rate: float
    warmup: float = 0.05
    decay: float = 0.3
    last_rate: float = 0.0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    method: str = BFLOAT16
    compiled: bool = True

    def __post_init__(self) -> None:
        if min(self.warmup, self.decay) < 0 or self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup and decay are fractions of the budget that add up to at most 1, got {self.warmup} and {self.decay}"
            )
        if min(self.batch, self.rate) <= 0:
            raise ValueError(f"batch and rate are positive, got {self.batch} and {self.rate}")

    @property
    def step_bytes(self) -> int:
        """Bytes that one step trains on."""
        return self.batch * self.model.context

    def rate_at(self, done: float) -> float:
        """The learning rate where a fraction `done` of the budget is used: a trapezoid."""
        rise = min(1.0, done / self.warmup) if self.warmup else 1.0
        left = min(1.0, (1 - done) / self.decay) if self.decay else 1.0
        return self.rate * rise * (self.last_rate + (1 - self.last_rate) * max(0.0, left))


# The byte-level model as it is trained here: on a GPU in bfloat16, products and residual stream, with float32 parameters.


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight takes the dtype of its input, so that its result has that dtype too; it computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape and dtype."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ByteLevelModel(LanguageModel):
    """A `LanguageModel` whose forward pass keeps activations in bfloat16 on a GPU, and in float32 on a CPU.

    Every matrix is an nn.Linear without bias with a float32 parameter: what converts linear layers converts this model. On a
    GPU it runs under autocast, so that layers that are not converted multiply in bfloat16.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.RMSNorm):
                    setattr(module, name, norm_of(settings))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, 256); arguments as for `LanguageModel`."""
        device = tokens.device
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=device)
        cosine, sine = rotary_tables(positions, frequencies(self.config, device))
        on_gpu = device.type == "cuda"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            x = self.model.embed_tokens(tokens)
            # Of the embedding's dtype, the residual stream would take twice the memory traffic of the products.
            x = x.to(torch.bfloat16) if on_gpu else x
            for layer in self.model.layers:
                x = layer(x, cosine, sine, mask).to(x.dtype)
            return self.lm_head(self.model.norm(x))


def norm_of(config: LlamaConfig) -> RMSNorm:
    """A norm of a model's width; its weight is 1."""
    return RMSNorm(config.width, eps=config.epsilon)


def mean_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The mean of -ln p of the bytes 1 to time of (batch, time + 1), a 0-d float32 tensor."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


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


#: Windows that run at once.
BATCH = 32
#: Least share of the training text of a byte that is common; the output of a rarer one is hardly trained.
COMMON = 1e-6


@dataclass(frozen=True)
class TextBits:
    """-log2 p of a text, `bits` over its `bytes`, and the part of both that common bytes have; sums in float64."""

    bits: float
    bytes: int
    common_bits: float
    common_bytes: int


def common_bytes(corpus: Corpus) -> Tensor:
    """Which of the 256 bytes are at least the share COMMON of a corpus's training text, (256), bool, on the CPU."""
    counts = torch.bincount(text_of(corpus), minlength=256)
    return counts >= COMMON * counts.sum()


def bits_per_byte(model: nn.Module, texts: Mapping[str, bytes], context: int) -> dict[str, float]:
    """-log2 p of each text over its bytes, by its name; sums in float64. `model`: tokens (batch, time) to logits.

    ValueError for an empty text.
    """
    found = bits_by_text(model, texts, context, torch.ones(256, dtype=torch.bool))
    return {name: one.bits / one.bytes for name, one in found.items()}


def bits_by_text(
    model: nn.Module, texts: Mapping[str, bytes], context: int, common: Tensor
) -> dict[str, TextBits]:
    """-log2 p of each text, by its name, as of `bits_per_byte`. common: which bytes are, (256), bool."""
    device = next(model.parameters()).device
    return {name: bits(model, text, context, common.to(device)) for name, text in texts.items()}


def bits(model: nn.Module, text: bytes, context: int, common: Tensor) -> TextBits:
    """-log2 p of a text. common: (256), bool, on the model's device."""
    # All of it on the device before: a copy for each batch would let the host wait for the device.
    parts = zip(*(one.to(common.device).split(BATCH) for one in windows(text, context)), strict=True)
    total, of_common, count = torch.zeros((3,), dtype=torch.float64, device=common.device)
    for inputs, targets, counted in parts:
        with torch.inference_mode():
            logits = model(inputs.long())
        likelihood = torch.log_softmax(logits.float(), dim=-1)
        found = likelihood.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1).double()
        kept = counted & common[targets.long()]
        total -= (found * counted).sum()
        of_common -= (found * kept).sum()
        count += kept.sum()
    return TextBits(float(total) / math.log(2), len(text), float(of_common) / math.log(2), int(count))


def windows(text: bytes, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (windows, context), uint8, and which targets count (bool): each byte of the text exactly once.

    ValueError for an empty text and for a context that is odd.
    """
    if not text or context % 2:
        raise ValueError(
            f"a text of at least one byte and an even context, got {len(text)} bytes and {context}"
        )
    half = context // 2
    count = 1 + max(0, math.ceil((len(text) - context) / half))
    padded = torch.zeros(1 + (count + 1) * half, dtype=torch.uint8)
    padded[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    inputs, targets = padded[:-1].unfold(0, context, half), padded[1:].unfold(0, context, half)
    places = torch.arange(count)[:, None] * half + torch.arange(context)
    counted = places < len(text)
    counted[1:, :half] = False
    return inputs, targets, counted
