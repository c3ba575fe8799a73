"""Programs out of answers, and the share of them that passes beside the dense model's."""

import pytest

from experiments.data.programs import Problem
from experiments.models import programs
from experiments.models.programs import BEGUN, Programs, answers, code_of, programs_of, prompt_of
from tests.support.models.hf_models import save_llama

HEAD = 'import math\ndef f(x):\n    """One more."""\n'
PROBLEM = Problem("T/0", HEAD, "def check(g): assert g(1) == 2", "f", "    return x + 1\n")


@pytest.mark.parametrize(
    ("answer", "chat", "code"),
    [
        ("def f(x):\n    return 1\n```\nIt works.", True, "import math\ndef f(x):\n    return 1"),
        ("    return 1\n```", True, PROBLEM.prompt + "    return 1"),
        (
            "    y = g(\n)\n    return y\nprint(f(1))\n    z",
            False,
            PROBLEM.prompt + "    y = g(\n)\n    return y",
        ),
        ("    return 1\n# more", False, PROBLEM.prompt + "    return 1"),
    ],
)
def test_code_ends_where_the_block_or_the_body_ends(answer, chat, code):
    assert code_of(PROBLEM, answer, chat) == code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("models")
    save_llama(made)
    (made / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}'
    )
    return made


def test_answers_come_in_batches_of_any_size(folder, monkeypatch):
    """Padding is on the left, so that each answer begins where its prompt ends."""
    from experiments.models.causal_lm import load, of_folder

    monkeypatch.setattr(programs, "TOKENS", 3)
    short = Problem("T/1", "def g():\n", "", "g", "")
    model = load(of_folder(folder), "cpu").float()
    made = programs_of(folder, model, (short, short))
    assert made.tokenizer.pad_token == "!"
    together = answers(model, made.tokenizer, [short, short])
    assert together == answers(model, made.tokenizer, [short]) * 2
    assert prompt_of(short, made.tokenizer) == short.prompt
    made.tokenizer.chat_template = "{{ messages[0].content }}|"
    asked = prompt_of(short, made.tokenizer)
    assert asked.endswith("|" + BEGUN)
    assert "def g():" in asked


def test_changes_are_paired_with_the_dense_model(monkeypatch):
    base, model = object(), object()
    found = {base: [1.0, 1.0, 0.0, 0.0], model: [1.0, 0.0, 0.0, 1.0]}
    made = Programs((PROBLEM,) * 4, None, base)
    asked = []
    monkeypatch.setattr(Programs, "outcomes", lambda self, one: asked.append(one) or found[one])
    values = made.values(model)
    assert (values["HumanEval: pass@1"][0], values["HumanEval: pass@1, change"][0]) == (50, 0)
    assert values["HumanEval: pass@1, standard error of the change"][0] == pytest.approx(
        100 * (2 / 3 / 4) ** 0.5
    )
    assert made.values(base)["HumanEval: pass@1, standard error of the change"][0] == 0
    assert asked == [base, model], "the dense model is asked once"
