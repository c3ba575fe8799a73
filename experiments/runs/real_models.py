"""Runs on real models, what experiments that measure them share: models, texts and windows, and the rows of a model's file.

Rows of a model are tables of their own, ``real NAME/scale/TEXT``; what is of no text is in ``real NAME/scale/model``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

from torch import nn

from ao_lab.cli.terminal import say
from experiments.data.texts import EvaluationText, evaluation_texts, prose_of
from experiments.harness.measuring import Values, status
from experiments.harness.registry import EXPERIMENTS
from experiments.models.architectures import check_task
from experiments.models.causal_lm import Bench, RealModel, linears, real_model
from experiments.runs.run import RealModels, Settings

#: Tokens of a window and windows of a text, by scale.
LENGTH = {"quick": 512, "full": 2048}
COUNT = {"quick": 4, "full": 32}


def asked_of(settings: Settings) -> RealModels:
    """What was asked for, or the scale's own models."""
    return settings.asked or RealModels(models=settings.models)


def real_subject(settings: Settings) -> str:
    """What rows of real models depend on, beside the code: which models, windows and tasks, and whether there is prose."""
    asked = asked_of(settings)
    texts = [text.name for text in texts_of(settings)]
    parts = [*asked.models, *map(str, (asked.windows, asked.length)), *asked.tasks, *texts]
    parts += ["execute"] if asked.execute else []
    parts += [] if asked.own_text is None else [repr(asked.own_text)]
    return f"real{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def texts_of(settings: Settings) -> tuple[EvaluationText, ...]:
    """The texts of a run, the end of the user's own among them."""
    own = asked_of(settings).own_text
    texts = evaluation_texts(prose_of(settings.text, settings.cache))
    return texts if own is None else (own.evaluation, *texts)


def models_of(experiment: str, settings: Settings) -> Iterator[RealModel]:
    """The models that the settings name, one after the other, fetched where they are not in the cache.

    A model of the scale's own that cannot be had is said to be missing and passed over; ValueError for one that was asked for.
    """
    for given in settings.models:
        try:
            model = real_model(given, settings.cache, asked_of(settings).accept, step=say)
            check_task(model.task, EXPERIMENTS[experiment].tasks, model.name, experiment)
        except (ValueError, ModuleNotFoundError) as error:
            if settings.asked is not None:
                raise ValueError(str(error)) from error
            say(f"{experiment}: NOT MEASURED on {given}: {error}")
        else:
            yield model


def bench_of(settings: Settings, model: RealModel) -> Bench:
    """A model with the windows of a run."""
    asked = asked_of(settings)
    length, count = asked.length or LENGTH[settings.scale], asked.windows or COUNT[settings.scale]
    return Bench.of(model, texts_of(settings), length, count, settings.device)


class HasModel(Protocol):
    """A loaded model, of whichever task."""

    @property
    def model(self) -> RealModel:
        """What was loaded."""

    @property
    def base(self) -> nn.Module:
        """The dense model."""


def facts(bench: HasModel) -> Values:
    """What is of the model's file: the grid of its weights, its parameters, and the published model that it is."""
    model = bench.model
    found: Values = {f"grid: {model.grid}": (1.0, "")}
    if model.published:
        found[f"published: {model.published}"] = (1.0, "")
    found["parameters"] = (sum(one.numel() for one in bench.base.parameters()), "")
    found["quantized layers"] = (len(linears(bench.base)), "")
    return {**found, **status("ok")}
