"""Targets of made-up rows: limits, what is compared with what, what was not measured."""

from dataclasses import replace

import pytest

from experiments.fp8_training import blocks, convergence_page
from experiments.harness.rows import Row
from experiments.report.results import Results, Where

GPU = "a GPU"
EAGER, COMPILED = (blocks.blocks(2, compiled=one).setting for one in (False, True))


def results(*values):
    """Rows of (setting, method, metric, value)."""
    facts = {
        "experiment": "fp8_training",
        "table": "k/full/d",
        "unit": "",
        "device": GPU,
        "seed": 0,
    }
    names = ("setting", "method", "metric", "value")
    return Results(Row(**dict(zip(names, one, strict=True)), **facts) for one in values)


def reached(found):
    return {one.name: one.verdict for one in found if one.value is not None}


def test_each_accumulation_has_its_limit():
    where = Where("full", GPU, "16384x4096x14336")
    values = [
        ("eager", f"ours, {name}", convergence_page.TIME_RATIO, 0.62)
        for name in ("rowwise", "rowwise, fast sums", "mxfp8")
    ]
    found = convergence_page.of_linear(where, results(*values))
    assert len(found) == 2 * 5
    assert reached(found) == {
        "ours, rowwise, fast sums, eager: time over bfloat16": "no",
        "ours, rowwise, eager: time over bfloat16": "yes",
        "ours, mxfp8, eager: time over bfloat16": "yes",
    }
    assert convergence_page.of_linear(Where("full", "cpu", where.data), results(*values)) == []
    assert convergence_page.verdict(found) == [
        "**Missed targets: 1 of 3, 7 not measured.** ours, rowwise, fast sums, eager: time over bfloat16 0.620 of 0.6."
    ]
    rows = [replace(row, table=f"linear/full/{where.data}") for row in results(*values).rows]
    assert convergence_page.finding(rows) == [
        "Targets of speed and memory reached, full scale on a GPU: 2 of 3, 39 not measured."
    ]
    assert convergence_page.finding([replace(row, metric="other") for row in rows]) == []
    assert convergence_page.finding([]) == []
    assert convergence_page.verdict([one for one in found if one.reached]) == [
        "All 2 values that have a target meet it."
    ]
    assert convergence_page.verdict([one for one in found if one.value is None]) == [
        "None of the 7 targets was measured."
    ]
    assert convergence_page.verdict([]) == []
    (table,) = convergence_page.target_table(found)
    assert ["ours, mxfp8, eager: time over bfloat16", "0.620", "≤ 1.11", "yes"] in table.lines
    assert ["ours, mxfp8, CUDA graph: time over bfloat16", "", "≤ 1.11", ""] in table.lines


@pytest.mark.parametrize(("compiled", "verdict"), [(1.0, "yes"), (0.5, "no"), (None, "yes")])
def test_small_layers_are_compared_with_the_best_of_torchao(compiled, verdict):
    values = [("eager", "ours, rowwise", "time", 0.4), ("eager", "torchao, rowwise", "time", 0.9)]
    values += [] if compiled is None else [("eager", "torchao, rowwise, compiled", "time", compiled)]
    found = convergence_page.of_linear(Where("full", GPU, "2048x1024x1024"), results(*values))
    assert len(found) == 3
    assert reached(found) == {"ours, rowwise, eager: time over torchao's best": verdict}


def test_blocks():
    name, where = "ours, rowwise", Where("full", GPU, blocks.LLAMA_3_8B_TWO_LAYERS.name)
    times = {
        (EAGER, "bfloat16"): 13.0,
        (COMPILED, "bfloat16"): 12.0,
        (EAGER, name): 9.0,
        (COMPILED, name): 10.0,
    }
    values = [(*key, "time", value) for key, value in times.items()]
    values += [
        (COMPILED, name, convergence_page.SPEED_RATIO, 1.2),
        (EAGER, name, convergence_page.MEMORY_RATIO, 1.001),
    ]
    found = convergence_page.of_blocks(where, results(*values))
    assert len(found) == 4 * 4 + 2 * 2
    best, against, memory = (one for one in found if one.value is not None)
    # Eager is ours at its best, compiled bfloat16's.
    assert (best.value, best.verdict) == (12.0 / 9.0, "yes")
    assert (against.value, against.verdict) == (0.9, "yes")
    assert memory.verdict == "no"
    assert str(memory).endswith("1.001 of 1")
    assert convergence_page.of_blocks(Where("full", GPU, "another"), results(*values)) == []


def test_gaps_that_are_decided_have_a_target():
    """A gap whose interval holds the margin of 0.5 percent neither reaches nor misses it."""
    gaps = {"rowwise": (0.04, 0.2), "mxfp4": (2.4, 0.4), "nvfp4": (1.0, 0.6)}
    facts = {"experiment": "fp8_training", "table": "gaps/full/books", "unit": "%", "device": GPU, "seed": 0}
    rows = [
        Row(setting="30m", method=method, metric=f"gap, bits per byte, heldout{end}", value=value, date="2026-11-26T", **facts)
        for method, (mean, half) in gaps.items()
        for end, value in (("", mean), (", 95% interval", half), (", seeds", 5.0))
    ]  # fmt: skip
    (run,) = convergence_page.targets_by_run(rows)
    assert {one.name: (one.verdict, one.day) for one in run.targets} == {
        "rowwise, bits per byte, heldout (95% interval ± 0.20)": ("yes", "2026-11-26"),
        "mxfp4, bits per byte, heldout (95% interval ± 0.40)": ("no", "2026-11-26"),
    }
    assert convergence_page.targets_by_run([replace(row, table="gaps/quick/books") for row in rows]) == []
