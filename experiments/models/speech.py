"""Whisper beside quantized copies of it, on utterances whose text is known: word error rate, and loss of the text.

Each utterance is 30 seconds of log-mel features (silence behind it), as Whisper reads sound, and is decoded alone, so that no
scale of an input covers another: greedy, in English, without timestamps, at most TOKENS tokens; no token is suppressed but
those that are no text. Word errors are substitutions, insertions and deletions of the best alignment, over the words of all
utterances, both texts through Whisper's own English normalizer (transformers'), which writes numbers as digits.

The loss is -log p of the tokens of the given text (in lower case, without punctuation, as the data have it), each after the
true ones before it, in nats; KL is the divergence of the predictions there from the dense model's. Means are over tokens,
changes paired, standard errors over utterances (of a ratio of sums, linearized). Weights are float16 in the file; the model
computes in float32, which holds them exactly, and weights of quantized copies are decoded once (`decoded_weights`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.eval import divergence
from ao_lab.install.extras import needed
from ao_lab.install.versions import cache_argument
from experiments.data.texts import ratio_and_error
from experiments.data.utterances import RATE, Utterance
from experiments.harness.measuring import Values
from experiments.models.conversion import quietly
from experiments.models.ctranslate2 import END, START
from experiments.models.quantized_model import decoded_weights

BASE, DATA = "float32", "pocketsphinx-utterances"
#: New tokens at most.
TOKENS = 64
#: English, transcribe, no timestamps: what follows START in the multilingual tokenizer.
PROMPT = (START, 50259, 50359, 50363)


@dataclass(frozen=True)
class Recording:
    """Features (1, mel bins, frames) of an utterance, the words of its text, and the text's tokens (tokens,)."""

    features: Tensor
    words: tuple[str, ...]
    tokens: Tensor


@dataclass(frozen=True)
class Heard:
    """What a model does with one utterance: word errors, -log p of each token of the text, log probabilities (tokens, all)."""

    errors: int
    losses: Tensor
    logp: Tensor


@dataclass(frozen=True)
class SpeechBench:
    """A loaded model with its recordings, and what it does with them."""

    model: Any
    base: nn.Module
    recordings: tuple[Recording, ...]
    reader: Reader
    dense: tuple[Heard, ...]

    #: The method of its rows.
    baseline = BASE

    @classmethod
    def of(cls, model: Any, utterances: Sequence[Utterance], device: str) -> SpeechBench:
        """Load a model; model: a `RealModel`. ValueError for a folder that is none of Whisper, with the multilingual tokens."""
        base, reader = load(model.folder, device)
        recordings = tuple(reader.recording(one) for one in utterances)
        return cls(model, base, recordings, reader, heard(base, recordings, reader))

    def copy(self) -> nn.Module:
        """A copy of the model that may be changed."""
        return copy.deepcopy(self.base)

    def results(self, model: nn.Module) -> dict[str, Values]:
        """Values of a model."""
        with decoded_weights(model):
            ours = self.dense if model is self.base else heard(model, self.recordings, self.reader)
        words = [len(one.words) for one in self.recordings]
        return {DATA: values_of(ours, self.dense, words)}


@dataclass(frozen=True)
class Reader:
    """How sound becomes features, and text tokens and words."""

    extractor: Any
    tokenizer: Any
    normalizer: Any

    def recording(self, one: Utterance) -> Recording:
        """An utterance as the model reads it."""
        features = self.extractor(one.sound, sampling_rate=RATE, return_tensors="pt").input_features
        tokens = torch.tensor(self.tokenizer.encode(" " + one.text, add_special_tokens=False).ids)
        return Recording(features, self.words(one.text), tokens)

    def words(self, text: str) -> tuple[str, ...]:
        """The words of a text as they are compared."""
        return tuple(self.normalizer(text).split())

    def said(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The words of tokens."""
        return self.words(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def heard(model: nn.Module, recordings: Sequence[Recording], reader: Reader) -> tuple[Heard, ...]:
    """What a model does with each recording."""
    found = []
    with torch.no_grad():
        for one in recordings:
            encoded = model.get_encoder()(one.features.to(next(model.parameters()).device))  # type: ignore[operator]
            errors = word_errors(one.words, reader.said(transcript(model, encoded)))
            logp = log_probabilities(model, encoded, one.tokens)
            found.append(Heard(errors, -logp.gather(1, one.tokens[:, None])[:, 0].double(), logp))
    return tuple(found)


def transcript(model: Any, encoded: Any) -> list[int]:
    """Tokens of the greedy transcript, without the closing one."""
    device, name = encoded.last_hidden_state.device, cache_argument(model)
    ids, past, found = torch.tensor([PROMPT], device=device), None, list[int]()
    while len(found) < TOKENS:
        result = model(encoder_outputs=encoded, decoder_input_ids=ids, **{name: past}, use_cache=True)
        # Text, and the token that closes it; the others are languages, tasks and times.
        token = int(result.logits[0, -1, : END + 1].argmax())
        if token == END:
            break
        found.append(token)
        ids, past = torch.tensor([[token]], device=device), getattr(result, name)
    return found


def log_probabilities(model: Any, encoded: Any, tokens: Tensor) -> Tensor:
    """Of each token of a text, after the true ones before it: (tokens, vocabulary) float32, on the host."""
    ids = torch.cat([torch.tensor(PROMPT), tokens])[None, :-1].to(encoded.last_hidden_state.device)
    logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits
    return torch.log_softmax(logits[0, len(PROMPT) - 1 :].float(), -1).cpu()


def word_errors(reference: Sequence[str], found: Sequence[str]) -> int:
    """The least number of substitutions, insertions and deletions that make one of the other (Levenshtein 1966)."""
    row = list(range(len(found) + 1))
    for place, word in enumerate(reference, start=1):
        before, row = row, [place]
        for column, other in enumerate(found, start=1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (word != other)))
    return row[-1]


def values_of(ours: Sequence[Heard], dense: Sequence[Heard], words: Sequence[int]) -> Values:
    """Word error rate in percent, loss and KL in nats a token, with changes from the dense model."""
    tokens = [len(one.losses) for one in ours]
    losses, base_losses = ([float(one.losses.sum()) for one in side] for side in (ours, dense))
    kls = [float(divergence(base.logp, one.logp).sum()) for one, base in zip(ours, dense, strict=True)]
    errors, base_errors = ([float(one.errors) for one in side] for side in (ours, dense))
    every = range(len(words))
    rate, rate_error = ratio_and_error(errors, words, every)
    moved, moved_error = ratio_and_error(differences(errors, base_errors), words, every)
    loss, _ = ratio_and_error(losses, tokens, every)
    change, change_error = ratio_and_error(differences(losses, base_losses), tokens, every)
    kl, kl_error = ratio_and_error(kls, tokens, every)
    return {
        "word error rate": (100 * rate, "%"),
        "word error rate, standard error": (100 * rate_error, "%"),
        "word error rate, change": (100 * moved, "points"),
        "word error rate, standard error of the change": (100 * moved_error, "points"),
        "word errors": (sum(errors), ""),
        "words": (sum(words), ""),
        "utterances": (len(words), ""),
        "loss": (loss, "nat"),
        "loss, change": (change, "nat"),
        "loss, standard error of the change": (change_error, "nat"),
        "KL": (kl, "nat"),
        "KL, standard error": (kl_error, "nat"),
    }


def differences(ours: Sequence[float], dense: Sequence[float]) -> list[float]:
    """Ours less the dense model's."""
    return [a - b for a, b in zip(ours, dense, strict=True)]


def load(folder: Path, device: str) -> tuple[nn.Module, Reader]:
    """The model of a folder in float32 and how it reads; ValueError where it is none, or reads with other tokens."""
    transformers: Any = needed("transformers")
    normalizers: Any = needed("transformers.models.whisper.english_normalizer")
    tokenizers: Any = needed("tokenizers")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; copy that of the model into it")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    found = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>",
                                                      "<|notimestamps|>")]  # fmt: skip
    if tuple(found) != (END, *PROMPT):
        raise ValueError(
            f"{file} has ids {found} for the tokens of a transcript; the multilingual Whisper's are {(END, *PROMPT)}"
        )
    try:
        with quietly():
            model = transformers.WhisperForConditionalGeneration.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} holds no Whisper that transformers loads: {error}") from error
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    reader = Reader(extractor, tokenizer, normalizers.EnglishTextNormalizer({}))
    return model.eval().requires_grad_(False).to(device), reader
