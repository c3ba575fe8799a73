"""The page of experiment `qat_overhead`: targets of the real shapes alone, published values, what was not measured."""

import pytest

from experiments.harness import registry
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, publish
from experiments.models.llama import LLAMA_3_2_3B, LLAMA_3_8B_TWO_LAYERS, TINY_TWO_LAYERS
from experiments.qat_overhead import page as qat_overhead_page
from experiments.qat_overhead.page import MEMORY, TIME, missed, overheads, published
from experiments.qat_overhead.step import INT4, INT8_INT4, LORA, PLAIN, VARIANTS
from experiments.report import pages
from experiments.report.results import Results

COSTS = {"ours": (6.5, 2.0), LORA: (-10.0, -20.0), "torchao": (80.0, 70.0), "bfloat16": (0.0, 0.0)}


def row(method, metric, value, data=LLAMA_3_8B_TWO_LAYERS.name, setting="eager"):
    return Row(
        experiment="qat_overhead",
        table=f"qat_overhead/full/{data}",
        setting=setting,
        method=method,
        metric=metric,
        value=value,
        unit="",
        device="a GPU",
        seed=0,
    )


def rows(data=LLAMA_3_8B_TWO_LAYERS.name, costs=COSTS):
    made = []
    for setting in ("eager", "compiled"):
        for variant in VARIANTS:
            time, memory = costs[LORA if variant.lora else variant.library]
            made.append(row(variant.method, "status: ok", 1.0, data, setting))
            made.append(row(variant.method, TIME, time, data, setting))
            made.append(row(variant.method, MEMORY, memory, data, setting))
            if variant is PLAIN:
                made.append(row(variant.method, "time again over plain", 0.25, data, setting))
            else:
                made.append(row(variant.method, "bytes to round", 8.6, data, setting))
    return made


def text(section):
    return " ".join(section.paragraphs)


def test_targets_are_of_ours_alone():
    assert missed(Results(rows())) == []
    late = missed(Results(rows(costs={**COSTS, "ours": (8.04, 5.5)})))
    assert len(late) == 8
    assert late[:2] == [
        f"ours, {INT8_INT4}, eager: time over plain 8.04 of 8 %",
        f"ours, {INT8_INT4}, eager: peak memory over plain 5.5 of 5 %",
    ]
    assert f"ours, {INT4}, compiled: peak memory over plain 5.5 of 5 %" in late
    late = missed(Results(rows(costs={**COSTS, LORA: (0.5, -20.0)})))
    assert late[0] == f"ours, {INT8_INT4}, LoRA, eager: time over plain 0.5 of 0 %"
    assert len(late) == 2
    assert missed(Results([])) == []


def test_published_costs_follow_from_published_rates():
    found = {(model, hardware, source[:12]): costs for model, hardware, source, _, *costs in overheads()}
    # 1408.8 and 737.7 tokens a second, 13.8 and 14.5 GB: -47.6% is +91%.
    time, memory = found["Llama-3.2-3B", "GPU not stated", "pytorch/ao c"]
    assert (time, memory) == (pytest.approx(90.97, abs=0.01), pytest.approx(5.07, abs=0.01))
    time, memory = found["Llama-3-8B", "GPU not stated", "pytorch/ao c"]
    assert (time, memory) == (pytest.approx(48.7, abs=0.01), pytest.approx(86.9, abs=0.05))
    assert len(found) == 5
    assert {one.model for one in published()} == {"Llama-3-8B", "Llama-3.2-3B"}
    assert all(one.source for one in published())


def test_sections_of_the_real_shapes():
    (section,) = qat_overhead_page.sections(rows())
    assert section.title == f"Two blocks of Llama-3-8B (full scale, a GPU, {LLAMA_3_8B_TWO_LAYERS.name})"
    assert "All 12 values that have a target meet it." in text(section)
    assert "**Targets of ours**: 8% time and 5% peak memory" in text(section)
    assert "eager +0.25%, compiled +0.25%" in text(section)
    assert len(section.drawings) == 1
    (table,) = section.tables
    assert len(table.lines) == 2 * len(VARIANTS)
    assert all(len(line) == len(table.columns) for line in table.lines)
    (late,) = qat_overhead_page.sections(rows(costs={**COSTS, "ours": (9.0, 1.0)}))
    assert text(late).startswith(
        "**Missed targets: 4.** ours, int8 dynamic, int4 g32, eager: time over plain 9.0 of 8 %"
    )


def test_published_values_stand_beside_the_whole_model_alone():
    (whole,) = qat_overhead_page.sections(rows(LLAMA_3_2_3B.name))
    assert [table.caption for table in whole.tables][-1] == "Published, for comparison"
    assert "arget" not in text(whole)
    (stand_in,) = qat_overhead_page.sections(rows(TINY_TWO_LAYERS.name, {**COSTS, "ours": (900.0, 0.0)}))
    assert stand_in.paragraphs[0].startswith("**A stand-in**")
    assert len(stand_in.tables) == 1
    assert not stand_in.drawings
    assert "issed targets" not in text(stand_in)


def test_published_ratios_are_beside_the_same_model_and_recipe():
    found = [
        one for one in qat_overhead_page.comparisons(rows(LLAMA_3_2_3B.name)) if one.measured is not None
    ]
    assert [(one.model, one.method, one.metric) for one in found] == [
        ("Llama-3.2-3B", "QAT 8da4w", "throughput over plain training"),
        ("Llama-3.2-3B", "QAT 8da4w", "peak memory over plain training"),
    ]
    assert found[0].published == pytest.approx(0.524)
    assert found[0].measured == pytest.approx(1 / 1.065)
    assert found[1].measured == pytest.approx(1.02)
    others = qat_overhead_page.comparisons([*rows(), *rows(TINY_TWO_LAYERS.name)])
    assert len(others) == len(published())
    assert {one.measured for one in others} == {None}


def test_what_was_not_measured_is_said():
    made = [one for one in rows() if one.method != f"torchao, {INT4}"]
    made.append(row(f"torchao, {INT4}", "status: missing: torchao is not installed", 0.0))
    (section,) = qat_overhead_page.sections(made)
    assert f"**Not measured: 1.** torchao, {INT4}, eager (missing: torchao is not installed)." in text(
        section
    )


def test_the_page_is_written(tmp_path):
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    publish(
        places.data / "qat_overhead.csv", [*rows(), *rows(LLAMA_3_2_3B.name), *rows(TINY_TWO_LAYERS.name)]
    )
    page = pages.make_page(places, "qat_overhead")
    assert page is not None
    assert len(page.sections) == 3
    assert len(page.pictures) == 2
    assert registry.EXPERIMENTS["qat_overhead"].part_of == "qat"
