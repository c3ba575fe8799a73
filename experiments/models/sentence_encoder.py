"""A sentence encoder beside quantized copies of it: the same sentences, the same regression, the same search.

A sentence's vector is the mean of the model's last states over its tokens (`attention_mask`), of length 1. Sentences are
encoded in batches of BATCH, sorted by length, so that few are padded; a scale that is over a whole input (NVFP4's outer one) is
over such a batch. The model computes in float32, in which its weights were trained and stored; weights of quantized copies are
decoded once (`decoded_weights`).

*Film reviews* (`experiments.data.sentences`): a logistic regression is fitted on the dense model's vectors, once, and reads the
vectors of each copy: its accuracy is what somebody has who quantizes the encoder under a classifier. *Passages*: the share of
queries whose nearest passage is their own second half ("recall at 1"), and the mean of 1 / rank; a copy encodes both sides.
On both, how far a copy is from the dense model: the mean cosine distance of the same text's vectors, which resolves what
accuracies of some hundred texts do not, and the share of each text's NEIGHBOURS nearest that both have.

Changes are paired, text by text; standard errors are over texts, and over books where there are several.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.install.extras import needed
from experiments.data.sentences import Passages, Reviews
from experiments.data.texts import mean_and_error
from experiments.harness.measuring import Values
from experiments.models.conversion import quietly
from experiments.models.quantized_model import decoded_weights

BASE = "float32"
REVIEWS, PASSAGES = "film-reviews", "passages-of-held-out-books"
BATCH = 32
#: Tokens that are read of a sentence at most, and nearest sentences that are compared.
LONGEST, NEIGHBOURS = 384, 10
#: Weight of half the squared coefficients beside the sum of the losses, and Newton's steps, of the regression.
PENALTY, STEPS = 0.1, 12


@dataclass(frozen=True)
class Encoder:
    """A model with its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def vectors(self, sentences: Sequence[str]) -> Tensor:
        """(sentences, width) float32, on the host."""
        device = next(self.model.parameters()).device
        found: list[Tensor | None] = [None] * len(sentences)
        order = sorted(range(len(sentences)), key=lambda place: (len(sentences[place]), place))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            given = self.tokenizer(
                [sentences[place] for place in places],
                padding=True,
                truncation=True,
                max_length=LONGEST,
                return_tensors="pt",
            ).to(device)
            with torch.no_grad():
                states = self.model(**given).last_hidden_state
            for place, vector in zip(places, pooled(states, given["attention_mask"]).cpu(), strict=True):
                found[place] = vector
        return torch.stack([vector for vector in found if vector is not None])


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of (batch, tokens, width) over the tokens of a mask (batch, tokens), of length 1: (batch, width)."""
    weight = mask[..., None].to(states.dtype)
    return functional.normalize((states * weight).sum(1) / weight.sum(1), dim=-1).float()


@dataclass(frozen=True)
class Judged:
    """What the vectors of a set of texts give: of each text the distance from the dense vector, the share of neighbours that
    stay, and whether (or how well) it was answered, by the names of metrics."""

    distance: list[float]
    neighbours: list[float]
    answers: dict[str, list[float]]
    documents: tuple[int, ...]


@dataclass(frozen=True)
class ReviewTask:
    """Film reviews: the sentences that test, the dense model's vectors of them, and its regression."""

    data: Reviews
    dense: Tensor
    weights: Tensor
    name: str = REVIEWS

    @classmethod
    def of(cls, data: Reviews, encoder: Encoder) -> ReviewTask:
        """With the vectors and the regression of a dense model."""
        weights = regression(encoder.vectors(data.fit), torch.tensor(data.fit_labels))
        return cls(data, encoder.vectors(data.test), weights)

    def judged(self, encoder: Encoder | None = None) -> Judged:
        """How a model does, by default the dense one."""
        test = self.dense if encoder is None else encoder.vectors(self.data.test)
        right = predicted(test, self.weights) == torch.tensor(self.data.test_labels)
        kept = kept_neighbours(test, self.dense, test, self.dense)
        answers = {"accuracy": right.double().tolist()}
        return Judged(distances(test, self.dense), kept, answers, (0,) * len(right))


@dataclass(frozen=True)
class PassageTask:
    """Passages of books: the dense vectors of queries and of passages."""

    data: Passages
    dense: tuple[Tensor, Tensor]
    name: str = PASSAGES

    @classmethod
    def of(cls, data: Passages, encoder: Encoder) -> PassageTask:
        """With the vectors of a dense model."""
        return cls(data, cls.vectors(data, encoder))

    @staticmethod
    def vectors(data: Passages, encoder: Encoder) -> tuple[Tensor, Tensor]:
        """Of queries and of passages."""
        return encoder.vectors(data.queries), encoder.vectors(data.passages)

    def judged(self, encoder: Encoder | None = None) -> Judged:
        """How a model does, by default the dense one."""
        queries, passages = self.dense if encoder is None else self.vectors(self.data, encoder)
        scores = queries.double() @ passages.double().T
        ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1
        answers = {"recall at 1": (ranks == 1).double().tolist(), "1 / rank": (1 / ranks.double()).tolist()}
        kept = kept_neighbours(queries, self.dense[0], passages, self.dense[1], alone=False)
        return Judged(distances(queries, self.dense[0]), kept, answers, self.data.books)


def regression(vectors: Tensor, labels: Tensor) -> Tensor:
    """Coefficients (width + 1, the last is the constant) of a logistic regression of labels (n, bool) on vectors (n, width).

    They minimize the summed losses + PENALTY / 2 * squared coefficients, by Newton's method in float64.
    """
    x = functional.pad(vectors.double(), (0, 1), value=1.0)
    y = labels.double()
    penalty = torch.full((x.shape[1],), PENALTY, dtype=torch.float64)
    penalty[-1] = 1e-6
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(STEPS):
        p = torch.sigmoid(x @ weights)
        gradient = x.T @ (p - y) + penalty * weights
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + torch.diag(penalty)
        weights = weights - torch.linalg.solve(hessian, gradient)
    return weights


def predicted(vectors: Tensor, weights: Tensor) -> Tensor:
    """Labels (n, bool) of vectors by coefficients of `regression`."""
    return vectors.double() @ weights[:-1] + weights[-1] > 0


def distances(ours: Tensor, dense: Tensor) -> list[float]:
    """1 - cosine of each vector (n, width) with the dense model's."""
    found = 1 - functional.cosine_similarity(ours.double(), dense.double(), dim=-1)
    return [float(one) for one in found.clamp(min=0.0)]


def kept_neighbours(
    queries: Tensor, dense_queries: Tensor, index: Tensor, dense_index: Tensor, *, alone: bool = True
) -> list[float]:
    """Of each query the share of the NEIGHBOURS nearest of an index that are the dense model's too. alone: whether queries and
    index are the same texts, of which each is not its own neighbour."""
    ours, dense = nearest(queries, index, alone), nearest(dense_queries, dense_index, alone)
    return [len(set(a) & set(b)) / len(b) for a, b in zip(ours.tolist(), dense.tolist(), strict=True)]


def nearest(queries: Tensor, index: Tensor, alone: bool) -> Tensor:
    """Places (queries, NEIGHBOURS or fewer) of the nearest by cosine."""
    scores = queries.double() @ index.double().T
    if alone:
        scores.fill_diagonal_(-2.0)
    return scores.topk(min(NEIGHBOURS, scores.shape[1] - alone), dim=1).indices


@dataclass(frozen=True)
class EncoderBench:
    """A loaded encoder with its tasks, and what it does in them."""

    model: Any
    base: nn.Module
    tokenizer: Any
    tasks: tuple[ReviewTask | PassageTask, ...]
    dense: dict[str, Judged]

    #: The method of its rows.
    baseline = BASE

    @classmethod
    def of(cls, model: Any, reviews: Reviews | None, passages: Passages | None, device: str) -> EncoderBench:
        """Load an encoder; model: a `RealModel`. Data that are None are not measured; ValueError where all are."""
        base, tokenizer = load(model.folder, device)
        encoder = Encoder(base, tokenizer)
        tasks: list[ReviewTask | PassageTask] = []
        if reviews is not None:
            tasks.append(ReviewTask.of(reviews, encoder))
        if passages is not None:
            tasks.append(PassageTask.of(passages, encoder))
        if not tasks:
            raise ValueError(
                f"{model.name} is an encoder, and there is nothing to judge it by: neither film reviews nor books"
            )
        return cls(model, base, tokenizer, tuple(tasks), {task.name: task.judged() for task in tasks})

    def copy(self) -> nn.Module:
        """A copy of the model that may be changed."""
        return copy.deepcopy(self.base)

    def results(self, model: nn.Module) -> dict[str, Values]:
        """Values of a model by task."""
        return {name: values_of(judged, self.dense[name]) for name, judged in self.judged(model).items()}

    def judged(self, model: nn.Module) -> dict[str, Judged]:
        """What a model does with each text, by task."""
        if model is self.base:
            return self.dense
        encoder = Encoder(model, self.tokenizer)
        with decoded_weights(model):
            return {task.name: task.judged(encoder) for task in self.tasks}


def values_of(ours: Judged, dense: Judged) -> Values:
    """Means with standard errors, and changes from the dense model, paired by text."""
    values: Values = {"texts": (len(ours.distance), "")}
    for name, answers in ours.answers.items():
        change = [a - b for a, b in zip(answers, dense.answers[name], strict=True)]
        mean, error = mean_and_error(answers, ours.documents)
        moved, moved_error = mean_and_error(change, ours.documents)
        values[name] = (100 * mean, "%")
        values[f"{name}, standard error"] = (100 * error, "%")
        values[f"{name}, change"] = (100 * moved, "points")
        values[f"{name}, standard error of the change"] = (100 * moved_error, "points")
    for name, found in (("cosine distance", ours.distance), ("neighbours kept", ours.neighbours)):
        mean, error = mean_and_error(found, ours.documents)
        factor, unit = (1.0, "") if name == "cosine distance" else (100.0, "%")
        values[name] = (factor * mean, unit)
        values[f"{name}, standard error"] = (factor * error, unit)
    return values


def load(folder: Path, device: str) -> tuple[nn.Module, Any]:
    """The encoder of a folder in float32, without a pooling layer, and its tokenizer; ValueError for another pooling than the
    mean, and for what transformers cannot load."""
    check_pooling(folder)
    transformers: Any = needed("transformers")
    given = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quietly():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **given)
            model = transformers.AutoModel.from_pretrained(
                folder, dtype=torch.float32, add_pooling_layer=False, **given
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} holds no encoder that transformers loads: {error}") from error
    return model.eval().requires_grad_(False).to(device), tokenizer


def check_pooling(folder: Path) -> None:
    """ValueError where the folder says that its sentence vectors are no means over tokens."""
    file = folder / "1_Pooling" / "config.json"
    if file.is_file() and not json.loads(file.read_text(encoding="utf-8")).get(
        "pooling_mode_mean_tokens", True
    ):
        raise ValueError(
            f"{file} asks for another pooling than the mean over tokens, which is all that is measured here"
        )
