"""Targets of accuracy: which method is held to a bound, on which text, and what was not measured."""

from pathlib import Path

import pytest

from experiments.calibration import page
from experiments.calibration.choice import CHOSEN_BY, OVER, RULES, setting
from experiments.models.causal_lm import MODEL, REAL
from experiments.report.real_runs import CHANGE, RECOVERED
from experiments.runs.settings import Settings

WIKITEXT, BOOKS = "wikitext-2-v1-test", "books-held-out"
#: By text and method: perplexity, change of the loss, and what is recovered of the KL divergence.
VALUES = {
    WIKITEXT: {"bfloat16": (20, 0, None), "rounding": (60, 1.1, None), "gptq": (30, 0.4, 60), "awq": (25, 0.2, 70)},
    BOOKS: {"bfloat16": (30, 0, None), "rounding": (90, 1.1, None), "gptq": (50, 0.5, 65), "awq": (60, 0.7, -5)},
}  # fmt: skip


def rows(scale="full", model="SmolLM2-135M"):
    here = Settings(scale=scale, device="cpu", cache=Path("nowhere"))
    made = here.rows("calibration", f"{REAL}{model}", MODEL, "file", "file", {"parameters": (1.0, "")})
    for text, methods in VALUES.items():
        for method, (perplexity, change, recovered) in methods.items():
            values = {"perplexity": (perplexity, ""), CHANGE: (change, "nat")}
            values |= {} if recovered is None else {RECOVERED: (recovered, "%")}
            setting = "weights" if method == "bfloat16" else "int3_g64_asymmetric"
            made += here.rows("calibration", f"{REAL}{model}", text, setting, method, values)
    return made


def test_the_method_is_the_one_that_does_best_on_the_other_text():
    """GPTQ on WikiText-2, AWQ on books, which is worse than rounding there."""
    (found,) = page.targets_by_run(rows())
    assert [(str(one), one.reached) for one in found.targets] == [
        (f"int3_g64_asymmetric, {WIKITEXT}: loss, change 0.400 of 0.5 nat", True),
        (f"int3_g64_asymmetric, {WIKITEXT}: perplexity gap closed 75.0 of 60 %", True),
        (f"int3_g64_asymmetric, {BOOKS}: perplexity gap closed 50.0 of 60 %", False),
        (f"every scheme, {WIKITEXT}: least recovered 60.0 of 0 %", True),
        (f"every scheme, {BOOKS}: least recovered -5.0 of 0 %", False),
    ]


def test_a_choice_is_held_to_rules_of_its_size():
    """By the method over which it was chosen alone."""
    here = Settings(scale="full", device="cpu", cache=Path("nowhere"))
    made = rows()
    for rule, method, over in (
        (RULES[0], CHOSEN_BY, 0.96),
        (RULES[1], CHOSEN_BY, 0.9),
        (RULES[1], "gptq", 1.5),
    ):
        values = {OVER: (over, "")}
        made += here.rows("calibration", f"{REAL}SmolLM2-135M", BOOKS, setting(3.0, rule), method, values)
    (found,) = page.targets_by_run(made)
    assert [(str(one), one.reached) for one in found.targets if OVER in one.name] == [
        (f"one scheme for all layers, 3 bits, {BOOKS}: {OVER} 0.960 of 0.95", False),
        (f"first and last layers in 8 bits, 3 bits, {BOOKS}: {OVER} 0.900 of 1", True),
    ]


@pytest.mark.parametrize("left", ["rounding", "bfloat16"])
def test_a_gap_needs_both_its_ends(left):
    some = [row for row in rows() if row.method != left]
    assert not [one for one in page.targets_by_run(some)[0].targets if "gap" in one.name]


def test_short_runs_are_held_to_nothing():
    assert page.targets_by_run(rows("quick")) == []


def test_losses_of_another_model_are_held_to_no_bound_of_this_one():
    names = [one.name for one in page.targets_by_run(rows(model="gemma-3-270m"))[0].targets]
    assert len(names) == 4
    assert not [one for one in names if CHANGE in one]
