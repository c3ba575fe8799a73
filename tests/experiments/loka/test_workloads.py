"""Workloads of `loka`: which lines a run has, what they measure on small models, and what the page says of them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import ao_lab
from ao_lab.gemm.choices import SUBSETS
from experiments.harness.measuring import Deadline, Stages
from experiments.harness.rows import Journal, Row, interval
from experiments.loka import (
    dense_speed,
    fused_speed,
    page,
    policies,
    run,
    shape_speed,
    speed_page,
    table_speed,
    trajectory,
    workloads,
    workloads_page,
)
from experiments.models import wukong
from experiments.models.click_training import ClickTraining
from experiments.models.dlrm import DLRMConfig
from experiments.report.results import by_run
from experiments.runs.settings import Settings

TINY = DLRMConfig(
    name="tiny", dense=4, sizes=(5, 7), hots=(1, 1), width=128, bottom=(128,), cross=1, rank=128, top=(256,), norm=True
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A plan of few steps."""
    training = ClickTraining(steps=3, batch=64, evaluated=300)
    plan = replace(trajectory.PLANS["quick"], data={trajectory.DRAWN: 3}, training=training)
    monkeypatch.setitem(trajectory.PLANS, "quick", plan)
    policies.decisions.cache_clear()
    yield
    policies.decisions.cache_clear()


def settings(tmp_path, device="cpu", scale="quick"):
    return Settings(scale=scale, device=device, cache=tmp_path)


def test_lines(tmp_path):
    quick = settings(tmp_path)
    lines = [*workloads.trajectory_lines(quick), *workloads.policy_lines(quick)]
    assert len({(one.setting, one.method, one.seed) for one in lines}) == len(lines)
    trainings = [(one.method, one.seed) for one in workloads.trajectory_lines(quick)]
    assert trainings == [("base", 0), ("rowwise", 0), ("base", 1), ("rowwise", 1), ("mods", 0), ("mods", 1)]
    assert not [*workloads.speed_lines(quick)]
    full = settings(tmp_path, "cuda", "full")
    # Three data of impressions with two models, two of histories.
    assert len([*workloads.trajectory_lines(full)]) == 8 * (
        3 * 2 * len(trajectory.CHANGES) + 2 * len(trajectory.RECIPES)
    )
    timed = [*workloads.speed_lines(full), *workloads.shape_lines(full)]
    assert {line.kind for line in timed} == set(workloads.IN_TURN)
    order = [line.setting for line in timed]
    # Tables, what a deadline left without rows, and minutes of compilation last.
    assert order.index("Zipf ids") < order.index("6144 x 4608 x 4096") < order.index("Wukong 22.2 GFLOP")
    assert order.index("Wukong 22.2 GFLOP") < order.index("DLRMv2-DCN") < order.index("Wukong 5.6 GFLOP")
    assert not [*workloads.shape_lines(quick)]


def rows_of(tmp_path):
    """What a run on a CPU finds, as rows."""
    quick = settings(tmp_path)
    return run.run(replace(quick, only=("trajectory", "policies")))


def test_a_run_and_its_page(tmp_path, small):
    rows = rows_of(tmp_path)
    values = {(r.setting, r.method, r.metric): r.value for r in rows}
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    losses = {(r.method, r.seed): r.value for r in rows if r.metric == trajectory.LOG_LOSS}
    gaps = [100 * (losses["rowwise", seed] / losses["base", seed] - 1) for seed in (0, 1)]
    (runs,) = by_run(rows, trajectory.TRAJECTORY).values()
    told = {one.method: one for one in workloads_page.qualities(runs)}
    assert (told["rowwise"].gap, told["rowwise"].seeds, told["base"].gap) == (interval(gaps), 2, None)
    ours = values["DCN", policies.OURS, policies.SECONDS]
    fits = {m for (s, m, metric), v in values.items() if metric == policies.FITS and v}
    assert "uniform dense" in fits
    assert all(ours <= values["DCN", m, policies.SECONDS] + 1e-9 for m in fits)
    sections = workloads_page.sections(rows)
    assert [one.title.split(" (")[0] for one in sections] == [
        "Quality over paired seeds",
        "Policies of training",
    ]
    text = " ".join(workloads_page.findings(rows))
    assert "the knapsack's step takes" in text
    assert "log loss" not in text  # of a few steps
    full = [replace(one, table=one.table.replace("quick", "full")) for one in rows]
    assert (
        "Relative log loss of rowwise over paired seeds: DCN on drawn-ratings"
        in workloads_page.findings(full)[0]
    )
    assert workloads_page.targets_by_run(rows)
    assert workloads_page in page.PAGES


def given_times(model, sample_input, recipes, names, launches):
    """Of `dispatch_` without a GPU: the more products are in 8 bits, the quicker."""
    return {
        name: {(one.name, part): 1 - 0.1 * len(part.split("+")) for one in recipes for part in SUBSETS}
        for name in names
    }


def test_a_dense_part_is_timed_by_methods_in_turn(monkeypatch):
    """One that fails has a row that says why, and the others their times; after the deadline nothing starts."""
    monkeypatch.setitem(dense_speed.MODS, "unknown", ("no such mod",))
    choose, given = ao_lab.dispatch_, {"measure": given_times, "confirm": False}
    monkeypatch.setattr(dense_speed.ao_lab, "dispatch_", lambda *a, **more: choose(*a, **more | given))
    one = dense_speed.dcn(TINY, 64)
    methods = ("bfloat16", "rowwise", dense_speed.STORED, "dispatch", "all three", "unknown")
    found = dense_speed.measure(one, methods, "cpu", Deadline(None), compiled=False)
    for method in methods[:-1]:
        assert (dense_speed.FORWARD in found[method]) == (method in dense_speed.INFERENCE)
        assert (dense_speed.BOTH in found[method]) == (method != dense_speed.STORED)
    (why,) = found["unknown"]
    assert "unknown mod 'no such mod'" in why
    late = dense_speed.measure(one, methods, "cpu", Deadline(-1), compiled=False)
    assert all(one.startswith("status: not run") for values in late.values() for one in values)


def test_a_method_starts_where_it_would_end_in_time(capsys):
    """By the longest so far; each stage is a line with its seconds."""
    now = [0.0]

    def last(seconds):
        now[0] += seconds
        stages.done("worked")
        return {"x": (1.0, "")}

    stages = Stages("case", Deadline(50.0, clock=lambda: now[0]))
    # 20 s are left, the longest took 30, and 10 beyond the end are none too many.
    found = [stages.method(lambda seconds=seconds: last(seconds)) for seconds in (30.0, 0.5, 30.0)]
    assert [("status: ok" in one, next(iter(one)).startswith("status: not run")) for one in found] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    now[0] = 29.5
    assert "status: ok" in stages.method(lambda: last(0.5))
    assert capsys.readouterr().err.splitlines() == [
        "ao-lab: case: worked, 30.0 s",
        "ao-lab: case: worked, 0.0 s",
    ]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # torch looks at what it compiles
def test_layers_and_the_network_behind_them_are_three_programs():
    """The first layer, all others, and the last network as one: a compiler takes seconds for each."""
    config = replace(
        wukong.WUKONG["Wukong 0.53 GFLOP"], layers=4, features=20, width=8, half=4, pairs=4, hidden=(16, 16)
    )
    dense = dense_speed.Dense(wukong.Wukong(config), lambda m, x: m.interact(x))
    programs = CompileCounter()
    for part in dense_speed.WORKLOADS["Wukong 5.6 GFLOP"].parts(dense):
        part.compile(dynamic=False, backend=programs)
    dense_speed.both(dense, (torch.randn(3, 20, 8).requires_grad_(),))
    assert programs.frame_count == 3


def fused_cases():
    """All kinds, at a small shape."""
    kinds = {**fused_speed.CASES, shape_speed.SHAPES: shape_speed.CASES}
    return {kind: replace(cases[0], m=40, k=128, n=256) for kind, cases in kinds.items()}


def test_fused_methods_compute_what_float32_does(monkeypatch):
    """All kinds; one that computes something else has no time."""
    for case in fused_cases().values():
        first, *_, last = case.methods
        twice = lambda *operands, exact=case.exact: 2 * exact(*operands)  # noqa: E731
        wrong = replace(case, methods={**case.methods, last: twice})
        found = fused_speed.measure(wrong, "cpu", Deadline(None))
        assert all(found[name][fused_speed.TIME][0] > 0 for name in case.methods if name != last)
        assert list(found[last]) == ["status: wrong: the error against float32 is 1"]
        assert fused_speed.ERROR in found[first] or first in fused_speed.ALONE


def test_shapes_between_the_published_ends():
    """A sweep in equal steps of logarithms, of lengths that FP8 matmuls take; means over shapes are of what was timed."""
    found = shape_speed.shapes()
    assert (found[0], found[-1], len(found)) == ((2048, 256, 768), (2048, 123200, 1024), 27)
    assert all(length % 16 == 0 for shape in found for length in shape)
    sums = [k for _, k, _ in found]
    assert sums == sorted(set(sums))
    assert all(1.22 < b / a < 1.31 for a, b in pairwise(sums))
    of = {"bfloat16": 6.0, shape_speed.ALONE: 2.0, shape_speed.INPUTS: 3.0, shape_speed.BOTH: 4.0}
    rows = times(shape_speed.SHAPES, "n", "1000 x 1000 x 3958", "time", of)
    rows += times(shape_speed.SHAPES, "n", "16 x 16 x 16", "time", {"bfloat16": 1.0})
    (words,) = speed_page.findings(rows)
    assert "3.00x bfloat16 alone and 1.50x with both casts, which take 50% of the time" in words
    assert words.startswith("Over 1 shapes ")
    assert "the best rate is 100% of the peak" in words
    (section,) = speed_page.sections(rows)
    lines = [line[1:] for line in section.tables[0].lines]
    assert [line[:5] for line in lines] == [
        ["6.0", "3.00x", "2.00x", "1.50x", "50"],
        ["1.0", "", "", "", ""],
    ]


def test_bags_of_tables_in_turn(monkeypatch):
    """Stored tables, torch's, and the whole model; sums that are wrong have no time."""
    monkeypatch.setattr(table_speed, "BATCHES", 1)
    monkeypatch.setattr(table_speed, "COMPARED", 20)
    small = table_speed.ZIPF, "cpu", Deadline(None), 1, 50_000, False
    found = table_speed.measure(*small)
    assert all(values[table_speed.TIME][0] > 0 for values in found.values())
    assert [name for name, values in found.items() if table_speed.BYTES in values] == [*table_speed.STORED]
    monkeypatch.setattr(table_speed, "METHODS", table_speed.STORED[:1])
    right = table_speed.fast.embedding_bag
    monkeypatch.setattr(table_speed.fast, "embedding_bag", lambda *a, **more: 1.01 * right(*a, **more))
    (wrong,) = table_speed.measure(*small).values()
    assert [one.startswith("status: wrong: the error of sums is 0.01") for one in wrong] == [True]
    ids = table_speed.bags_of(table_speed.UNIFORM, 12, 50_000, "cpu").batches[0][0]
    assert int(ids.min()) >= 0
    assert int(ids.max()) < sum(table_speed.sizes_of(50_000))


def test_a_case_is_resumed_whole(tmp_path, monkeypatch):
    """What was timed in turn is measured again where a method is missing, and what failed is told."""
    answers = [{"a": {"time": (2.0, "us"), "status: ok": (1.0, "")}, "b": {"status: wrong: x": (0.0, "")}}]
    asked = []

    def work(deadline):
        asked.append(deadline)
        return answers[0]

    case = workloads.Turns(fused_speed.NORM, "normal", "s", ("a", "b"), work)
    monkeypatch.setitem(run.PARTS, "speed", lambda settings: iter([case]))
    only, journal = replace(settings(tmp_path), only=("speed",)), Journal()
    assert {row.metric for row in run.run(only, journal)} == {"time", "status: ok", "status: wrong: x"}
    assert [row.method for row in journal.rows] == ["a", "a"]
    answers[0] = answers[0] | {"b": answers[0]["a"]}
    rows = run.run(only, journal)
    assert run.run(only, journal) == rows
    assert len(asked) == 2
    assert {run.measured_whole(row) for row in rows} == {(rows[0].table, "s")}
    late = run.run(replace(only, seconds=-1.0), Journal())
    assert (len(late), len(asked)) == (2, 2)
    # What fails in the second run has no row of the first beside the others' new ones; a run that measures nothing takes none.
    journal = Journal(known=[row for row in rows if row.method == "b"])
    assert [row.method for row in run.run(replace(only, seconds=-1.0), journal)[:2]] == ["b", "b"]
    answers[0] = {"a": answers[0]["a"], "b": {"status: wrong: x": (0.0, "")}}
    assert {(row.method, row.metric) for row in run.run(only, journal)} == {
        ("a", "time"), ("a", "status: ok"), ("b", "status: wrong: x"),
    }  # fmt: skip
    answers.clear()
    assert [row.metric for row in run.run(only)] == ["status: error: IndexError: list index out of range"] * 2


def times(kind, data, setting, metric, values):
    return [
        Row(experiment="loka", table=f"{kind}/full/{data}", setting=setting, method=method, metric=metric, value=value, unit="",
            device="NVIDIA H200", seed=0)
        for method, value in values.items()
    ]  # fmt: skip


def test_what_the_page_says_of_times():
    """Graphs where both have them; the quickest FP8 norm; an epilogue over the quicker plain matmul."""
    large, norms, blocks = "Wukong 22.2 GFLOP", "RMSNorm, 36032 x 512 x 2048", "6144 x 18432 x 8192"
    both, forward, graph = dense_speed.BOTH, dense_speed.FORWARD, dense_speed.GRAPH
    rows = times("speed", "r", large, both, {"bfloat16": 4.0, "rowwise": 2.0, "dispatch": 2.5})
    rows += times("speed", "r", large, both + graph, {"bfloat16": 3.0, "dispatch": 2.0})
    rows += times("speed", "r", large, forward, {"bfloat16": 3.0, dense_speed.STORED: 2.0})
    mods = {dense_speed.NONE: 3.0, "no_bias": 2.5, dense_speed.TOGETHER: 2.0}
    rows += times(dense_speed.MOD_SPEED, "r", "batch 1024", both, mods)
    rows += times(fused_speed.NORM, "n", norms, "time", {"bfloat16": 30.0, "a": 25.0, "b": 20.0})
    plain, own = fused_speed.ALONE
    bags = {table_speed.DENSE: 100.0, "int8_rowwise": 50.0}
    rows += times(table_speed.TABLES, "r", table_speed.UNIFORM, "time", bags)
    rows += times(table_speed.TABLES, "r", table_speed.UNIFORM, table_speed.BYTES, {"int8_rowwise": 0.8})
    epilogues = {plain: 20.0, own: 10.0, "block norm in the epilogue": 11.0}
    rows += times(fused_speed.EPILOGUE, "n", blocks, "time", epilogues)
    runs = {one.about: one.targets for one in speed_page.targets_by_run(rows)}
    assert [one.value for one in runs["steps of exact shapes"]] == [1.5, 0.8, 1.5]
    assert [one.reached for one in runs["steps of exact shapes"]] == [True, False, True]
    assert [(one.value, one.limit) for one in runs["norm and matmul"]] == [(1.5, 1.4)]
    assert [(one.value, one.limit) for one in runs["block norm in the epilogue"]] == [(1.1, 1.03)]
    assert "1.50x at RMSNorm (36032 x 512 x 2048) by b" in " ".join(speed_page.findings(rows))
    assert [(one.value, one.limit) for one in runs["embedding tables"]] == [(0.8, 0.85)]
    assert "int8_rowwise 2.00x, 0.80 of a copy's rate" in " ".join(speed_page.findings(rows))
    assert "by all three mods over none, in bfloat16: 1.50x at batch 1024 (published" in " ".join(
        speed_page.findings(rows)
    )
    assert len(speed_page.sections(rows)) == 5
    compared = {
        one.method: one.measured for one in page.comparisons(rows) if one.metric == "speedup of compute"
    }
    assert compared["LoKA Dispatch"] == 1.5
    assert compared["TorchAO RW"] == 2
    assert compared["FBGEMM RW"] is None
    assert all(bool(one.measured or one.command) != bool(one.reason) for one in page.comparisons(rows))
    assert "2 of 24 values" in page.findings(rows)[-1]
    assert speed_page.mod_table(speed_page.Results([])).lines == []


def test_trainings_in_processes(tmp_path):
    """Each is a process's, and what a deadline does not reach is measured by the next run."""
    quick = replace(settings(tmp_path), only=("trajectory",), workers=2)
    journal = Journal()
    rows = run.run(replace(quick, seconds=1e-3), journal)
    assert not rows
