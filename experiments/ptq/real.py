"""The part of experiment `ptq` on real models: what each scheme costs a pretrained language model.

Models are those of `experiments.models.pretrained`, or anyone's folder (`ao-lab reproduce ptq --model DIR`). Each scheme
quantizes the weights of all linear layers but a head that is tied to the embedding, alone and together with the layers' inputs
(dynamic scales), as users do it: `quantize_`, then the model's own forward in bfloat16. The baseline is the model as its file
gives it.

A scheme whose blocks do not divide every layer is not measured on the models that the scale measures, and a row says so: half a
model quantized would stand beside whole ones. On a model that somebody names it is measured as `ao-lab compare` does, and how
many layers it quantizes stands behind its name (`DENSE_LAYERS`).

Sentence encoders and speech models are parts (`ao-lab reproduce ptq --only encoders`, `--only speech`): all default schemes on
the models of that task that packages carry, the smallest first, at either scale; they take seconds a scheme where a language
model takes minutes. Schemes that `--only` names beside a part are measured alone. `--only weights` leaves out the measurements
in which inputs are quantized too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ao_lab.config.base import SchemeConfig
from ao_lab.measure.memory import synchronize
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.groups import told_elsewhere
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.data.programs import problems
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import BASE, Bench, RealModel, check_whole, linears, sizes
from experiments.models.pretrained import ENCODER, RECORDS, SPEECH
from experiments.models.programs import Programs, programs_of
from experiments.models.quantized_model import activation_scheme, setting_name
from experiments.models.serving import generation
from experiments.runs.benches import BASES, KINDS, AnyBench, any_bench_of
from experiments.runs.real_models import Place, Tables, by_data, facts, harness_values, run_models
from experiments.runs.settings import Settings

EXPERIMENT = "ptq"
#: At quick scale: schemes of weights, and of weights and inputs.
QUICK_WEIGHTS = ("int8_rowwise", "nvfp4", "nf4", "int4_g32_asymmetric", "mxfp4_rceil", "int3_g64_asymmetric")
QUICK_INPUTS = ("int8_rowwise", "fp8_rowwise", "nvfp4", "mxfp4_rceil")
#: Schemes whose speed is measured at quick scale, besides the base model and all that are asked for by name; at full scale all.
SPEED = ("int8_rowwise", "fp8_rowwise", "int4_g64_asymmetric_bf16", "mxfp4_rceil")
#: Of a scheme that leaves layers dense, how many.
DENSE_LAYERS = "layers left dense"
#: Of programming problems every so many-th is asked, by scale.
EVERY = {"quick": 20, "full": 1}
#: New tokens of `generate()`; rows tell them. A step of an eager model takes a GPU's host some 20 ms, with which 79 schemes by
#: two settings spend a third of a run.
NEW_TOKENS = 8
#: Models of a task that packages carry, the smallest first, as parts of a run.
PARTS: dict[str, tuple[str, ...]] = {
    part: tuple(one.name for one in sorted(RECORDS, key=lambda one: one.parameters) if one.task == task)
    for part, task in (("encoders", ENCODER), ("speech", SPEECH))
}
#: What `--only` names to measure quantized weights alone.
WEIGHTS = "weights"


@dataclass(frozen=True)
class Task:
    """One method to measure: a scheme of the weights (or a model as it is), and one of the inputs or None."""

    method: str
    activations: str | None

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return setting_name(self.activations)


def real_tasks(settings: Settings, base: str = BASE) -> list[Task]:
    """The base model (rows of the method `base`), then schemes: few at quick scale, all default ones at full, or those that
    `settings.only` names; of weights, then of weights and inputs, unless it names `WEIGHTS`.

    Conventions of other projects are measured by name: most round ordinary weights as a default scheme does (the stand-in has
    them all).
    """
    named = schemes_of(settings.only)
    quick = settings.scale == "quick" and not named
    weights = QUICK_WEIGHTS if quick else named or default_schemes(settings)
    inputs = () if WEIGHTS in settings.only else QUICK_INPUTS if quick else weights
    tasks = [Task(scheme, None) for scheme in weights]
    return [Task(base, None), *tasks, *(Task(scheme, activation_scheme(scheme)) for scheme in inputs)]


def schemes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the names of `--only` that are neither parts nor `WEIGHTS`."""
    return tuple(name for name in names if name not in (*PARTS, WEIGHTS))


def default_schemes(settings: Settings) -> tuple[str, ...]:
    """The schemes that are no other project's, and those that models are served in."""
    return (*(scheme for scheme in settings.schemes if "." not in scheme), *settings.served)


def of_parts(settings: Settings) -> Settings:
    """The settings of a run of parts: their models, and the schemes that were named, by default all; of another run its own."""
    if settings.asked is not None or not settings.only:
        return settings
    models = tuple(name for part, names in PARTS.items() if part in settings.only for name in names)
    schemes = schemes_of(settings.only) or default_schemes(settings)
    alone = (WEIGHTS,) if WEIGHTS in settings.only else ()
    return replace(settings, models=models, only=(*schemes, *alone))


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Measure all models that the settings name, into the journal; returns rows of what failed."""
    return run_models(EXPERIMENT, settings, journal, measure_model)


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""

    def load() -> tuple[Values, Callable[[Task], dict[str, Values]]]:
        bench = any_bench_of(settings, model)
        programs = programs_for(settings, bench)
        return facts(bench), partial(measure, settings, bench, programs=programs)

    tasks = {
        Place(one.setting, one.method, settings.seed): one for one in real_tasks(settings, BASES[model.task])
    }
    tables = Tables(EXPERIMENT, settings, KINDS[model.task] + model.name, journal, deadline)
    return tables.measure(model.name, tasks, load, baseline=next(iter(tasks)))


def measure(
    settings: Settings, bench: AnyBench, task: Task, programs: Programs | None = None
) -> dict[str, Values]:
    """Values of one method by the data of their tables: each text, and the model."""

    def work(found: dict[str, Values]) -> Values:
        started = time.perf_counter()
        dense = task.method == bench.baseline
        model = bench.base if dense else quantized(bench, task, whole=settings.asked is None)
        synchronize(torch.device(settings.device))
        seconds = time.perf_counter() - started
        values = {**sizes(model), "time to quantize": (seconds, "s")}
        if left := 0 if dense else dense_layers(model):
            values[DENSE_LAYERS] = (left, "")
        with torch.no_grad():
            for data, quality in bench.results(model).items():
                found[data] = {**quality, **status("ok")}
            wrote = {} if programs is None else programs.values(model)
            return {**values, **served(settings, bench, task, model), **wrote}

    return by_data(work)


def programs_for(settings: Settings, bench: AnyBench) -> Programs | None:
    """Programming problems, where a run was asked to run what a language model writes for them."""
    if settings.asked is None or not settings.asked.execute or not isinstance(bench, Bench):
        return None
    found = problems(settings.cache, EVERY[settings.scale])
    return programs_of(bench.model.folder, bench.base, found)


def served(settings: Settings, bench: AnyBench, task: Task, model: nn.Module) -> Values:
    """Speed and memory of generating, where they are measured, and tasks of lm-evaluation-harness that were asked for."""
    if settings.asked is None or not isinstance(bench, Bench):
        return {}
    found: Values = {}
    if settings.scale == "full" or task.method in (BASE, *SPEED, *settings.only):
        prompt = bench.windows[0].ids[:1, : bench.windows[0].ids.shape[1] // 2]
        found |= generation(model, prompt, NEW_TOKENS, bench.base)
    return {**found, **harness_values(settings, bench.model, model)}


def dense_layers(model: nn.Module) -> int:
    """How many linear layers are not quantized, a head that is tied to the embedding aside."""
    return sum(not isinstance(layer.weight, QuantizedTensor) for layer in linears(model).values())


def quantized(bench: AnyBench, task: Task, whole: bool = True) -> nn.Module:
    """A quantized copy; where it is to be whole, Undivided for a scheme that leaves a layer dense."""
    model = bench.copy()
    layers = linears(model)
    chosen = {id(layer) for layer in layers.values()}
    config = SchemeConfig(scheme=task.method, activation_scheme=task.activations)
    with told_elsewhere():  # by `check_whole` or rows of DENSE_LAYERS
        quantize_(model, config, filter_fn=lambda module, name: id(module) in chosen)
    if whole:
        check_whole(task.method, layers)
    return model


def check_parts(names: Sequence[str]) -> None:
    """ValueError for names that are neither parts nor schemes nor `WEIGHTS`, and for a run without a part: of no model."""
    check_schemes([name for name in names if name not in PARTS])
    if not any(name in PARTS for name in names):
        what = "says what to measure" if names[0] == WEIGHTS else "is a scheme"
        raise ValueError(
            f"{names[0]} {what}; name the models beside it: --only {' or --only '.join(PARTS)}, or --model DIR"
        )


def check_schemes(names: Sequence[str]) -> None:
    """ValueError for names that are neither schemes nor `WEIGHTS`."""
    for name in names:
        if name != WEIGHTS:
            activation_scheme(name)
