"""The part of experiment `decode` on real models: `ao-lab reproduce decode --model DIR`.

The model is the folder's own checkpoint in bfloat16, and a copy of it in every configuration that experiment `decode` serves
(torchao's where there is a GPU, or by name), or those that `--only` names, a scheme among them. Every linear layer is
quantized but a head that is tied to the embedding. Prompts are windows of a text, so that tokens and logits are those of a
model at work. At each batch generate transformers' `generate()` as it is called, and a lean loop of our own
(`OwnLoop`). Both are called once, and then timed in turn with the dense model's, ROUNDS times: medians, and of the rounds'
ratios also the ends, which say how far a speedup can be trusted. Time to the first token is that of the loop and of
`generate()` for one token.

Peak memory is the model as it is in memory, and the most that tensors of generating took beside it (`most_allocated`).

That loop is greedy, one cache of fixed length, the model's own forward, nothing that looks at a token on the host. On a
GPU the step is captured in a CUDA graph, so that the host only launches; a model with sliding windows that are shorter than
the text decides on the host what its cache does, and is not captured. Nothing is compiled, so that a step has the bits of the
model's own forward.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.cli.terminal import say
from ao_lab.config.base import SchemeConfig
from ao_lab.install.extras import needed
from ao_lab.install.versions import cache_argument
from ao_lab.measure.memory import by_transformers, held_bytes, most_allocated, synchronize
from ao_lab.measure.turns import recorded, timed_threads, with_threads
from ao_lab.quantization.groups import told_elsewhere
from experiments.decode.configs import (
    BASE,
    CONFIGS,
    OURS,
    PLAIN_TENSORS,
    Config,
    chosen,
    missing,
    stored_bytes,
)
from experiments.harness.measuring import Deadline, Values, attempt
from experiments.harness.revision import TORCHAO
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import REAL, Bench, RealModel, Undivided, linears, sizes
from experiments.models.llama import COMPILED_LIMIT, relative_change
from experiments.models.quantized_model import activation_scheme
from experiments.models.serving import as_loaded, recorded_threads
from experiments.runs.real_models import Place, Tables, bench_of, by_data, facts, run_models
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

#: Steps before a capture, in which kernels and libraries allocate what they need.
WARMUP = 3


class OwnLoop:
    """Greedy generation of `new` tokens after a prompt, token ids (batch, length), on the model's device."""

    def __init__(self, model: nn.Module, prompt: Tensor, new: int) -> None:
        self.model: Any = model
        self.prompt, self.new = prompt, new
        self.length = prompt.shape[1] + new
        self.cache = needed("transformers").StaticCache(config=self.model.config, max_cache_len=self.length)
        self.held = {cache_argument(model): self.cache}
        self.token = torch.zeros_like(prompt[:, :1])
        #: Whether a step is replayed from a CUDA graph.
        self.captured = False
        self.replay: Callable[[], Tensor] = self.step

    @property
    def capturable(self) -> bool:
        """Whether a step is the same launches at every position."""
        layers = self.cache.layers
        short = any(layer.is_sliding and layer.max_cache_len < self.length for layer in layers)
        return bool(self.prompt.is_cuda) and not short

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Read the prompt into an empty cache; logits of its last token (batch, vocabulary), and the next token in `token`."""
        if all(layer.is_initialized for layer in self.cache.layers):
            self.cache.reset()
        return self._forward(self.prompt)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Logits (batch, vocabulary) of one more token, which is in `token` afterwards."""
        return self._forward(self.token)

    def _forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids, **self.held, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def prepare(self) -> None:
        """Warm up, and capture the step where it can be; where a model waits for the GPU in it, that is said, and it is not."""
        self.prefill()
        if not self.capturable:
            self.step()
            return
        try:
            self._capture()
        except RuntimeError as error:
            say(f"a step of {type(self.model).__name__} is not captured in a CUDA graph: {error}")

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(WARMUP, self.new - 1)):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.prefill()
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            logits = self.step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self.replay, self.captured = replay, True

    @torch.no_grad()
    def generate(self) -> tuple[float, float, Tensor]:
        """Seconds to the first token, seconds of the other tokens together, and all new tokens (batch, new)."""
        synchronize(self.prompt.device)
        started = time.perf_counter()
        self.prefill()
        synchronize(self.prompt.device)
        first = time.perf_counter()
        tokens = [self.token.clone()]
        for _ in range(self.new - 1):
            self.replay()
            tokens.append(self.token.clone())
        synchronize(self.prompt.device)
        return first - started, time.perf_counter() - first, torch.cat(tokens, 1)


EXPERIMENT = "decode"
#: Texts at once, tokens of the prompt, new tokens, and timed calls, by scale.
BATCHES = {"quick": (1, 4), "full": (1, 8, 32)}
PROMPT = {"quick": 16, "full": 128}
NEW = {"quick": 8, "full": 32}
#: Timed calls of each, in turn with the dense model.
ROUNDS = 3
#: New tokens, at most, of the calls that find how many threads of a CPU all models are timed with.
WARM = 4
#: Metrics of speeds over the dense model in turn: the median of the rounds' ratios and its ends, of both loops.
OVER_OWN, OVER_LIBRARY = "speedup of the own loop", "speedup of generate()"
LOWEST, HIGHEST = ", lowest", ", highest"
#: The dense model's rates in the same rounds.
DENSE_OWN, DENSE_LIBRARY = "tokens/s, own loop, bfloat16 in turn", "tokens/s, generate(), bfloat16 in turn"


@dataclass(frozen=True)
class Here:
    """One model with its prompts (batch, length) by batch, and the dense model's logits of the first."""

    settings: Settings
    bench: Bench
    prompts: dict[int, Tensor]
    logits: Tensor
    #: The dense model's own loops by batch, as they are needed.
    loops: dict[int, OwnLoop] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, model: RealModel) -> Here:
        """Load a model; its prompts are the beginnings of the windows of its first text."""
        bench = bench_of(settings, model)
        ids = bench.windows[0].ids[:, : PROMPT[settings.scale]].to(settings.device)
        rows = torch.arange(max(BATCHES[settings.scale])) % len(ids)
        prompts = {batch: ids[rows[:batch]] for batch in BATCHES[settings.scale]}
        return cls(settings, bench, prompts, last_logits(bench.base, ids[:1]))

    def dense_loop(self, batch: int) -> OwnLoop:
        """The dense model's own loop at a batch, warm."""
        if batch not in self.loops:
            self.loops[batch] = warm_loop(self.bench.base, self.prompts[batch], NEW[self.settings.scale])
        return self.loops[batch]


@torch.no_grad()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of the last token (batch, vocabulary), float32."""
    found: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return found


def check_parts(names: Sequence[str]) -> None:
    """ValueError for names that are neither configurations nor schemes."""
    for name in names:
        try:
            chosen((name,))
        except ValueError as error:
            try:
                activation_scheme(name)
            except ValueError:
                raise error from None


def configs_of(settings: Settings) -> list[Config]:
    """What is measured, the dense model first."""
    if not settings.only:
        libraries = (OURS, TORCHAO) if settings.device == "cuda" else (OURS,)
        return [BASE, *(one for one in CONFIGS if one.setting in libraries and one.always)]
    found: list[Config] = []
    for name in settings.only:
        try:
            found += [one for one in chosen((name,)) if one.build is not None]
        except ValueError:
            found.append(Config(setting=OURS, method=name, build=partial(SchemeConfig, scheme=name)))
    return [BASE, *dict.fromkeys(found)]


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all models that were asked for; rows in the journal are not measured again."""
    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, measure_model))


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""

    def load() -> tuple[Values, Callable[[Config], dict[str, Values]]]:
        here = Here.of(settings, model)
        return facts(here.bench), partial(measure, here)

    tasks = {Place(one.setting, one.method, settings.seed): one for one in configs_of(settings)}
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    return tables.measure(f"generating, {model.name}", tasks, load, missing)


def measure(here: Here, config: Config) -> dict[str, Values]:
    """Values of a configuration by the data of their tables: each batch, and the model."""

    def work(found: dict[str, Values]) -> Values:
        started = time.perf_counter()
        model = here.bench.base if config.build is None else quantized(here, config)
        values = {**sizes_of(model), "time to quantize": (time.perf_counter() - started, "s")}
        # What a scheme does to a trained model's predictions is told, and judged by the experiments of quality.
        logits = last_logits(model, here.prompts[1])
        values["logits, change"] = relative_change(logits, here.logits, float("inf"), "from bfloat16's")
        peaks = []
        for batch in here.prompts:
            with as_loaded(here.bench.base, model):
                of_batch = attempt(partial(generation, here, model, batch))
            found[data_of(batch)] = of_batch
            peaks += [of_batch["memory of generating"][0]] if "memory of generating" in of_batch else []
        if peaks:
            values["peak memory"] = (held_bytes(model) + max(peaks), "byte")
        return values

    return by_data(work)


def data_of(batch: int) -> str:
    """The data of a batch's table."""
    return f"batch {batch}"


def sizes_of(model: nn.Module) -> Values:
    """`sizes`, where weights are ours or plain; those of another library by the tensors inside."""
    layers = [layer.weight for layer in linears(model).values()]
    if all(type(weight).__module__.partition(".")[0] != TORCHAO for weight in layers):
        return sizes(model)
    return {"size": (sum(stored_bytes(one) for one in model.parameters()), "byte")}


def quantized(here: Here, config: Config) -> nn.Module:
    """A quantized copy of the model; Undivided where a layer stays dense."""
    model = copy.deepcopy(here.bench.base)
    layers = linears(model)
    ours = {id(layer) for layer in layers.values()}
    with told_elsewhere():  # by Undivided
        config.quantize(model, lambda module, name="": id(module) in ours)
    dense = [name for name, layer in layers.items() if type(layer.weight) in PLAIN_TENSORS]
    if dense:
        raise Undivided(
            f"{config.method} leaves {len(dense)} of {len(layers)} layers dense, {dense[0]} first"
        )
    return model


def warm_loop(model: nn.Module, prompt: Tensor, new: int) -> OwnLoop:
    """A loop after its first calls; Wrong where a captured step, or the cache, gives other logits than the model."""
    loop = OwnLoop(model, prompt, new)
    expected = loop.prefill().float()
    loop.prepare()
    loop.prefill()
    plain = loop.step().float()
    loop.prefill()
    # A captured step has to be the step.
    relative_change(loop.replay().float(), plain, COMPILED_LIMIT, "by the captured step")
    relative_change(expected, last_logits(model, prompt), COMPILED_LIMIT, "by the cache of fixed length")
    return loop


def generation(here: Here, model: nn.Module, batch: int) -> Values:
    """Rates and times of both loops at one batch, in turn with the dense model's, and what tensors take beside the model."""
    prompt, new = here.prompts[batch], NEW[here.settings.scale]
    base, dense = here.bench.base, here.dense_loop(batch)
    loop = dense if model is base else warm_loop(model, prompt, new)
    both = [(base, dense)] if model is base else [(base, dense), (model, loop)]
    for one, mine in both:
        _, _, tokens = mine.generate()
        _, theirs = by_transformers(one, prompt, new)
    threads = timed_threads(prompt.device, lambda: by_transformers(base, prompt, min(new, WARM)))
    with with_threads(threads):
        over = most_allocated(prompt.device, loop.generate)
        rounds = [[round_of(one, mine, prompt, new) for one, mine in both] for _ in range(ROUNDS)]
    firsts, rests, wholes, first_wholes = (median(one[-1][at] for one in rounds) for at in range(4))
    found: Values = {
        "tokens/s, generate()": (batch * new / wholes, "tokens/s"),
        "tokens/s, own loop": (batch * (new - 1) / rests, "tokens/s"),
        "time to first token, generate()": (first_wholes, "s"),
        "time to first token, own loop": (firsts, "s"),
        "own loop in a CUDA graph": (float(loop.captured), ""),
        "tokens of the prompt": (prompt.shape[1], ""),
        "new tokens": (new, ""),
        "same tokens": (100 * float((tokens == theirs).float().mean()), "%"),
        **recorded_threads(threads),
    }
    if model is not base:
        found |= speedups(OVER_OWN, [(one[0][1], one[1][1]) for one in rounds])
        found |= speedups(OVER_LIBRARY, [(one[0][2], one[1][2]) for one in rounds])
        found[DENSE_OWN] = (batch * (new - 1) / median(one[0][1] for one in rounds), "tokens/s")
        found[DENSE_LIBRARY] = (batch * new / median(one[0][2] for one in rounds), "tokens/s")
    return found if over is None else {**found, "memory of generating": (over, "byte")}


def round_of(model: nn.Module, loop: OwnLoop, prompt: Tensor, new: int) -> tuple[float, float, float, float]:
    """Seconds of one call of each: the loop to its first token, its other tokens, generate(), generate() for one token."""
    first, rest, _ = loop.generate()
    return first, rest, by_transformers(model, prompt, new)[0], by_transformers(model, prompt, 1)[0]


def speedups(name: str, rounds: Sequence[tuple[float, float]]) -> Values:
    """The median of the rounds' ratios, dense over quantized, and its ends."""
    ratios = [dense / seconds for dense, seconds in rounds]
    return {
        name: (median(ratios), "ratio"),
        f"{name}{LOWEST}": (min(ratios), "ratio"),
        f"{name}{HIGHEST}": (max(ratios), "ratio"),
    }
