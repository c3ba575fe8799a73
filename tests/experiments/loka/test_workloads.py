"""Workloads of `loka`: which lines a run has, what they measure on small models, and what the page says of them."""

from dataclasses import replace

import pytest

from experiments.harness.rows import Row
from experiments.loka import dense_speed, page, policies, trajectory, workloads, workloads_page
from experiments.models.click_training import ClickTraining
from experiments.models.dlrm import DLRMConfig
from experiments.runs.run import Settings

TINY = DLRMConfig(
    name="tiny", dense=4, sizes=(5, 7), hots=(1, 1), width=128, bottom=(128,), cross=1, rank=128, top=(256,), norm=True
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A plan of few steps."""
    plan = replace(trajectory.PLANS["quick"], training=ClickTraining(steps=3, batch=64, evaluated=300))
    monkeypatch.setitem(trajectory.PLANS, "quick", plan)
    trajectory.qualities.cache_clear()
    policies.decisions.cache_clear()
    yield
    trajectory.qualities.cache_clear()
    policies.decisions.cache_clear()


def settings(tmp_path, device="cpu", scale="quick"):
    return Settings(scale=scale, device=device, cache=tmp_path)


def test_lines(tmp_path):
    quick = settings(tmp_path)
    lines = [*workloads.trajectory_lines(quick), *workloads.policy_lines(quick)]
    assert len({line[:4] for line in lines}) == len(lines)
    assert [line[3] for line in workloads.trajectory_lines(quick)] == ["base", "rowwise", "mods"]
    assert not [*workloads.speed_lines(quick)]
    full = settings(tmp_path, "cuda", "full")
    assert len([*workloads.trajectory_lines(full)]) == 3 * 2 * len(trajectory.CHANGES)
    assert {line[0] for line in workloads.speed_lines(full)} == {"speed", "mod speed"}


def row(line, metric, value, unit="", device="cpu"):
    kind, data, setting, method = line
    return Row("loka", f"{kind}/quick/{data}", setting, method, metric, value, unit, None, device, 0)


def rows_of(tmp_path):
    """What a run on a CPU finds, as rows."""
    quick = settings(tmp_path)
    found = []
    for kind, data, setting, method, work in (
        *workloads.trajectory_lines(quick),
        *workloads.policy_lines(quick),
    ):
        found += quick.rows("loka", kind, data, setting, method, work())
    return found


def test_a_run_and_its_page(tmp_path, small):
    rows = rows_of(tmp_path)
    values = {(r.setting, r.method, r.metric): r.value for r in rows}
    assert values["DCN", "rowwise", trajectory.SEEDS] == 2
    assert ("DCN", "base", trajectory.LOSS) not in values
    assert abs(values["DCN", "rowwise", trajectory.LOSS]) < 50
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
    assert "Relative log loss over paired seeds: rowwise on DCN" in workloads_page.findings(full)[0]
    assert workloads_page.targets_by_run(rows)
    assert workloads_page in page.PAGES


def test_a_dense_part_is_timed_by_each_method():
    one = dense_speed.dcn(TINY, 64)
    for method in ("bfloat16", "rowwise"):
        values = dense_speed.speed_values("tiny", method, "cpu", one, compiled=False)
        assert values[dense_speed.BOTH][0] > values[dense_speed.FORWARD][0] > 0
    assert dense_speed.mod_values("all three", 64, "cpu", TINY, compiled=False)[dense_speed.FORWARD][0] > 0
