"""Speech to speech: programs are transformers' own, beams those of a search that looks at everything anew."""

import weakref
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch

from experiments.ladder import decoding
from experiments.ladder.rungs import Levers
from experiments.ladder.seamless import (
    FIRST,
    PROGRAMS,
    TOKENS,
    Decode,
    FixedPositions,
    ToUnits,
    Utterances,
    Vocode,
)
from experiments.ladder.subjects import STAND_INS, Seamless
from experiments.ladder.work import weights_in

SUBJECT = next(one for one in STAND_INS if isinstance(one, Seamless))


@pytest.fixture(scope="module")
def model():
    return SUBJECT.build("cpu", 0).float()


def predicting(monkeypatch, predictor, duration):
    """A predictor of one duration for all."""
    logarithm = torch.tensor(float(duration)).log1p()
    monkeypatch.setattr(
        predictor, "forward", lambda states, padding_mask=None: logarithm.expand(states.shape[:2])
    )


@torch.no_grad()
def test_text_to_units_is_that_of_transformers(model, monkeypatch):
    predicting(monkeypatch, model.t2u_model.model.decoder.duration_predictor, 3)
    states, characters = torch.randn(1, 4, 128), torch.randint(3, 30, (1, 8))
    counts = torch.full((1, 4), 2)
    expected = model.t2u_model(inputs_embeds=states, char_input_ids=characters, char_count_per_id=counts)[0]
    units, _ = ToUnits(model, characters=2, duration=3)(states, characters)
    assert torch.equal(units, expected.argmax(-1))


@torch.no_grad()
def test_vocoder_is_that_of_transformers(model, monkeypatch):
    predicting(monkeypatch, model.vocoder.dur_predictor, 1)
    units, first = torch.randint(4, 40, (1, 12)), torch.zeros(1, 1, dtype=torch.int64)
    expected, _ = model.vocoder(input_ids=units, speaker_id=first, lang_id=first)
    torch.testing.assert_close(Vocode(model)(units)[0], expected)


@torch.no_grad()
def test_positions_of_a_fixed_cache_are_those_of_transformers(model):
    table = model.text_decoder.embed_positions
    table = table.table if isinstance(table, FixedPositions) else table
    ids = torch.randint(3, 60, (2, 4))
    torch.testing.assert_close(
        FixedPositions(table)(ids, torch.tensor(7)), table(ids, past_key_values_length=7)
    )


def search(model, states, beams, tokens):
    """Beam search over whole sequences, without a cache: their sums of log probabilities, the best first."""
    decode, found = Decode(model), [([FIRST], 0.0)]
    for _ in range(tokens):
        longer = []
        for ids, total in found:
            hidden = decode.hidden(torch.tensor([ids]), states[:1])
            logs = decode.head(hidden[:, -1]).float().log_softmax(-1)[0]
            longer += [([*ids, token], total + float(logs[token])) for token in range(len(logs))]
        found = sorted(longer, key=lambda one: -one[1])[:beams]
    return [total for _, total in found]


@pytest.mark.parametrize(
    "levers", [Levers(), Levers(attention=True, cache="bfloat16")], ids=lambda one: one.name
)
@torch.no_grad()
def test_beams_are_those_of_a_search_without_a_cache(model, levers):
    """Four tokens, three beams: a cache that is not reordered goes on with others' keys."""
    # Weights of this size let probabilities depend on all tokens before.
    for module in (model.lm_head, *model.text_decoder.modules()):
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=0.25)
    subject = replace(SUBJECT, beams=3, tokens=4)
    work = Utterances(subject, model, levers, 1, "cpu", 0)
    work.begin()
    for _ in range(3):
        work.step()
    expected = search(model, work.states, 3, 4)
    torch.testing.assert_close(work.beams.sums[0].tolist(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", ["", "int4"])
@torch.no_grad()
def test_rungs_compute_the_same(weights):
    """Also in a batch, and with programs called as often as an utterance has tokens."""
    bfloat16 = weights_in(SUBJECT, SUBJECT.build("cpu", 0), weights)

    def sums(levers):
        work = Utterances(SUBJECT, bfloat16, levers, 2, "cpu", 0)
        work.prepare()
        work.evidence()
        work.begin()
        work.run()
        return work.beams.sums.clone(), work

    expected, _ = sums(Levers(attention=True, weights=weights))
    for levers in (Levers(weights=weights), Levers(attention=True, cache="fp8", weights=weights)):
        found, work = sums(levers)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert {name: work.times(name) for name in PROGRAMS} == {
        name: 2 if name == TOKENS else 1 for name in PROGRAMS
    }
    assert {f"time, {name}" for name in PROGRAMS} <= set(work.values(1.0))


def test_a_recorded_call_holds_what_it_reads(monkeypatch):
    """The inputs of a program are the closure's alone: a graph reads addresses, and holds nothing."""

    class Read:
        pass

    read = Read()
    held = weakref.ref(read)
    for name in ("Stream", "CUDAGraph", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(decoding, "recorded", MagicMock())
    replay = decoding.captured(partial(type, read), lambda: None)
    del read
    assert held() is not None
    assert replay() is Read
    del replay
    assert held() is None
