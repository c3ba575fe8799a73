"""Multiple choice: questions are fair, and one run of trunk and branches has the scores of separate runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fast
from experiments.data.evaluation import (
    CHOICES,
    MultipleChoiceSettings,
    Stored,
    multiple_choice,
    score,
    stored,
    stored_plain,
)
from experiments.models.llama import LanguageModel
from experiments.models.quantized_model import is_weight_only, quantized_model, rounding
from reference import SCHEMES
from tests.experiments.harness import tiny

# Sizes against arithmetic by hand.

# A 256 x 512 tensor: bits of elements, then bytes of scales, of the outer level, of zero points.
BY_HAND = {
    "fp8_tensorwise": (8, 4, 0, 0),
    "fp8_rowwise": (8, 256 * 4, 0, 0),
    "fp8_128x128": (8, 2 * 4 * 4, 0, 0),
    "mxfp8_e4m3": (8, 256 * 16, 0, 0),
    "mxfp6_e2m3": (6, 256 * 16, 0, 0),
    "mxfp4": (4, 256 * 16, 0, 0),
    "nvfp4": (4, 256 * 32, 4, 0),
    "int3_g64": (3, 256 * 8 * 4, 0, 0),
    "int4_g128_asymmetric": (4, 256 * 4 * 4, 0, 256 * 4),
    "torchao.int4_g128_tinygemm": (4, 256 * 4 * 2, 0, 256 * 4 * 2),
    # 2048 blocks of 64; 8 blocks of 256 scales; one mean.
    "nf4": (4, 2048, 8 * 4, 4),
}


@pytest.mark.parametrize("scheme", BY_HAND)
def test_a_tensor_takes_what_it_takes(scheme):
    bits, scales, outer, zeros = BY_HAND[scheme]
    q = fast.quantize(torch.randn(256, 512), scheme)
    assert stored(q) == Stored(256 * 512 * bits // 8, scales, outer, zeros)


def test_a_model_takes_the_sum_of_its_parts(tmp_path):
    model = tiny.settings(tmp_path).trained.model
    made = quantized_model(model, "mxfp4", None)
    weights = sum(layer.weight.numel() for layer in model.linears().values())
    others = sum(parameter.numel() for parameter in model.parameters()) - weights
    # By hand: q and o 256 x 256, k and v 128 x 256, gate, up, down and lm_head 256 x 256; embedding and three norms.
    assert weights == 2 * 256 * 256 + 2 * 128 * 256 + 4 * 256 * 256
    assert others == 256 * 256 + 3 * 256
    assert made.linears == Stored(weights // 2, weights // 32)
    assert made.others == Stored(others * 4)
    assert (made.linears + made.others).total == weights // 2 + weights // 32 + others * 4


def test_plain_tensors_count_their_dtype():
    assert stored_plain(torch.zeros(3, 5, dtype=torch.bfloat16)).total == 30


@pytest.fixture(scope="module")
def questions():
    return multiple_choice(tiny.corpus(), tiny.MULTIPLE_CHOICE)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    made = LanguageModel(tiny.MODEL).eval().requires_grad_(False)
    for parameter in made.parameters():
        # Large enough that continuations differ clearly.
        parameter.mul_(3.0)
    return made


def test_windows_are_held_out_text_of_different_files(questions):
    held_out = {document.path: document.data for document in tiny.corpus().held_out}
    assert len(set(questions.documents)) == tiny.MULTIPLE_CHOICE.windows
    for path, tokens in zip(questions.documents, questions.tokens, strict=True):
        assert bytes(tokens[: tiny.MULTIPLE_CHOICE.context].tolist()) in held_out[path]


def test_choice_0_is_the_true_continuation_and_the_others_differ(questions):
    for tokens in questions.tokens:
        for question, position in enumerate(tiny.MULTIPLE_CHOICE.question_positions):
            choices = [bytes(tokens[target].tolist()) for target in questions.targets[question]]
            assert choices[0] == bytes(
                tokens[position : position + tiny.MULTIPLE_CHOICE.continuation].tolist()
            )
            assert len(set(choices)) == CHOICES


def test_the_seed_decides(questions):
    assert torch.equal(multiple_choice(tiny.corpus(), tiny.MULTIPLE_CHOICE).tokens, questions.tokens)
    other = tiny.replace(tiny.MULTIPLE_CHOICE, seed=1)
    assert not torch.equal(multiple_choice(tiny.corpus(), other).tokens, questions.tokens)


def test_branches_score_as_separate_texts_do(questions, model):
    scores = score(model, questions)
    for window, tokens in enumerate(questions.tokens):
        for question, position in enumerate(tiny.MULTIPLE_CHOICE.question_positions):
            totals = [
                in_a_run_of_its_own(model, tokens[:position], tokens[target])
                for target in questions.targets[question]
            ]
            assert scores.correct[window, question] == (totals[0] > max(totals[1:]))
            joined = in_one_run(model, questions, window, question)
            np.testing.assert_allclose(joined, totals, rtol=1e-4)


def in_a_run_of_its_own(model, prompt, continuation):
    text = torch.cat((prompt, continuation))
    likelihood = torch.log_softmax(model(text[None])[0].double(), dim=-1)
    steps = range(len(prompt), len(text))
    return sum(float(likelihood[step - 1, text[step]]) for step in steps)


def in_one_run(model, questions, window, question):
    logits = model(questions.tokens[window : window + 1], questions.positions, questions.mask)[0]
    likelihood = torch.log_softmax(logits.double(), dim=-1)
    targets = questions.targets[question]
    chosen = likelihood[questions.sources[question], questions.tokens[window][targets]]
    return chosen.sum(dim=-1).numpy()


def test_bits_per_byte_are_those_of_the_plain_window(questions, model):
    tokens = questions.tokens[:, : tiny.MULTIPLE_CHOICE.context]
    likelihood = torch.log_softmax(model(tokens).double(), dim=-1)
    chosen = likelihood[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    expected = -chosen.mean(dim=-1) / math.log(2)
    np.testing.assert_allclose(score(model, questions).bits_per_byte, expected, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "int8_tensorwise", "nvfp4", "mxfp8_e4m3"])
def test_windows_do_not_depend_on_each_other(model, scheme):
    questions = multiple_choice(tiny.corpus(), tiny.replace(tiny.MULTIPLE_CHOICE, windows=4))
    made = quantized_model(model, scheme, scheme).model
    one, all_at_once = (
        score(made, replace(questions, settings=tiny.replace(questions.settings, batch=batch)))
        for batch in (1, 4)
    )
    np.testing.assert_array_equal(one.bits_per_byte, all_at_once.bits_per_byte)
    np.testing.assert_array_equal(one.correct, all_at_once.correct)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_inputs_are_rounded_window_by_window(scheme):
    if is_weight_only(SCHEMES[scheme]):
        return
    x = (
        torch.randn(2, 32, 512, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 30.0])[:, None, None]
    )
    round_input = rounding(scheme)
    alone = torch.cat([round_input(window) for window in x.split(1)])
    assert torch.equal(round_input(x), alone)


def test_settings_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="fewer questions"):
        MultipleChoiceSettings(questions=100)
    with pytest.raises(ValueError, match="fewer windows"):
        multiple_choice(tiny.corpus(), tiny.replace(tiny.MULTIPLE_CHOICE, windows=50))
