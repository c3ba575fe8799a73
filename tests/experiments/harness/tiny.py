"""Settings so small that a whole experiment takes seconds, on a corpus made here."""

from dataclasses import replace
from functools import cache

import torch

from experiments.data.corpus import Corpus, Document
from experiments.data.multiple_choice import MultipleChoiceSettings
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.train import Trained, TrainSettings
from experiments.runs.settings import Settings

MODEL = ModelSettings(width=256, layers=1, heads=4, kv_heads=2, feed_forward=256, context=64)
TRAIN = TrainSettings(model=MODEL, batch=2, steps=2, warmup=1)
MULTIPLE_CHOICE = MultipleChoiceSettings(
    windows=3, context=64, questions=2, first=16, stride=24, continuation=4, batch=3
)


@cache
def corpus():
    documents = []
    for number in range(60):
        lines = (f"def f{number}_{line}(x):\n    return x + {line * number}\n" for line in range(12))
        documents.append(Document(f"part{number % 4}/file{number}.py", "".join(lines).encode()))
    return Corpus("made", "1", tuple(sorted(documents, key=lambda document: document.path)))


@cache
def untrained():
    torch.manual_seed(0)
    model = LanguageModel(MODEL).eval().requires_grad_(False)
    return Trained(model, "untrained", {"key": "untrained"})


class TinySettings(Settings):
    """Settings whose model is not trained: experiments that only measure need none better."""

    @property
    def trained(self):
        return untrained()


def settings(folder, schemes=("mxfp4", "int4_g32_asymmetric")):
    return TinySettings(
        scale="quick",
        device="cpu",
        cache=folder,
        train=TRAIN,
        multiple_choice=MULTIPLE_CHOICE,
        schemes=tuple(schemes),
        shape=(256, 256),
        text=corpus(),
    )


__all__ = ["MODEL", "MULTIPLE_CHOICE", "TRAIN", "corpus", "replace", "settings"]
