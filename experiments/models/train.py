"""Train the small language model from scratch, once; later experiments load it from the cache.

Hidden matrices are trained by Muon, everything else by AdamW, with a short warm-up and a cosine schedule. The seed fixes
initialization and the order of the text; on one CPU with one number of threads the weights are the same bit for bit.
The cache's key covers the settings, the corpus, this code and the versions of torch and numpy, so a changed recipe never finds
an old model.

Training steps, one after the other: on a GPU the launches of a step are captured in a CUDA graph once and replayed.

Quantization-aware training of a small model is limited by its host: 25 ms a step, of which the GPU works a few. A CUDA graph
removes the host and changes no kernel, order or input. Learning rates are in tensors, which the host fills between steps. Steps
that read values on the host cannot be captured.

Muon with the dtype of its products as a setting.

`torch.optim.Muon` orthogonalizes every update by five Newton-Schulz iterations, and always multiplies in bfloat16. A GPU has
matrix units for that. A CPU without bfloat16 instructions runs such products 13 to 50 times slower than float32, and the
iterations then take longer than the model's forward and backward passes together.

The state of a training run on disk: a killed run is resumed from it and ends with the same weights.

A checkpoint holds everything that the next step depends on: parameters and buffers, the optimizers' states, the generator that
draws the text, torch's own generator, and the losses so far. On a CPU with the same number of threads the final weights are
those of an uninterrupted run, bit for bit. The file is replaced atomically.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.measure.turns import recorded
from experiments.data.corpus import Corpus
from experiments.harness.measuring import bar
from experiments.harness.revision import state
from experiments.harness.rows import PARTIAL, library_versions
from experiments.models.llama import LanguageModel, ModelSettings


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run.

    matrix_rate: Muon's learning rate; None: AdamW trains matrices too. rate: AdamW's. last_rate: what both fall to, as a
    fraction of themselves. scale_rate: AdamW's for learned quantization scales, as a fraction of their mean. start: the run
    whose model this one continues from; None: random weights.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    batch: int = 8
    steps: int = 650
    warmup: int = 20
    matrix_rate: float | None = 0.01
    rate: float = 8e-3
    last_rate: float = 0.05
    scale_rate: float = 0.0
    clip: float = 1.0
    seed: int = 0
    start: TrainSettings | None = None


QUICK = TrainSettings(
    model=ModelSettings(width=256, layers=3, heads=4, kv_heads=2, feed_forward=512, context=256)
)
FULL = TrainSettings(
    model=ModelSettings(width=512, layers=8, heads=8, kv_heads=4, feed_forward=1536, context=512),
    batch=64,
    steps=1500,
    warmup=100,
)


@dataclass(frozen=True)
class Trained:
    """A trained model, in evaluation mode, its key in the cache, and facts about its training."""

    model: LanguageModel
    key: str
    facts: dict[str, Any]


def trained_model(settings: TrainSettings, corpus: Corpus, device: str, cache: Path) -> Trained:
    """The model of these settings: from the cache, or trained now and stored there; a killed run is resumed."""
    key = cache_key(settings, corpus, device)
    folder = cache / "models" / key
    checkpoint = Checkpoint(folder.with_name(f"{key}.checkpoint"))
    if not (folder / "model.json").exists():
        started = time.perf_counter()
        initial = settings.start and trained_model(settings.start, corpus, device, cache).model
        model, loss = train(settings, corpus, device, initial, checkpoint)
        facts = {
            "key": key,
            "settings": asdict(settings),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training_bytes": settings.steps * settings.batch * settings.model.context,
            "training_bits_per_byte_at_the_end": loss,
            "training_seconds": time.perf_counter() - started,
            "resumed_at_step": checkpoint.resumed,
            "threads": torch.get_num_threads(),
            "corpus": corpus.name,
        }
        _save(folder, model, facts)
    checkpoint.done()
    return _load(folder, settings, device)


def cache_key(settings: TrainSettings, corpus: Corpus, device: str) -> str:
    """Hash of everything that determines the weights: settings, text, code, libraries and kind of device."""
    parts = [
        json.dumps(asdict(settings), sort_keys=True),
        corpus.sha256,
        state(),
        library_versions(),
        torch.device(device).type,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def train(
    settings: TrainSettings,
    corpus: Corpus,
    device: str,
    initial: LanguageModel | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[LanguageModel, float]:
    """A new model, or a copy of `initial`, after training; and its loss, bits per byte over the last tenth of the steps.
    `checkpoint`: where the run is resumed from and stored."""
    if initial is None:
        torch.manual_seed(settings.seed)
        model = LanguageModel(settings.model).to(device)
    else:
        model = trainable(initial)
    with bar("training", settings.steps) as step:
        loss = fit(model, settings, corpus, step, checkpoint)
    return model.eval(), loss


def trainable(model: LanguageModel) -> LanguageModel:
    """A copy of a model in training mode, all parameters trainable."""
    return copy.deepcopy(model).train().requires_grad_(True)


def fit(
    model: LanguageModel,
    settings: TrainSettings,
    corpus: Corpus,
    step: Callable[[str], None] = lambda word: None,
    checkpoint: Checkpoint | None = None,
) -> float:
    """Train a model in place, on the text that `settings.seed` draws; returns the loss as `train` does.

    step: called after each step, with a message (`experiments.harness.measuring`). checkpoint: as for `train`. One seed draws
    the same text for every model, so runs can be paired.
    """
    text = text_of(corpus).to(model.lm_head.weight.device)
    optimizers = _optimizers(model, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    losses: list[Tensor] = []
    # Muon's step cannot be captured in a CUDA graph.
    captured = all(group.get("capturable") for optimizer in optimizers for group in optimizer.param_groups)
    steps = Steps(lambda tokens: _train_step(model, optimizers, tokens, settings), captured=captured)
    run, checkpoint = Run(model, optimizers, generator, losses), checkpoint or Checkpoint()
    first = checkpoint.resume(run, text.device)
    for _ in range(first):
        step("")
    for number in range(first, settings.steps):
        set_rates(optimizers, rate_factor(number, settings))
        losses.append(steps(_sample(text, settings, generator)))
        checkpoint.reached(run)
        report = number % 10 == 0
        step(f"{losses[-1].item() / math.log(2):.2f} bits per byte" if report else "")
    last = losses[-max(1, settings.steps // 10) :]
    return torch.stack(last).mean().item() / math.log(2)


def text_of(corpus: Corpus) -> Tensor:
    """The training text as one uint8 tensor, files in order, a zero byte after each."""
    joined = b"".join(document.data + b"\0" for document in corpus.train)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def rate_factor(number: int, settings: TrainSettings) -> float:
    """The factor of the learning rate in step `number`: a linear warm-up times a cosine from 1 to `last_rate`."""
    warm = min(1.0, (number + 1) / settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * number / settings.steps))
    return warm * (settings.last_rate + (1 - settings.last_rate) * cosine)


def _optimizers(model: LanguageModel, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    hidden = [module.weight for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    by_muon = hidden if settings.matrix_rate is not None else []
    groups = parameter_groups(dict(model.named_parameters()), settings.scale_rate, by_muon)
    # Fused: a few launches a step instead of several per parameter; small models are limited by launches.
    fused = model.lm_head.weight.is_cuda
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            groups,
            lr=settings.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=fused,
            capturable=fused and not by_muon,
        )
    ]
    if by_muon:
        # float32 on every CPU, so that CPUs with and without bfloat16 instructions train alike.
        dtype = torch.bfloat16 if fused else torch.float32
        optimizers += [Muon(by_muon, dtype=dtype, lr=settings.matrix_rate, momentum=0.95, weight_decay=0.01)]
    return with_full_rates(optimizers, model.lm_head.weight.device)


def parameter_groups(
    named: Mapping[str, Tensor], scale_rate: float, others: Sequence[Tensor] = ()
) -> list[dict[str, Any]]:
    """Groups of AdamW for parameters by name: all but `others`, and learned scales in a group of their own.

    Adam's steps do not depend on the size of gradients, so the rate of scales is `scale_rate` times their mean.
    """
    scales = [one for name, one in named.items() if name.rpartition(".")[2].startswith("qat_")]
    apart = {id(one) for one in (*scales, *others)}
    groups: list[dict[str, Any]] = [{"params": [one for one in named.values() if id(one) not in apart]}]
    if scales:
        mean = float(torch.cat([one.detach().flatten().float() for one in scales]).mean())
        groups.append({"params": scales, "lr": scale_rate * mean})
    return groups


def with_full_rates(
    optimizers: list[torch.optim.Optimizer], device: torch.device
) -> list[torch.optim.Optimizer]:
    """Optimizers that remember their rates for `set_rates`; those of steps that are captured are tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
            if group.get("capturable"):
                group["lr"] = torch.tensor(group["lr"], device=device)
    return optimizers


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Rates of a step: the full ones times a factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["full_rate"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _sample(text: Tensor, settings: TrainSettings, generator: torch.Generator) -> Tensor:
    length = settings.model.context + 1
    starts = torch.randint(len(text) - length, (settings.batch,), generator=generator)
    index = starts[:, None] + torch.arange(length)
    return text[index.to(text.device)].long()


def _train_step(
    model: LanguageModel, optimizers: list[torch.optim.Optimizer], tokens: Tensor, settings: TrainSettings
) -> Tensor:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _save(folder: Path, model: LanguageModel, facts: dict[str, Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=PARTIAL))
    try:
        weights = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        (temporary / "model.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _load(folder: Path, settings: TrainSettings, device: str) -> Trained:
    model = LanguageModel(settings.model)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    return Trained(model.to(device).eval().requires_grad_(False), folder.name, facts)


#: Seconds between checkpoints: a kill loses at most this and one step.
SECONDS = 15.0


@dataclass(frozen=True)
class Run:
    """The state that changes from step to step. `losses` grows in place: one 0-d tensor a step."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    generator: torch.Generator
    losses: list[Tensor]

    def state(self) -> dict[str, Any]:
        """The state as tensors and plain values; one loss for each step."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "losses": torch.stack(self.losses) if self.losses else torch.empty(0),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; errors where it is another model's."""
        self.model.load_state_dict(state["model"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.losses[:] = state["losses"].unbind()


class Checkpoint:
    """The checkpoint file of one training run; without a path, none is written."""

    def __init__(self, path: Path | None = None, seconds: float = SECONDS) -> None:
        self.path, self.seconds = path, seconds
        self.written = time.monotonic()
        #: Steps of earlier processes.
        self.resumed = 0

    def resume(self, run: Run, device: str | torch.device) -> int:
        """Restore a run from its checkpoint; returns the number of its steps, 0 without a checkpoint.

        ValueError for a file that cannot be read.
        """
        if self.path is None or not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} cannot be read; delete it, and training starts again") from error
        state["losses"] = state["losses"].to(device)
        run.restore(state)
        self.resumed = len(run.losses)
        return self.resumed

    def reached(self, run: Run) -> None:
        """Called after a step: writes the file if the last time is `seconds` ago."""
        if self.path is not None and time.monotonic() - self.written >= self.seconds:
            self._write(self.path, run)
            self.written = time.monotonic()

    def done(self) -> None:
        """Delete the file: the run is over and its model is stored elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, path: Path, run: Run) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(run.state(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that multiplies in `dtype`: with torch.bfloat16 it takes the same steps, bit for bit.

    Arguments beside `dtype` are torch's; `state_dict` is as well. Parameters are matrices, real and dense; a parameter
    without a gradient stays as it is. `adjust_lr_fn` other than None or "original" raises ValueError.
    """

    def __init__(self, params: Iterable[Tensor], *, dtype: torch.dtype, **options: Any) -> None:
        if options.get("adjust_lr_fn") not in (None, "original"):
            raise ValueError(f"adjust_lr_fn is None or 'original'; got {options['adjust_lr_fn']!r}")
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; returns the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, momentum, rate = state["momentum_buffer"], group["momentum"], float(group["lr"])
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonal(
            update, group["ns_coefficients"], group["ns_steps"], eps=group["eps"], dtype=self.dtype
        )
        rows, columns = parameter.shape
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))


def orthogonal(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """The matrix x with singular values near 1, in `dtype`: `steps` times a x + (b g + c g g) x with g = x x^T.

    x is divided by its Frobenius norm first, at least `eps`. The iterations run along the shorter side. x is not modified.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.to(dtype, copy=True)
    y = y.T if tall else y
    y.div_(y.norm().clamp(min=eps))
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


#: Steps before the capture, in which libraries, kernels and optimizers allocate their state.
WARMUP = 3


class Steps:
    """Calls `step(batch) -> loss`; batches are of one shape and dtype. captured: whether by a CUDA graph."""

    def __init__(self, step: Callable[[Tensor], Tensor], *, captured: bool) -> None:
        self.step, self.captured = step, captured
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch = self.loss = torch.empty(0)

    def __call__(self, batch: Tensor) -> Tensor:
        """The loss of one more step, in new memory."""
        if not self.captured:
            return self.step(batch)
        self.taken += 1
        if self.taken <= WARMUP:
            return self._warm_up(batch)
        self.graph = self.graph or self._capture(batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone()

    def _warm_up(self, batch: Tensor) -> Tensor:
        """A step on a side stream, as capture requires of the steps before it."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            loss = self.step(batch)
        main.wait_stream(stream)
        return loss

    def _capture(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        self.batch, graph = batch.clone(), torch.cuda.CUDAGraph()
        with recorded(graph):
            self.loss = self.step(self.batch)
        return graph
