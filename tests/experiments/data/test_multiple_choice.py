"""The exam: questions are fair, and one run of trunk and branches scores what separate runs would."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.data.multiple_choice import CHOICES, ExamSettings, make_exam, score
from experiments.models.activation_schemes import weights_only_by_nature
from experiments.models.language_model import LanguageModel
from experiments.models.quantized_model import quantized_model, rounding
from reference import SCHEMES
from tests.experiments.harness import tiny


@pytest.fixture(scope="module")
def exam():
    return make_exam(tiny.corpus(), tiny.EXAM)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    made = LanguageModel(tiny.MODEL).eval().requires_grad_(False)
    for parameter in made.parameters():
        # Large enough that continuations differ clearly.
        parameter.mul_(3.0)
    return made


def test_windows_are_held_out_text_of_different_files(exam):
    held_out = {document.path: document.data for document in tiny.corpus().held_out}
    assert len(set(exam.documents)) == tiny.EXAM.windows
    for path, tokens in zip(exam.documents, exam.tokens, strict=True):
        assert bytes(tokens[: tiny.EXAM.context].tolist()) in held_out[path]


def test_choice_0_is_the_true_continuation_and_the_others_differ(exam):
    for tokens in exam.tokens:
        for question, place in enumerate(tiny.EXAM.places):
            choices = [bytes(tokens[target].tolist()) for target in exam.targets[question]]
            assert choices[0] == bytes(tokens[place : place + tiny.EXAM.continuation].tolist())
            assert len(set(choices)) == CHOICES


def test_the_seed_decides(exam):
    assert torch.equal(make_exam(tiny.corpus(), tiny.EXAM).tokens, exam.tokens)
    other = tiny.replace(tiny.EXAM, seed=1)
    assert not torch.equal(make_exam(tiny.corpus(), other).tokens, exam.tokens)


def test_branches_score_as_separate_texts_do(exam, model):
    scores = score(model, exam)
    for window, tokens in enumerate(exam.tokens):
        for question, place in enumerate(tiny.EXAM.places):
            totals = [alone(model, tokens[:place], tokens[target]) for target in exam.targets[question]]
            assert scores.correct[window, question] == (totals[0] > max(totals[1:]))
            joined = together(model, exam, window, question)
            np.testing.assert_allclose(joined, totals, rtol=1e-4)


def alone(model, prompt, continuation):
    text = torch.cat((prompt, continuation))
    likelihood = torch.log_softmax(model(text[None])[0].double(), dim=-1)
    steps = range(len(prompt), len(text))
    return sum(float(likelihood[step - 1, text[step]]) for step in steps)


def together(model, exam, window, question):
    logits = model(exam.tokens[window : window + 1], exam.positions, exam.mask)[0]
    likelihood = torch.log_softmax(logits.double(), dim=-1)
    targets = exam.targets[question]
    picked = likelihood[exam.sources[question], exam.tokens[window][targets]]
    return picked.sum(dim=-1).numpy()


def test_bits_per_byte_are_those_of_the_plain_window(exam, model):
    tokens = exam.tokens[:, : tiny.EXAM.context]
    likelihood = torch.log_softmax(model(tokens).double(), dim=-1)
    picked = likelihood[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    expected = -picked.mean(dim=-1) / math.log(2)
    np.testing.assert_allclose(score(model, exam).bits_per_byte, expected, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "int8_tensorwise", "nvfp4", "mxfp8_e4m3"])
def test_windows_do_not_depend_on_each_other(model, scheme):
    exam = make_exam(tiny.corpus(), tiny.replace(tiny.EXAM, windows=4))
    made = quantized_model(model, scheme, scheme).model
    one, all_at_once = (
        score(made, replace(exam, settings=tiny.replace(exam.settings, batch=batch))) for batch in (1, 4)
    )
    np.testing.assert_array_equal(one.bits_per_byte, all_at_once.bits_per_byte)
    np.testing.assert_array_equal(one.correct, all_at_once.correct)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_inputs_are_rounded_window_by_window(scheme):
    if weights_only_by_nature(SCHEMES[scheme]):
        return
    x = (
        torch.randn(2, 32, 512, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 30.0])[:, None, None]
    )
    round_input = rounding(scheme)
    alone = torch.cat([round_input(window) for window in x.split(1)])
    assert torch.equal(round_input(x), alone)


def test_impossible_exams_say_why():
    with pytest.raises(ValueError, match="fewer questions"):
        ExamSettings(questions=100)
    with pytest.raises(ValueError, match="fewer windows"):
        make_exam(tiny.corpus(), tiny.replace(tiny.EXAM, windows=50))
