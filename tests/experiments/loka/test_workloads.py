"""Workloads of `loka`: which lines a run has, what they measure on small models, and what the page says of them."""

from dataclasses import replace

import pytest

from experiments.harness.intervals import interval
from experiments.harness.rows import Journal
from experiments.loka import dense_speed, page, policies, run, trajectory, workloads, workloads_page
from experiments.models.click_training import ClickTraining
from experiments.models.dlrm import DLRMConfig
from experiments.report.results import by_run
from experiments.runs.run import Settings

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
    assert {line.kind for line in workloads.speed_lines(full)} == {"speed", "mod speed"}


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


def test_a_dense_part_is_timed_by_each_method():
    one = dense_speed.dcn(TINY, 64)
    for method in ("bfloat16", "rowwise"):
        values = dense_speed.speed_values("tiny", method, "cpu", one, compiled=False)
        assert values[dense_speed.BOTH][0] > values[dense_speed.FORWARD][0] > 0
    assert dense_speed.mod_values("all three", 64, "cpu", TINY, compiled=False)[dense_speed.FORWARD][0] > 0


def test_trainings_in_processes(tmp_path):
    """Each is a process's, and what a deadline does not reach is measured by the next run."""
    quick = replace(settings(tmp_path), only=("trajectory",), workers=2)
    journal = Journal()
    rows = run.run(replace(quick, seconds=1e-3), journal)
    assert not rows
