"""`benchmark`: times of linear layers and of generate(), quantized beside unquantized, timed in turn.

Layers have random weights (of a quantized model: its own), and rotate over copies that together exceed three times a GPU's L2.
Modes of layers: "eager", as Python calls them, and on GPUs "CUDA graph", launched from a recorded graph as compiled models
launch them. Modes of generate(): "eager", and on GPUs "compiled", after `prepare_for_generate_`.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.compile.generation import prepare_for_generate_
from ao_lab.install.extras import WrongInput
from ao_lab.install.revision import versions_of
from ao_lab.install.versions import __version__
from ao_lab.measure.asked import LIBRARIES, PROMPT
from ao_lab.measure.compare import WARM, host, reason, refused
from ao_lab.measure.configurations import USUAL, Given, configurations
from ao_lab.measure.evaluate import fingerprint, in_memory, name_of
from ao_lab.measure.folders import (
    check_folder,
    check_generates,
    check_language_model,
    device_of,
    evaluating,
    on_device,
)
from ao_lab.measure.memory import by_transformers
from ao_lab.measure.times import (
    ALONE,
    DRIFT,
    FAILED,
    OK,
    SPREAD,
    Benchmark,
    KeptTimes,
    Timed,
    crowded,
    dated,
    doubt_of,
    drifted,
    load_of_host,
)
from ao_lab.measure.turns import (
    AGAIN,
    Plan,
    Span,
    Uncaptured,
    Watch,
    cache_bytes,
    input_sets,
    interleaved,
    prepare,
    slow_threads,
    summary,
    timed_threads,
    watch_of,
    with_threads,
)
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.groups import told_elsewhere
from ao_lab.quantization.report import explain
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import is_linear, is_transposed, tied_layers

#: Called with what is under way, and how much is done of how much.
Progress = Callable[[str, int, int], None]
#: (tokens, outputs, inputs) of a product.
Shape = tuple[int, int, int]
Build = Callable[[nn.Module], object]
#: The name of a model that is quantized already.
STORED = "as stored"
EAGER, GRAPH, COMPILED = "eager", "CUDA graph", "compiled"
#: Rounds of layers; the least that a span of calls lasts, and all rounds of a shape.
PLAN = Plan(rounds=20, warmup=1, seconds=1.0, fewest=5, span=300e-6)
#: Copies of a layer at most.
COPIES = 8
#: Calls of generate() that are timed, and calls before them that warm up; compiled ones take two, of which one records.
ROUNDS, WARMUP = 3, {EAGER: 1, COMPILED: 2}
#: Rows of what is not quantized, and the time of its first call once more, have these names.
TAKEN = ("bfloat16", "float16", "float32", "float64", AGAIN)


def _silent(what: str, done: int, total: int) -> None:
    """Says nothing."""


@dataclass
class Parts:
    """How far a benchmark is, in parts of about the same length: the layers of a shape, and a round of generate().

    generate() comes first, and of it the largest batch: what is left is forecast from parts that are among the longest.
    """

    progress: Progress = _silent
    total: int = 0
    done: int = 0

    def say(self, what: str) -> None:
        """What is under way."""
        self.progress(what, self.done, self.total)

    def finish(self, until: int) -> None:
        """So many parts are behind; of what failed early those that it did not take are no work that was done."""
        self.total -= until - self.done
        self.say("")


def benchmark(
    model: str | Path | nn.Module | None = None,
    *,
    shapes: Sequence[Sequence[int]] = (),
    configs: Sequence[Given] | Mapping[str, Given] | None = None,
    batch: Sequence[int] = (1, 16),
    new_tokens: int = 16,
    rounds: int | None = None,
    compiled: bool | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    progress: Progress = _silent,
) -> Benchmark:
    """Times of the linear layers of a model, or of shapes, and of the model's generate(), beside what is not quantized.

    That is the model in its own dtype; layers of shapes alone are in bfloat16.

    model: a folder of transformers or a model in memory, dense, or quantized already (ours, compressed-tensors, torchao):
    then it is timed as it is beside its dequantized copy, and there are no `configs`. shapes: products (tokens, outputs,
    inputs), with or without a model. configs: as for `compare`, without folders; None: seven usual ones. batch: tokens of the
    layers' inputs, and sequences of generate(). new_tokens: of generate(); 0 leaves it out. rounds: timed calls of
    generate(), after one that warms up (two, compiled); None: 3. compiled: whether generate() is timed compiled too, which
    takes a GPU; None: where there is one. out: a folder for benchmark.json, after each shape and each generate(), so that the
    same call goes on where one was stopped. progress: called with a name, parts done, and of how many.

    Times are medians over rounds in which all take turns, with 20% and 80% quantiles. What cannot be applied or run has the
    status "failed" and a reason. A speedup that cannot be trusted says why (`Timed.doubt`). Layers that all threads of a CPU
    take more than twice as long for as one thread are timed with one ("eager, 1 thread"), and generate() of all models where
    they do so for the dense one. Memory: two dense models and a quantized one, three where generate() is compiled.

    ValueError for neither a model nor shapes, numbers that are none, unknown configurations with the nearest names, configs
    beside a quantized model, and `compiled` without a GPU; TypeError for what is no model.
    """
    where = device_of(device, model)
    products = [shape_of(one) for one in shapes]
    check_numbers(model, products, batch, new_tokens, compiled, where, rounds)
    wanted = configurations(USUAL if configs is None else configs)
    if folders := [name for name, one in wanted.items() if isinstance(one, Path)]:
        raise WrongInput(f"{folders[0]} is a folder; give it as the model, and no configurations")
    if names := [name for name in wanted if name in TAKEN]:
        raise WrongInput(f"{names[0]!r} is the name of a row of its own; give the configuration another name")
    ready = None if model is None else in_memory(model, where)
    stored = ready is not None and is_quantized(ready)
    if stored and configs is not None:
        raise WrongInput(
            f"{name_of(model or '')} is quantized already and is timed as it is; leave the configurations out"
        )
    dtype = torch.bfloat16 if ready is None else dtype_of(ready)
    conditions = {
        **state_of(where),
        "prompt_tokens": PROMPT,
        "new_tokens": new_tokens,
        "rounds": rounds or ROUNDS,
        "weights": None if model is None or out is None else fingerprint(model),
        "configurations": {} if stored else {name: repr(one) for name, one in wanted.items()},
        "versions": {"ao_lab": __version__, **versions_of(LIBRARIES)},
    }
    kept = KeptTimes.of(None if model is None else name_of(model), conditions, out)
    makers: dict[str, Build] = {name: partial(_quantize, config=one) for name, one in wanted.items()}
    work = Work(where, makers, dtype, kept=kept, rounds=rounds or ROUNDS)
    with on_device(where), nullcontext() if ready is None else evaluating(ready):
        rows = work.run(ready, stored, products, list(batch), new_tokens, compiled, progress)
    return Benchmark(kept.model, tuple(drifted(rows)), {**conditions, "load": kept.conditions["load"]})


def state_of(device: str) -> dict[str, Any]:
    """Device and processor by name, and of the host the threads that compute, its cores, and the load of the last minute."""
    return {
        **host(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "cores": os.cpu_count(),
        "load": load_of_host(),
    }


def _quantize(module: nn.Module, config: Any) -> None:
    with told_elsewhere():
        quantize_(module, config)


def shape_of(given: Sequence[int]) -> Shape:
    """(tokens, outputs, inputs); ValueError for other than three positive integers."""
    if len(given) != 3 or any(type(one) is not int or one < 1 for one in given):
        raise WrongInput(
            f"a shape is M,N,K: tokens, outputs and inputs of a layer, such as 16,4096,4096; got {given!r}"
        )
    tokens, outputs, inputs = given
    return tokens, outputs, inputs


def check_numbers(
    model: str | Path | nn.Module | None,
    products: Sequence[Shape],
    batch: Sequence[int],
    new_tokens: int,
    compiled: bool | None,
    device: str,
    rounds: int | None = None,
) -> None:
    """WrongInput for what would only be found after a model is loaded."""
    if model is None and not products:
        raise WrongInput("give a model (--model DIR) or shapes (--shape M,N,K), or both")
    if not batch or any(type(one) is not int or one < 1 for one in batch) or new_tokens < 0:
        raise WrongInput(
            f"--batch is 1 or more and --new-tokens 0 or more, got {list(batch)} and {new_tokens}"
        )
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise WrongInput(f"--rounds is 1 or more, got {rounds!r}")
    if compiled and not device.startswith("cuda"):
        raise WrongInput(
            "--compiled: transformers compiles generate() on GPUs alone; use --device cuda, or leave it out"
        )
    if model is not None:
        name_of(model)
    if isinstance(model, (str, Path)):
        check_folder(Path(model))
    if model is not None and new_tokens:
        check_generates(model, PROMPT + new_tokens)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized weights."""
    return any(isinstance(one, QuantizedTensor) for one in model.parameters())


def dense_copy(model: nn.Module) -> nn.Module:
    """A copy with every quantized weight dequantized."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantizedTensor):
                dense = parameter.dequantize()
                setattr(module, name, nn.Parameter(dense, requires_grad=False))
    return made


def layers_of(model: nn.Module) -> dict[tuple[int, int], list[nn.Module]]:
    """Linear layers by (outputs, inputs); without a head tied to the embedding, which `ao-lab quantize` leaves dense."""
    found: dict[tuple[int, int], list[nn.Module]] = {}
    tied = tied_layers(model)
    for name, module in model.named_modules():
        if is_linear(module) and name not in tied:
            shape: Any = tuple(module.weight.shape)
            found.setdefault(shape[::-1] if is_transposed(module) else shape, []).append(module)
    return found


def example_of(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """The first quantized layer of nn.Linear."""
    own = (one for one in layers if isinstance(one, nn.Linear) and isinstance(one.weight, QuantizedTensor))
    return next(own, None)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that a model computes in: that of its first parameter of floats."""
    return next((one.dtype for one in model.parameters() if one.dtype.is_floating_point), torch.bfloat16)


def name_of_dtype(dtype: torch.dtype) -> str:
    """ "bfloat16", for instance."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Work:
    """Where things are timed, what makes a module quantized, by name, and threads of generate(), by batch."""

    device: str
    makers: dict[str, Build]
    dtype: torch.dtype = torch.bfloat16
    rows: list[Timed] = field(default_factory=list)
    kept: KeptTimes = field(default_factory=lambda: KeptTimes(None, {}))
    rounds: int | None = None
    parts: Parts = field(default_factory=Parts)
    threads: dict[int, int | None] = field(default_factory=dict)

    def run(
        self,
        model: nn.Module | None,
        stored: bool,
        products: Sequence[Shape],
        batch: Sequence[int],
        new_tokens: int,
        compiled: bool | None,
        progress: Progress,
    ) -> list[Timed]:
        """generate(), the largest batch first, then layers of all shapes; rows of layers come first."""
        own = {} if model is None else layers_of(model)
        examples = {shape: example_of(layers) for shape, layers in own.items()} if stored else {}
        own = {shape: layers for shape, layers in own.items() if not stored or examples[shape] is not None}
        counts = Counter({(tokens, *shape): len(layers) for shape, layers in own.items() for tokens in batch})
        shapes = list(dict.fromkeys([*counts, *products]))
        runs = [(size, mode) for mode in self.modes(compiled) for size in batch]
        runs = runs if model is not None and new_tokens > 0 else []
        self.parts = Parts(progress, self.to_time(shapes, examples, runs))
        self.parts.say("")
        generated = dict[tuple[int, str], list[Timed]]()
        if model is not None and runs:
            dense = dense_copy(model) if stored else model
            for size, mode in sorted(runs, reverse=True):
                kept = model if stored else None
                generated[size, mode] = self.generation(dense, kept, size, new_tokens, mode)
        for shape in shapes:
            self.rows += self.kept_layers(shape, counts[shape], examples.get(shape[1:]))
        self.rows += [row for run in runs for row in generated[run]]
        progress("", self.parts.total, self.parts.total)
        return self.rows

    def to_time(
        self, shapes: Sequence[Shape], examples: Mapping[Any, Any], runs: Sequence[tuple[int, str]]
    ) -> int:
        """How many parts there are that no earlier call has kept."""
        names = [STORED] if examples else list(self.makers)
        base = name_of_dtype(self.dtype)
        layers = sum(not self.kept.layer(shape, [base, *names]) for shape in shapes)
        calls = (
            self.calls_of(mode)
            for size, mode in runs
            for one in names
            if not self.kept.generated(size, mode, one)
        )
        return layers + sum(calls)

    def calls_of(self, mode: str) -> int:
        """Calls of generate() of each model, those that warm up among them."""
        return WARMUP[mode] + (self.rounds or ROUNDS)

    def modes(self, compiled: bool | None) -> tuple[str, ...]:
        """How generate() runs."""
        wanted = self.device.startswith("cuda") if compiled is None else compiled
        return (EAGER, COMPILED) if wanted else (EAGER,)

    def kept_layers(self, shape: Shape, count: int, example: nn.Linear | None) -> list[Timed]:
        """Times of a layer of a shape: those that were measured before, or measured now and kept."""
        names = [name_of_dtype(self.dtype), *([STORED] if example is not None else self.makers)]
        found = self.kept.layer(shape, names)
        if not found:
            self.parts.say("x".join(map(str, shape)))
            found = self.kept.measured(self.layers(shape, count, example))
            self.parts.done += 1
        return found

    @torch.no_grad()
    def layers(self, shape: Shape, count: int, example: nn.Linear | None) -> list[Timed]:
        """Times of a layer of a shape, by configuration and mode. example: of a quantized model, its own layer."""
        watch = watch_of("cuda" if self.device.startswith("cuda") else "cpu")
        spans: dict[str, Span] = {}
        kernels: dict[str, str] = {}
        failed, uncaptured = list[Timed](), set[str]()
        others: dict[str, Build | None] = {STORED: None} if example is not None else dict(self.makers)
        makers: dict[str, Build | None] = {name_of_dtype(self.dtype): None, **others}
        for name, maker in makers.items():
            try:
                layer = example if name == STORED and example is not None else self.layer(shape, maker)
                calls, kernels[name] = self.calls(layer, shape), kernel_of(layer, shape[0])
                spans[name], why = span_of(watch, calls)
            except Exception as error:
                if not refused(error):
                    raise
                failed.append(
                    Timed("linear", name, EAGER, shape, layers=count, status=FAILED, reason=reason(error))
                )
                continue
            if why:
                uncaptured.add(name)
                told: dict[str, Any] = {
                    "kernel": kernels[name],
                    "layers": count,
                    "status": FAILED,
                    "reason": why,
                }
                failed.append(Timed("linear", name, GRAPH, shape, **told))
        rows: list[Timed] = []
        if next(iter(makers)) not in spans:  # nothing to compare with
            return failed
        for mode in (EAGER, GRAPH) if self.device.startswith("cuda") else (EAGER,):
            graph = mode == GRAPH
            timable = {name: span for name, span in spans.items() if not (graph and name in uncaptured)}
            times = interleaved(watch, timable, PLAN, graph=graph)
            if not self.device.startswith("cuda") and slow_threads(watch, spans, times):
                mode = ALONE
                with with_threads(1):
                    times = interleaved(watch, timable, PLAN, graph=graph)
            repeated, base = times.pop(AGAIN), next(iter(times))
            doubts = {base: drift_of(times[base], repeated)}
            rows += timed("linear", times, mode, shape, count, kernels, doubts)
        return [*rows, *failed]

    def layer(self, shape: Shape, maker: Build | None) -> nn.Linear:
        """A layer of random weights, made by a configuration."""
        _, outputs, inputs = shape
        layer = nn.Linear(inputs, outputs, bias=False, device=self.device, dtype=self.dtype).requires_grad_(
            False
        )
        layer.weight.normal_(std=inputs**-0.5)
        if maker is not None:
            maker(nn.Sequential(layer))
        return layer

    def calls(self, layer: nn.Linear, shape: Shape) -> list[Callable[[], Any]]:
        """Calls of copies of a layer on inputs of their own: as many as exceed a GPU's cache; one on a CPU."""
        tokens, outputs, inputs = shape
        moved = float(layer.weight.nbytes + 2 * tokens * (outputs + inputs))
        copies = input_sets(moved, cache_bytes(), COPIES) if self.device.startswith("cuda") else 1
        layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
        dtype = layer.weight.dtype
        return [partial(one, torch.randn(tokens, inputs, device=self.device, dtype=dtype)) for one in layers]

    @torch.no_grad()
    def generation(
        self,
        dense: nn.Module,
        stored: nn.Module | None,
        batch: int,
        new_tokens: int,
        mode: str,
    ) -> list[Timed]:
        """Times of a token of generate(), by configuration, each in turn with the dense model."""
        check_language_model(dense, "the model")
        rows: list[Timed] = []
        base = name_of_dtype(self.dtype)
        makers: dict[str, Build | None] = {STORED: None} if stored is not None else dict(self.makers)
        for name, maker in makers.items():
            if before := self.kept.generated(batch, mode, name):
                told_of_base = any(one.name == base for one in rows)
                bases = [] if told_of_base else self.kept.generated(batch, mode, base)
                rows += [*bases, *before]
                continue
            what = f"generate(), batch {batch}, {mode}, {name}"
            self.parts.say(what)
            behind = self.parts.done + self.calls_of(mode)
            try:
                pair = {base: dense, name: copy.deepcopy(dense) if stored is None else stored}
                if maker is not None:
                    maker(pair[name])
                if mode == COMPILED:
                    pair = prepared(pair, dense, stored)
                threads = self.threads_of(dense, batch, new_tokens)
                with with_threads(threads):
                    times = self.in_turn(pair, batch, new_tokens, mode, what)
                shown = ALONE if threads == 1 < torch.get_num_threads() else mode
                busy = crowded(load_of_host(), os.cpu_count())
                found = timed("generate", times, shown, (batch,), 0, {}, {name: busy})
                new = [row for row in found if row.name != base or not any(one.name == base for one in rows)]
                rows += self.kept.measured(new)
            except Exception as error:
                if not refused(error):
                    raise
                rows += dated([Timed("generate", name, mode, (batch,), status=FAILED, reason=reason(error))])
                self.parts.finish(behind)
            finally:
                pair = {}
                if self.device.startswith("cuda"):
                    torch.cuda.empty_cache()
        return rows

    def threads_of(self, dense: nn.Module, batch: int, new: int) -> int | None:
        """Threads of a CPU that generate() of all models is timed with: of rows kept before, or found by the dense one."""
        if batch not in self.threads:
            alone = self.kept.generated_alone(batch)
            call = partial(
                by_transformers, dense, self.prompt(dense, batch), min(new, WARM), disable_compile=True
            )
            found = (
                timed_threads(self.device, call) if alone is None else 1 if alone else torch.get_num_threads()
            )
            self.threads[batch] = found
        return self.threads[batch]

    def prompt(self, model: Any, batch: int) -> torch.Tensor:
        """Random token ids, (batch, PROMPT) int64, the same in every call."""
        random = torch.Generator().manual_seed(0)
        count = model.get_input_embeddings().weight.shape[0]
        return torch.randint(count, (batch, PROMPT), generator=random).to(self.device)

    def in_turn(
        self,
        models: Mapping[str, Any],
        batch: int,
        new: int,
        mode: str,
        what: str = "",
    ) -> dict[str, list[float]]:
        """Seconds of a new token by each model, round by round, after calls that warm up and compile."""
        prompt = self.prompt(next(iter(models.values())), batch)
        options = {"disable_compile": True} if mode == EAGER else {}
        times: dict[str, list[float]] = {name: [] for name in models}
        rounds = self.calls_of(mode)
        with several_compiled() if mode == COMPILED else nullcontext():
            for number in range(rounds):
                self.parts.say(f"{what}, call {number + 1} of {rounds}")
                for name, model in models.items():
                    seconds = by_transformers(model, prompt, new, **options)[0]
                    if number >= WARMUP[mode]:
                        times[name].append(seconds / new)
                self.parts.done += 1
        return times


def prepared(pair: Mapping[str, nn.Module], *kept: nn.Module | None) -> dict[str, nn.Module]:
    """Models that generate() compiles, with our options. kept: models that stay as they are; copies of them are prepared."""
    made = {
        name: copy.deepcopy(one) if any(one is other for other in kept) else one for name, one in pair.items()
    }
    for one in made.values():
        prepare_for_generate_(one)
    return made


def several_compiled() -> Any:
    """Models are not compiled for any size since another's sizes differ, and not refused for their number."""
    torch.compiler.reset()
    return torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False)


def timed(
    what: str,
    times: Mapping[str, Sequence[float]],
    mode: str,
    shape: tuple[int, ...],
    count: int,
    kernels: Mapping[str, str],
    doubts: Mapping[str, str] | None = None,
) -> list[Timed]:
    """Rows of times; the first name is what the others' speedup is over, round by round. doubts: what is wrong with the times
    of a name; that of the first is of all."""
    first, base = next(iter(times.items()), ("", []))
    known, rows = doubts or {}, []
    for name, one in times.items():
        found, over = summary(one), summary([b / a for a, b in zip(one, base, strict=True)])
        baseline = summary(base).median
        doubt = (
            known.get(first)
            or known.get(name)
            or doubt_of(found.median, baseline, over.low, over.high) * (name != first)
        )
        values = (found.median, found.low, found.high, baseline, over.median, over.low, over.high)
        rows.append(Timed(what, name, mode, shape, *values, kernels.get(name, ""), count, doubt or "", OK))
    return rows


def drift_of(times: Sequence[float], again: Sequence[float]) -> str:
    """What is wrong with a baseline that takes another time at the end of a round than at its beginning; "" for nothing."""
    ratio = summary([b / a for a, b in zip(times, again, strict=True)]).median
    if 1 / SPREAD <= ratio <= SPREAD:
        return ""
    return f"{DRIFT}, took {ratio:.2f} of its first time"


def span_of(watch: Watch, calls: Sequence[Callable[[], Any]]) -> tuple[Span, str]:
    """A span of calls, and why it has no CUDA graph: "" where it has."""
    try:
        return prepare(watch, calls, PLAN), ""
    except RuntimeError as error:
        # What torch and CUDA say of a call that a recording does not allow.
        if "captur" not in str(error).lower():
            raise
        why = f"no CUDA graph holds it: {reason(error)}"
    watch.sync()
    return prepare(Uncaptured(watch), calls, PLAN), why


#: What `explain` calls a kernel that multiplies few tokens; the dequantized weight multiplies more.
UP_TO = re.compile(r"(.+), up to (\d+) tokens?")


def kernel_of(layer: nn.Linear, tokens: int) -> str:
    """What multiplies so many tokens by a layer's weight, as `explain` says it; "" of a dense one."""
    if not isinstance(layer.weight, QuantizedTensor):
        return ""
    found = next(iter(explain(nn.Sequential(layer)).layers), None)
    if found is None:
        return ""
    ranges = (one.name for one in found.families if one.first <= tokens <= (one.last or tokens))
    if limit := UP_TO.fullmatch(found.kernel):
        return next(ranges, limit[1] if tokens <= int(limit[2]) else "dequantize")
    return next(ranges, found.kernel)


__all__ = ["benchmark"]
