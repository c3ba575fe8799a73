"""Word errors, losses and transcripts, against sums written out."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.data.texts import ratio_and_error
from experiments.data.utterances import Utterance
from experiments.models import speech
from experiments.models.ctranslate2 import END
from experiments.models.speech import (
    PROMPT,
    Heard,
    SpeechBench,
    load,
    log_probabilities,
    transcript,
    word_errors,
)
from tests.support.models.hf_models import SPECIAL, save_whisper

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("reference", "found", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b b c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d a", 2),
    ],
)
def test_word_errors_are_those_of_the_best_alignment(reference, found, errors):
    assert word_errors(reference.split(), found.split()) == errors


def test_a_rate_is_of_all_words_with_a_linearized_error():
    value, error = ratio_and_error([1.0, 0.0, 3.0], [4, 2, 6], range(3))
    assert value == pytest.approx(1 / 3)
    rests = [(1 - 4 / 3) / 4, (0 - 2 / 3) / 4, (3 - 2) / 4]
    assert error == pytest.approx(np.std(rests, ddof=1) / np.sqrt(3))


class Scripted:
    """A model that says the tokens of a list, and prefers times to text everywhere."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def forward(self, *, encoder_outputs, decoder_input_ids, past_key_values, use_cache):
        self.seen.append(decoder_input_ids.tolist()[0])
        logits = torch.zeros(1, decoder_input_ids.shape[1], 51865)
        logits[0, -1, END + 200] = 9.0
        logits[0, -1, self.tokens[len(self.seen) - 1]] = 5.0
        return SimpleNamespace(logits=logits, past_key_values="past")

    __call__ = forward


def test_a_transcript_is_text_until_it_is_closed():
    model = Scripted([7, 8, END, 9])
    encoded = SimpleNamespace(last_hidden_state=torch.zeros(1))
    assert transcript(model, encoded) == [7, 8]
    assert model.seen == [list(PROMPT), [7], [8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "tiny-whisper"
    save_whisper(made)
    return made


@pytest.fixture(scope="module")
def bench(folder):
    sounds = np.random.default_rng(0).normal(size=(2, 16000)).astype(np.float32) / 10
    utterances = [Utterance("a", "one two", sounds[0]), Utterance("b", "three of clubs", sounds[1])]
    return SpeechBench.of(SimpleNamespace(folder=folder, name="tiny"), utterances, "cpu")


def test_the_loss_is_of_the_given_text_behind_the_prompt(bench):
    """Each token after the true ones before it: prediction by prediction the same."""
    one = bench.recordings[1]
    assert one.tokens.tolist() == [3, 4, 5]
    assert one.words == ("3", "of", "clubs")
    with torch.no_grad():
        encoded = bench.base.get_encoder()(one.features)
        logp = log_probabilities(bench.base, encoded, one.tokens)
        for place in range(3):
            ids = torch.tensor([[*PROMPT, *one.tokens[:place].tolist()]])
            logits = bench.base(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            assert torch.allclose(logp[place], torch.log_softmax(logits, -1), atol=1e-4)
    assert bench.dense[1].losses.tolist() == pytest.approx(
        [-float(logp[n, t]) for n, t in enumerate(one.tokens)]
    )


def test_the_dense_model_is_at_no_distance_from_itself_and_a_copy_at_some(bench):
    (values,) = bench.results(bench.base).values()
    assert [values[name][0] for name in ("KL", "loss, change", "word error rate, change")] == [0, 0, 0]
    copy = bench.copy()
    with torch.no_grad():
        copy.model.decoder.layers[0].fc1.weight.mul_(3.0)
    (values,) = bench.results(copy).values()
    assert values["KL"][0] > 0


def test_values_are_over_all_tokens_and_words():
    logp = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    dense = [Heard(1, torch.tensor([1.0, 2.0]), logp), Heard(0, torch.tensor([3.0]), logp[:1])]
    ours = [replace(dense[0], errors=2, losses=torch.tensor([2.0, 2.0])), dense[1]]
    values = speech.values_of(ours, dense, [4, 1])
    assert (values["word errors"][0], values["words"][0]) == (2, 5)
    assert values["word error rate"][0] == pytest.approx(40)
    assert values["word error rate, change"][0] == pytest.approx(20)
    assert values["loss"][0] == pytest.approx(7 / 3)
    assert values["loss, change"][0] == pytest.approx(1 / 3)


def test_other_tokens_and_folders_without_any_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load(tmp_path, "cpu")
    save_whisper(tmp_path, special={**SPECIAL, "<|en|>": 50300})
    with pytest.raises(ValueError, match="the multilingual Whisper's are"):
        load(tmp_path, "cpu")
