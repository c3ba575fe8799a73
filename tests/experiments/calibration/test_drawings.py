"""The two pictures of experiment `calibration`: fronts, times with the choosing, and labels that cover nothing."""

import dataclasses
import itertools
import math
import random

import pytest

from experiments.calibration import choice, drawings, page, peers_page
from experiments.calibration.cases import ARMS
from experiments.harness.rows import Row
from experiments.report.fronts import front
from experiments.report.plots import Point, marker
from experiments.report.real_runs import CHANGE, KL, RECOVERED, real_runs

SETTINGS = {
    "int3_g64_asymmetric": 104.8, "int4_g64": 116.4, "nvfp4": 116.5, "nvfp4, inputs nvfp4": 116.5,
    "choice, 3 bits": 103.0, "choice, 4.25 bits": 112.0, "first and last layers in 8 bits, 3 bits": 103.5,
}  # fmt: skip


def made(table, setting, method, metric, value):
    return Row(experiment="calibration", table=f"real a-model/full/{table}", setting=setting, method=method, metric=metric,
               value=value, unit="", device="NVIDIA H200", seed=0)  # fmt: skip


@pytest.fixture(scope="module")
def run():
    """Every method in every scheme: values are drawn, in the range of real ones."""
    rows, draw = [], random.Random(0)
    for setting, size in SETTINGS.items():
        for arm in ("rounding", "gptq", "awq + gptq") if drawings.is_choice(setting) else ARMS:
            seconds = draw.uniform(0.5, 90.0)
            model = {"size": size * 1e6, "time to quantize": seconds}
            model |= {"time to choose, all budgets": 600.0} if setting.startswith("choice") else {}
            text = {KL: draw.uniform(0.05, 2.0)} | (
                {RECOVERED: draw.uniform(-10.0, 80.0)} if arm != "rounding" else {}
            )
            rows += [made("model", setting, arm, *one) for one in model.items()]
            rows += [made("wikitext", setting, arm, *one) for one in text.items()]
    (found,) = real_runs(rows)
    return found


def test_the_text_that_judges_chooses_no_method():
    """On each text another method loses least; of a run on one text there is no other to choose on."""
    losses = {"gptq": (0.1, 0.4), "awq": (0.3, 0.2), "hqq": (math.nan, 0.0)}
    rows = [
        made(text, "int4_g64", method, *one)
        for method, of_texts in losses.items()
        for text, loss in zip(("wikitext", "books"), of_texts, strict=True)
        for one in ((CHANGE, loss), (RECOVERED, -loss))
    ]
    (run,) = real_runs(rows)
    assert [run.chosen(text, "int4_g64", losses, CHANGE) for text in ("wikitext", "books")] == ["hqq", "gptq"]
    assert run.chosen("books", "int4_g64", losses, RECOVERED, most=True) == "gptq"
    assert run.chosen("books", "nvfp4", losses, CHANGE) == ""
    (lone,) = real_runs([row for row in rows if "wikitext" in row.table])
    assert lone.chosen("wikitext", "int4_g64", losses, CHANGE) == "gptq"
    rows += [made("model", "int4_g64", "GPTQModel", "time to quantize", 60.0)]
    (run,) = real_runs([*rows, *(made(text, "int4_g64", "GPTQModel", CHANGE, 0.15) for text in run.texts)])
    own = peers_page.COLUMNS.index("our best")
    assert [table.lines[0][own] for table in peers_page.tables(run)] == [
        run.chosen(text, "int4_g64", losses, CHANGE) for text in run.texts
    ]


def test_a_front_joins_what_nothing_further_left_is_better_than():
    points = [Point(x, y, "GPTQ") for x, y in ((2, 5), (1, 9), (3, 6), (4, 1), (2, 7), (5, 1))]
    assert [(one.x, one.y) for one in front(points)] == [(1, 9), (2, 5), (4, 1)]
    assert [(one.x, one.y) for one in front(points, most=True)] == [(1, 9)]
    assert [
        (one.x, one.y) for one in drawings.steps(front([Point(1, 1, ""), Point(2, 3, "")], most=True))
    ] == [(1, 1), (2, 1), (2, 3)]


def test_minutes_hold_the_choosing_and_are_not_floored(run):
    points = {
        one.label: one.x for one in drawings.minutes_and_shares(run, run.texts["wikitext"], "choice, 3 bits")
    }
    quantizing = run.whole.value("choice, 3 bits", "gptq", "time to quantize")
    assert points["gptq"] == pytest.approx((600.0 + quantizing) / 60)
    fast = [
        made("model", "nvfp4", "gptq", "time to quantize", 0.02),
        made("wikitext", "nvfp4", "gptq", RECOVERED, 50.0),
    ]
    (other,) = real_runs(fast)
    (point,) = drawings.minutes_and_shares(other, other.texts["wikitext"], "nvfp4")
    assert point.x == pytest.approx(0.02 / 60)


def test_the_picture_of_bytes_has_a_line_for_each_kind(run):
    found = drawings.fronts_of(list(drawings.sizes_and_losses(run, run.texts["wikitext"], False)))
    assert set(found) == {"rounding", "methods with data", "automatic choice", "rule by hand"}
    assert {one.x for one in found["automatic choice"][1]} <= {103.0, 112.0}
    figure = drawings.bytes_drawing(run).figure
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title(loc="left") for axis in shown] == [
        "wikitext: weights",
        "wikitext: weights and inputs",
    ]
    words = {text.get_text() for text in shown[0].texts}
    assert {
        "rounding",
        "methods with data",
        "automatic choice",
        "int3_g64_asymmetric",
        "int4_g64, nvfp4",
    } <= words
    assert shown[0].get_yscale() == "log"
    assert not any("8 bits" in word for word in words), "a rule's name stands over no size"


def test_choices_share_a_panel_and_rules_have_none(run):
    titles = [axis.get_title(loc="left") for axis in drawings.minutes_drawing(run).figure.axes]
    assert titles[:5] == [*list(SETTINGS)[:4], "automatic choice"]
    assert {point.label for point in drawings.choices(run, run.texts["wikitext"])} == {
        f"{arm}, {bits} bits" for arm in ("gptq", "awq + gptq") for bits in ("3", "4.25")
    }


def test_a_choice_is_told_beside_each_rule_and_is_no_scheme(run):
    rule, over = "first and last layers in 8 bits, 3 bits", choice.OVER
    said = {over: 0.8, choice.OVER_ERROR: 0.01, "windows": 32, "tokens of a window": 2048}
    rows = [*run.whole.rows, *run.texts["wikitext"].rows, made("model", rule, "gptq", "rule: int3", 1.0)]
    rows += [made("wikitext", rule, "gptq", *one) for one in said.items()]
    *schemes, told = page.findings(rows)
    assert "within 3 bits KL" in told
    assert "0.800 ± 0.020 times that of int3" in told
    assert not any("bits" in one for one in schemes)


def test_labels_cover_no_label_and_no_point_of_another(run):
    """Of 17 methods a panel: at most one in fifty pairs may touch where points lie together, on a phone one in twenty."""
    few = dataclasses.replace(run, whole=run.whole.with_settings(list(SETTINGS)[:3]))
    drawing = drawings.minutes_drawing(few)
    for figure, part in ((drawing.figure, 50), (drawing.narrow, 20)):
        for axis in (axis for axis in figure.axes if axis.get_visible()):
            boxes = [text.get_window_extent() for text in axis.texts if text.get_text()]
            pairs = list(itertools.combinations(boxes, 2))
            assert sum(bool(one.overlaps(other)) for one, other in pairs) <= len(pairs) / part
            assert axis.get_xscale() == "log"
        labels = {text.get_text() for text in figure.axes[0].texts} - {""}
        assert labels == set(ARMS) - {"rounding"}


def test_words_over_sizes_name_schemes_and_methods_that_store_more():
    """And families are told apart without colours."""
    found = {"rounding": 100.0, "gptq": 100.5, "low rank": 120.0, "gptq + low rank": 120.0}
    points = [
        ("int3_g64", Point(x, 1.0, drawings.family_of(name), "", f"{name}, int3_g64"))
        for name, x in found.items()
    ]
    assert drawings.places_of(points) == {"int3_g64": 100.0, "low rank": 120.0}
    assert len({marker(drawings.COLORS, family) for family in drawings.COLORS}) == len(drawings.COLORS)
    assert drawings.family_of("low rank") == "low rank"
