"""Expressions from elsewhere: the answers of `re.match`, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ao_lab.checkpoint.io.patterns import LARGEST_COUNT, LONGEST, Pattern

NAMES = (
    "", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.experts.3.down_proj",
    "model.layers.1.mlp.gate", "visual.blocks.2.attn.qkv", "a\n", "ß_1", "model.layers.0.mlp.gate_proj",
)  # fmt: skip
#: Expressions as published configurations have them, and one for each part of the language.
EXPRESSIONS = (
    ".*lm_head", "lm_head$", r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj$", ".*mlp.gate$", r"visual.*", ".*experts.*",
    r"^(?!.*experts).*proj", r".*mlp\.(gate|up|down)_proj$", r"^model.layers.[0-9]+\.", r".*\.(?=q_proj)", "(?:lm|LM)_head",
    r"[^.]+$", r".*(?<=down)_proj", r".*(?<!gate)_proj$", r"\w+\b.", r".*\Bead", r".{3,5}d", "a??", "[a-f0-9_]*x?", r"\Z", "$",
    "a$", r"(model|visual)\W(\D+\d)*", "", "a|", r"[\d\s]*", r"[^\w.]", r"\S+",
)  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_re(text, name):
    assert Pattern(text).matches(name) is bool(re.match(text, name))


PARTS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "[ab]",
        "[^a]",
        "a*",
        "b+?",
        ".*",
        "a?",
        "(a|b)",
        "(?:ab|b)",
        "^",
        "$",
        r"\b",
        "(?!b)",
        "(?=a)",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PARTS, max_size=6).map("".join),
    st.text("ab\n_", max_size=8),
    st.sampled_from(["{}", "(?:{})*", "(?:{}){{1,3}}"]),
)
@example("a*", "", "(?:{})*")
def test_answers_of_any_expression_are_those_of_re(parts, name, whole):
    text = whole.format(parts)
    assert Pattern(text).matches(name) is bool(re.match(text, name))


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*$", "(.*a)*b", "(a*)*b", ".*" * 200 + "b"])
def test_no_expression_takes_long(text):
    start = time.perf_counter()
    assert not Pattern(text).matches("a" * 120 + "!")
    assert time.perf_counter() - start < 20  # re needs longer than anybody waits for the first four


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "no regular expression"),
        (r"(a)\1", "groupref is not followed"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?>a*)", "not followed"),
        ("a*+", "not followed"),
        ("((a*)*)*", "nest"),
        ("(?=(?=(?=a)))", "nest"),
        (f"a{{{LARGEST_COUNT + 1}}}", "count"),
        ("a" * (LONGEST + 1), "characters"),
        ("(" * 500, "no regular expression"),
    ],
)  # fmt: skip
def test_other_expressions_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Pattern(text)


def test_names_have_a_length():
    with pytest.raises(ValueError, match="longer than any"):
        Pattern("a*").matches("a" * 2000)
