"""`tune`: measures what the products of a model's layers take on this device, chooses, and saves the choices.

Of a layer that trains in low precision two things are chosen. For each product (output, input gradient, weight gradient) the
function that computes it; then which of the products run in low precision at all: casts may cost more than a small product
gains. All dense is a candidate, so a tuned layer is never slower than the plain one, and so is the whole recipe. Of a layer
with a quantized weight one thing: the function for its product, and where families of kernels compete for it (preshuffled
weights), the family: candidates are those whose records take it (`fast.gemm.families`).

All ranks get the same choices: they measure alone, and times differ.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ao_lab.gemm.choices import Choice, Problem, choices_for, folder, path_of, rows_range, save
from ao_lab.transforms.layers import check_model
from ao_lab.tuning.candidates import Limits, choices_of
from ao_lab.tuning.measure import release
from ao_lab.tuning.samples import Sample, SampleInput, record
from reference.schemes.schemes import record_of

LOG = logging.getLogger(__name__)

#: Told of each problem when it is measured: its layer, how many are, of how many.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`: the choices, and the file that stores them ("" if they were not saved)."""

    choices: tuple[Choice, ...]
    path: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.choices)} matmuls tuned{f', saved in {self.path}' if self.path else ''}"]
        for choice in self.choices:
            p = choice.problem
            kinds = " x ".join(scheme_name(key) for key in (p.a, p.b) if key)
            lines.append(f"  {kinds}, {p.dtype.removeprefix('torch.')}: {choice}")
        return "\n".join(lines)


def scheme_name(key: str) -> str:
    """The name of the scheme with a key; a recipe's key stays."""
    return record_of(key).name if key.startswith("{") else key


def tune(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    rows: Iterable[int] = (),
    error_budget: float | None = None,
    time_budget: float | None = None,
    launches: str = "eager",
    save_choices: bool = True,
    progress: Progress | None = None,
) -> Tuned:
    """Measure the matmuls of a model's layers on this device and choose the fastest kernels, for this process and later ones.

    Tuned are layers that train in low precision (`convert_for_training_`), experts included, and nn.Linear with quantized
    weights (`quantize_`), unless kernel= fixes their kernel.

    sample_input: a tensor, a tuple or mapping of arguments, or a function of the model that returns a loss.
    rows: further numbers of tokens to measure each layer with, in addition to those of sample_input; of experts tokens times
    the experts of each token. A choice holds for numbers up to the next power of two; `ao_lab.gemm.choices.nearest` defines
    what other numbers get, in the end the default. If none was measured for a number, the choice of a smaller one holds.
    error_budget: the largest relative error of a matmul: the norm of its difference from the exact result over the norm of
    that. Candidates above it are not chosen; if all are above, a matmul of training stays in high precision, and a quantized
    weight gets the candidate with the smallest error.
    time_budget: None chooses the fastest; a factor chooses the most accurate candidate within that factor of the fastest time.
    launches: how the model will run. "eager": a candidate costs the GPU's time or 1.5 times the host's, whichever is longer;
    "graph" (CUDA graphs, and torch.compile with them): the GPU's time. Tune a model before compiling it.
    save_choices: store the choices for later processes, by GPU and library versions (`ao_lab.gemm.choices`).

    With torch.distributed all ranks must call this, and get the same choices: those of the lowest rank that has the layer.
    The model is unchanged afterwards: buffers, values that modules hold, modes, gradients, and random generators
    (`ao_lab.tuning.samples`); a UserWarning names parameters that the step on sample_input changed. Under
    torch.use_deterministic_algorithms(True) layers follow the default rules, not these choices. Raises ValueError if there is
    no layer to tune, for budgets and rows that are not positive, and inside torch.compile, a CUDA graph's capture or another
    tune; OSError, before anything is measured, if choices are to be saved and the cache folder is not writable.
    """
    check_model(model)
    _refuse_inside()
    limits = Limits(error_budget, time_budget, launches)
    wanted = _checked_rows(rows)
    if save_choices:
        folder()
    _busy.append(True)
    try:
        samples = spread(record(model, sample_input), wanted)
        result: list[Choice] = []
        for done, (sample, count) in enumerate(samples, 1):
            table = choices_for(sample.x.device)
            for choice in choices_of(sample.of_rows(count), limits):
                table.add(choice)
                result.append(choice)
            if progress is not None:
                progress(sample.name, done, len(samples))
    finally:
        _busy.clear()
        release()
    return publish(result, samples[0][0].x.device, save_choices)


_busy: list[bool] = []


def _refuse_inside() -> None:
    """ValueError where measuring would be traced, captured or measured."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        raise ValueError("tune measures, which cannot be compiled or captured; call it before")
    if _busy:
        raise ValueError(
            "tune was called while tune measures: by the model, or by sample_input; call it once, outside"
        )


def _checked_rows(rows: Iterable[int]) -> list[int]:
    if not isinstance(rows, Iterable):
        raise ValueError(f"rows is a list of positive integers, got {rows!r}")
    counts = list(rows)
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"rows are positive integers, got {count!r}")
    return counts


def spread(samples: Sequence[Sample], rows: Sequence[int]) -> list[tuple[Sample, int]]:
    """Each sample with its own number of rows and the further ones, once for each range of rows of a kind of layer."""
    result: dict[object, tuple[Sample, int]] = {}
    for sample in samples:
        for count in (sample.x.shape[0], *rows):
            result.setdefault((*sample.kind, rows_range(count)), (sample, count))
    return list(result.values())


def publish(made: Sequence[Choice], device: torch.device, keep: bool) -> Tuned:
    """The same choices on all ranks, saved once on each machine."""
    made = chosen_by_all(made)
    table = choices_for(device)
    for choice in made:
        table.add(choice)
    if not keep:
        return Tuned(tuple(made), "")
    path = path_of(device)
    if is_first_of_its_machine():
        save(made, path, table.device)
    LOG.info("%d matmuls tuned on %s, choices saved in %s", len(made), table.device, path)
    return Tuned(tuple(made), str(path))


def in_group() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def chosen_by_all(made: Sequence[Choice]) -> list[Choice]:
    """Of each problem the choice of the lowest rank that measured it: pipeline stages have layers that others have not."""
    if not in_group():
        return list(made)
    gathered: list[list[Choice]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(made))
    return merged(gathered)


def merged(by_rank: Sequence[Sequence[Choice]]) -> list[Choice]:
    """One choice for each problem, of the first list that has it."""
    result: dict[Problem, Choice] = {}
    for choices in by_rank:
        for choice in choices:
            result.setdefault(choice.problem, choice)
    return list(result.values())


def is_first_of_its_machine() -> bool:
    """Whether this rank writes the file: by LOCAL_RANK where the launcher says it, else rank 0."""
    local = os.environ.get("LOCAL_RANK")
    return not in_group() or (int(local) if local is not None else dist.get_rank()) == 0


__all__ = ["Tuned", "chosen_by_all", "is_first_of_its_machine", "merged", "tune"]
