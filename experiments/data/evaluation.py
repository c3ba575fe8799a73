"""How a model is evaluated: bits per byte of held-out text, and multiple-choice questions about how the text continues.

A *window* is a stretch of one held-out file, each from another file. At fixed positions of a window a question is asked: which
of four continuations follows the text so far? One is the true one, three are taken from other held-out files. The model's
answer is the continuation with the largest total log-likelihood.

Window and continuations are one sequence. The window is the trunk; a false continuation is a branch that attends to the trunk
up to its question and to itself, at the positions of the true continuation. So every score is that of a separate run of its
text, and the trunk, run once, gives bits per byte as well. The exception is an activation scale over a whole tensor. It is
computed per window, so that windows never depend on each other or on `batch`; but within a window it also covers the false
continuations, which the mask hides from the trunk, and later tokens.

    trunk      t0 t1 t2 t3 t4 t5 ...          question at 3: true t3 t4 | false a0 a1 | false b0 b1
    sequence   t0 t1 t2 t3 t4 t5 ... a0 a1 b0 b1 ...
    positions   0  1  2  3  4  5 ...  3  4  3  4 ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from experiments.data.corpus import Corpus, Document
from reference import Quantized

# Error measures, each defined once; all sums are in float64.

# Stored bytes of a quantized tensor: elements packed to their bits, scales and zero points.


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor by part."""

    elements: int
    scales: int = 0
    outer: int = 0
    zeros: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.elements + self.scales + self.outer + self.zeros

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            self.elements + other.elements,
            self.scales + other.scales,
            self.outer + other.outer,
            self.zeros + other.zeros,
        )


def stored(q: Quantized) -> Stored:
    """Bytes of a quantized tensor. Elements count by the bits of their format, packed over the whole tensor; scales and zero
    points count as the arrays of the quantizer (an int8 zero point takes a byte even where four bits would do)."""
    return Stored(
        elements=math.ceil(math.prod(q.shape) * q.scheme.format.bits / 8),
        scales=_bytes(q.scale),
        outer=_bytes(q.outer),
        zeros=_bytes(q.zero),
    )


def stored_plain(tensor: Tensor) -> Stored:
    """Bytes of a tensor that is not quantized."""
    return Stored(elements=_bytes(tensor))


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


@dataclass(frozen=True)
class Error:
    """Sums over elements, from which every measure is computed; `+` combines several tensors."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    rounded: float = 0.0
    largest: float = 0.0
    largest_error: float = 0.0

    @classmethod
    def of(cls, exact: Tensor, rounded: Tensor) -> Error:
        """The error of `rounded` against `exact`."""
        x, y = exact.double(), rounded.double()
        difference = x - y
        return cls(
            signal=float((x * x).sum()),
            noise=float((difference * difference).sum()),
            product=float((x * y).sum()),
            rounded=float((y * y).sum()),
            largest=float(x.abs().max()),
            largest_error=float(difference.abs().max()),
        )

    def __add__(self, other: Error) -> Error:
        return Error(
            self.signal + other.signal,
            self.noise + other.noise,
            self.product + other.product,
            self.rounded + other.rounded,
            # Python's max drops a NaN that comes second; NumPy's keeps it wherever it is.
            float(np.maximum(self.largest, other.largest)),
            float(np.maximum(self.largest_error, other.largest_error)),
        )

    @property
    def snr_db(self) -> float:
        """Signal to noise: 10 log10(sum x^2 / sum (x - y)^2) decibel; inf without noise, -inf without signal."""
        if math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine_distance(self) -> float:
        """1 - cosine of the angle between x and y: 0 is exact; independent of an overall scale."""
        norm = math.sqrt(self.signal * self.rounded)
        return 1 - self.product / norm if norm else math.nan

    @property
    def max_error(self) -> float:
        """Largest |x - y| as a fraction of the largest |x|; inf without signal."""
        if self.largest_error == 0:
            return 0.0
        return self.largest_error / self.largest if self.largest else self.largest_error * math.inf


def mean_and_error(values: Tensor | np.ndarray) -> tuple[float, float]:
    """Mean and its standard error; values are independent (one per document)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    count = values.numel()
    return float(values.mean()), float(values.std() / math.sqrt(count)) if count > 1 else math.nan


CHOICES = 4


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings:
    """`windows` of `context` bytes, with `questions` each, the first at byte `first`, `stride` bytes apart, about
    continuations of `continuation` bytes; `batch` windows run at once. ValueError where they do not fit."""

    windows: int = 20
    context: int = 256
    questions: int = 10
    first: int = 64
    stride: int = 18
    continuation: int = 6
    batch: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        end = self.first + self.stride * (self.questions - 1) + self.continuation
        if self.first < 1 or end > self.context:
            raise ValueError(
                f"the last of {self.questions} questions ends at byte {end} of a window of {self.context} bytes, and the first "
                f"starts at {self.first}: take fewer questions, a smaller stride, or a longer context"
            )

    @property
    def question_positions(self) -> list[int]:
        """Bytes of a window at which the questions are asked."""
        return [self.first + self.stride * number for number in range(self.questions)]


@dataclass(frozen=True)
class MultipleChoice:
    """Windows with their questions: tokens (windows, time), positions (time) and mask (time, time) of all.

    sources, targets (questions, choices, continuation): indices of the tokens that predict, and of those predicted; choice 0
    is the true one. documents: paths of the windows' files.
    """

    settings: MultipleChoiceSettings
    tokens: Tensor
    positions: Tensor
    mask: Tensor
    sources: Tensor
    targets: Tensor
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """Bits per byte of each window (windows), float64, and which answers are correct (windows, questions), bool."""

    bits_per_byte: np.ndarray
    correct: np.ndarray


def multiple_choice(corpus: Corpus, settings: MultipleChoiceSettings) -> MultipleChoice:
    """Windows and questions from the held-out files; ValueError where these are too few."""
    rng = np.random.default_rng(settings.seed)
    usable = [document for document in corpus.held_out if len(document.data) >= 4 * settings.context]
    if len(usable) < max(settings.windows, 2):
        raise ValueError(
            f"{settings.windows} windows need as many held-out files of {4 * settings.context} bytes and at least two; "
            f"{corpus.name} has {len(usable)}: ask for fewer windows or a shorter context"
        )
    chosen = [usable[index] for index in rng.choice(len(usable), settings.windows, replace=False)]
    sequences = [_sequence(document, usable, settings, rng) for document in chosen]
    positions, mask = _layout(settings)
    sources, targets = _answers(settings)
    documents = tuple(document.path for document in chosen)
    return MultipleChoice(
        settings, torch.from_numpy(np.stack(sequences)), positions, mask, sources, targets, documents
    )


def score(model: nn.Module, questions: MultipleChoice) -> Scores:
    """Scores of a model that takes (tokens, positions, mask) and returns logits; computed in float64."""
    device = next(model.parameters()).device
    bits, correct = [], []
    for tokens in questions.tokens.to(device).split(questions.settings.batch):
        with torch.inference_mode():
            logits = model(tokens, questions.positions.to(device), questions.mask.to(device))
            likelihood = torch.log_softmax(logits.double(), dim=-1)
        trunk = _log_likelihood(
            likelihood,
            tokens,
            torch.arange(questions.settings.context - 1),
            torch.arange(1, questions.settings.context),
        )
        totals = _log_likelihood(likelihood, tokens, questions.sources, questions.targets).sum(dim=-1)
        bits.append(-trunk.mean(dim=-1) / math.log(2))
        correct.append((totals[..., :1] > totals[..., 1:]).all(dim=-1))
    return Scores(torch.cat(bits).cpu().numpy(), torch.cat(correct).cpu().numpy())


def _log_likelihood(likelihood: Tensor, tokens: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """Log-likelihood of the tokens at `targets`, as predicted at `sources`."""
    predicted = tokens[:, targets.to(tokens.device)].unsqueeze(-1)
    return likelihood[:, sources.to(tokens.device)].gather(-1, predicted).squeeze(-1)


def _sequence(
    document: Document, others: list[Document], settings: MultipleChoiceSettings, rng: np.random.Generator
) -> np.ndarray:
    start = int(rng.integers(len(document.data) - settings.context + 1))
    window = document.data[start : start + settings.context]
    parts = [window]
    other_files = [other for other in others if other.path != document.path]
    for position in settings.question_positions:
        seen = {window[position : position + settings.continuation]}
        while len(seen) < CHOICES:
            # A continuation that equals another would make two answers right, so it is drawn again.
            drawn = _random_slice(
                other_files[int(rng.integers(len(other_files)))], settings.continuation, rng
            )
            if drawn not in seen:
                seen.add(drawn)
                parts.append(drawn)
    return np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int64)


def _random_slice(document: Document, length: int, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(document.data) - length + 1))
    return document.data[start : start + length]


def _branch(settings: MultipleChoiceSettings, question: int, choice: int) -> int:
    """Index in the sequence at which false continuation `choice` (1, 2, 3) of a question starts."""
    return settings.context + (question * (CHOICES - 1) + choice - 1) * settings.continuation


def _layout(settings: MultipleChoiceSettings) -> tuple[Tensor, Tensor]:
    length = _branch(settings, settings.questions, 1)
    positions = torch.arange(length)
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[: settings.context, : settings.context] = True
    for question, position in enumerate(settings.question_positions):
        for choice in range(1, CHOICES):
            start = _branch(settings, question, choice)
            own = slice(start, start + settings.continuation)
            positions[own] = torch.arange(position, position + settings.continuation)
            mask[own, :position] = True
            mask[own, own] = True
    return positions, mask.tril()


def _answers(settings: MultipleChoiceSettings) -> tuple[Tensor, Tensor]:
    steps = torch.arange(settings.continuation)
    sources, targets = [], []
    for question, position in enumerate(settings.question_positions):
        starts = [position, *(_branch(settings, question, choice) for choice in range(1, CHOICES))]
        target = torch.stack([start + steps for start in starts])
        source = target - 1
        source[:, 0] = position - 1
        sources.append(source)
        targets.append(target)
    return torch.stack(sources), torch.stack(targets)
