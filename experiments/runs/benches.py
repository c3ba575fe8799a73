"""A loaded model with what it is judged by, by its task: texts, sentences, or recordings.

A bench has the dense model (`base`, rows of the method `baseline`), copies of it, and `results(model)`: values by the data of
their tables. Experiments that need no more than that measure every task alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from experiments.data.sentences import passages, reviews
from experiments.data.texts import BOOKS, documents_of, prose_of
from experiments.data.utterances import utterances
from experiments.harness.measuring import Values
from experiments.models.causal_lm import REAL, Bench, RealModel
from experiments.models.pretrained import ENCODER, LANGUAGE, SPEECH
from experiments.models.sentence_encoder import EncoderBench
from experiments.models.speech import SpeechBench
from experiments.runs.real_models import bench_of
from experiments.runs.settings import Settings

#: How the kind of a model's tables begins, by task.
KINDS = {LANGUAGE: REAL, ENCODER: "encoder ", SPEECH: "speech "}
#: The method of the dense model's rows, by task.
BASES = {LANGUAGE: Bench.baseline, ENCODER: EncoderBench.baseline, SPEECH: SpeechBench.baseline}
#: Sentences that fit a regression, sentences that test it, and paragraphs of each book, by scale.
SENTENCES = {"quick": (400, 200, 10), "full": (2000, 4000, 100)}


class AnyBench(Protocol):
    """See the module's text."""

    @property
    def model(self) -> RealModel:
        """What was loaded."""

    @property
    def base(self) -> nn.Module:
        """The dense model."""

    @property
    def baseline(self) -> str:
        """The method of its rows."""

    def copy(self) -> nn.Module:
        """A copy that may be changed."""

    def results(self, model: nn.Module) -> dict[str, Values]:
        """What a model does, by the data of its tables."""


def any_bench_of(settings: Settings, model: RealModel) -> AnyBench:
    """The bench of a model's task; ValueError where its data cannot be had."""
    return BENCHES[model.task](settings, model)


def encoder_bench(settings: Settings, model: RealModel) -> EncoderBench:
    """Film reviews, and passages of the held-out books where the corpus `prose` is there."""
    fit, test, each = SENTENCES[settings.scale]
    prose = prose_of(settings.text, settings.cache)
    found = passages(documents_of(prose, BOOKS), each) if prose is not None else None
    return EncoderBench.of(model, reviews(settings.cache, fit, test), found, settings.device)


def speech_bench(settings: Settings, model: RealModel) -> SpeechBench:
    """Ten utterances."""
    return SpeechBench.of(model, utterances(settings.cache), settings.device)


BENCHES: Mapping[str, Callable[[Settings, RealModel], AnyBench]] = {
    LANGUAGE: bench_of,
    ENCODER: encoder_bench,
    SPEECH: speech_bench,
}
