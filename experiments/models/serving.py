"""What a model does beside predicting a text: speed and memory of generating, and tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ao_lab.cli.terminal import say
from ao_lab.eval import Harness, HarnessOptions, harness_results, prepared
from ao_lab.measure.memory import by_transformers, held_bytes, most_allocated
from ao_lab.measure.turns import timed_threads, with_threads
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.harness.measuring import Values

#: Tokens of the prompt.
SHORT = 16
#: Tokens of the call before the timed ones: the prompt's step and one of a single token, as all later ones are.
WARM = 2
#: Models that were called before they were timed: the dense one of all lines is called so once.
WARMED: WeakSet[nn.Module] = WeakSet()
#: Timed calls of each model.
ROUNDS = 3
#: Metrics beside "tokens/s" of a model that was timed in turn with the dense one.
DENSE, SPEEDUP = "tokens/s of the dense model in turn", "speedup of generate()"
LEAST, LARGEST = f"{SPEEDUP}, lowest", f"{SPEEDUP}, highest"
#: New tokens of each timed call.
TOKENS = "new tokens of generate()"
#: With how many threads of a CPU speeds were timed.
THREADS = "threads"
#: The most that tensors of generate() took beside the weights, and that with the weights as they are in memory.
OVER, PEAK = "memory of generating, over the weights", "peak memory"
#: Examples of a task of lm-evaluation-harness (None: all), by scale.
EXAMPLES = {"quick": 20, "full": None}


@contextmanager
def as_loaded(*models: nn.Module) -> Iterator[None]:
    """Unquantized parameters want gradients inside, as in models that transformers has just loaded: on a CPU torch copies a
    frozen head before each matmul, which takes memory and time that users' models do not take."""
    frozen = {
        id(one): one
        for model in models
        for one in model.parameters()
        if not one.requires_grad and one.is_floating_point() and not isinstance(one, QuantizedTensor)
    }
    for one in frozen.values():
        one.requires_grad_(True)
    try:
        yield
    finally:
        for one in frozen.values():
            one.requires_grad_(False)


def generation(model: nn.Module, prompt: Tensor, new: int, base: nn.Module) -> Values:
    """transformers' `generate()` as it is called, greedy, not compiled, batch 1: tokens a second beside the dense model's, and
    peak memory: the weights as they are in memory, and what tensors took beside them (`most_allocated`), as `ao-lab compare`
    tells it.

    prompt: token ids (1, length), of which the first SHORT are read, so that reading them counts for little; new: tokens, no
    fewer or more, which a row tells, since what a call does beside its tokens weighs more among fewer. base: the dense model
    (it may be the same), timed in turn with this one. A call of few tokens warms each up once, and ROUNDS of each are timed:
    medians, and of the rounds' ratios also the ends. Both are timed with the same threads of a CPU, those that the dense model
    is computed by sensibly (`timed_threads`). Memory is that of a call of its own on a CPU, whose profiler would slow a timed
    one, and of the last timed call on a GPU, where counting takes no time.
    """
    device = next(model.parameters()).device
    ids = prompt[:, :SHORT].to(device)
    both = [model] if model is base else [base, model]
    with as_loaded(*both):
        for one in both:
            warm_up(one, ids, min(new, WARM))
        threads = timed_threads(device, lambda: by_transformers(base, ids, min(new, WARM)))
        with with_threads(threads):
            rounds, over = timed_rounds(both, ids, new)
    found: Values = {**in_turn(rounds, new), TOKENS: (new, ""), **recorded_threads(threads)}
    if over is None:
        return found
    return {**found, OVER: (over, "byte"), PEAK: (held_bytes(model) + over, "byte")}


def warm_up(model: nn.Module, ids: Tensor, new: int) -> None:
    """Call a model that was not called before it is timed: kernels are loaded and chosen then."""
    if model not in WARMED:
        by_transformers(model, ids, new)
        WARMED.add(model)


def timed_rounds(models: Sequence[nn.Module], ids: Tensor, new: int) -> tuple[list[list[float]], int | None]:
    """Seconds of each model in each of ROUNDS, and `most_allocated` of the last model."""
    rounds: list[list[float]] = []
    counts_beside = ids.device.type == "cuda"
    over = (
        None if counts_beside else most_allocated(ids.device, lambda: by_transformers(models[-1], ids, new))
    )
    for _ in range(ROUNDS):
        seconds = [by_transformers(one, ids, new)[0] for one in models[:-1]]

        def last(seconds: list[float] = seconds) -> None:
            seconds.append(by_transformers(models[-1], ids, new)[0])

        if counts_beside:
            over = most_allocated(ids.device, last)
        else:
            last()
        rounds.append(seconds)
    return rounds, over


def recorded_threads(threads: int | None) -> Values:
    """How many threads of a CPU speeds are of, as rows say it; nothing of other devices."""
    return {} if threads is None else {THREADS: (threads, "")}


def in_turn(rounds: Sequence[Sequence[float]], new: int) -> Values:
    """Speeds of rounds in each of which the dense model was timed first and then the other, where it is another."""
    base, own = (median(one[at] for one in rounds) for at in (0, -1))
    found: Values = {"tokens/s": (new / own, "1/s")}
    if len(rounds[0]) < 2:
        return found
    ratios = [one[0] / one[-1] for one in rounds]
    names = (SPEEDUP, LEAST, LARGEST)
    told = zip(names, (median(ratios), min(ratios), max(ratios)), strict=True)
    return {**found, DENSE: (new / base, "1/s"), **{name: (value, "ratio") for name, value in told}}


@lru_cache(maxsize=8)
def tasks_of(names: tuple[str, ...], folder: Path) -> Harness:
    """What tasks of lm-evaluation-harness need, for the model of a folder: those whose data are on this machine.

    A task without its data is said to be missing, once, and the others go on. ValueError for a name that the harness does not
    know, and as `ao_lab.eval.prepared`.
    """
    harness = prepared(list(names), HarnessOptions(batch_size="8"), folder)
    if harness is None:
        raise ValueError("no task of lm-evaluation-harness was named")
    return replace(harness, tasks=[name for name in names if has_data(harness.manager, name)])


def has_data(manager: Any, name: str) -> bool:
    """Whether a task can be loaded; ValueError for one that the harness does not know."""
    try:
        manager.load([name])
    except KeyError as error:
        raise ValueError(f"--task {name}: lm-evaluation-harness has no such task ({error})") from error
    except Exception as error:  # noqa: BLE001
        # Data come from anywhere, and fail in as many ways; a run goes on without them.
        say(f"--task {name}: NOT MEASURED, its data are not on this machine: {type(error).__name__}: {error}")
        return False
    return True


def task_values(model: nn.Module, harness: Harness, examples: int | None) -> Values:
    """The numbers of each task as metrics such as "hellaswag: acc_norm"; nothing where no task is left, the reason
    where the harness raises."""
    if not harness.tasks:
        return {}
    try:
        found = harness_results(model, harness, examples)
    except Exception as error:  # noqa: BLE001
        # What was measured before is not lost by what a task's code, its data or a tokenizer raise.
        say(f"tasks of lm-evaluation-harness: NOT MEASURED: {type(error).__name__}: {error}")
        return {
            f"tasks: not measured: {type(error).__name__}: {' '.join(str(error).split())[:120]}": (0.0, "")
        }
    values: Values = {
        f"{task}: {name}": (value, "")
        for task, numbers in found["tasks"].items()
        for name, value in numbers.items()
    }
    return {**values, "tasks: examples of each (0: all)": (float(examples or 0), "")}
