"""Experiment `optimizers`: what its numbers are, and what its page says of rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.rows import Row
from experiments.optimizers import candidates, page, run, speed, training, updates
from experiments.optimizers.training import BASE, GAP, HELD_OUT, INTERVAL
from experiments.optimizers.updates import LARGEST, PROJECTION, RMS, Setting
from experiments.runs.settings import settings_for


@pytest.mark.nightly
def test_candidates_show_what_a_moments_format_adds():
    """A fourth mantissa bit of the root halves its share of the difference; it changes nothing of the first moment's."""
    made = candidates.candidates()
    rms = {
        name: candidates.numbers(states, 10, 60)[0] for name, states in made.items() if "m e3m4" not in name
    }
    assert rms["m float32, root of v unsigned e4m4"] < 0.65 * rms["m float32, root of v e4m3"]
    both = rms["m float32, root of v e4m3"] ** 2 + rms["m e4m3, v float32"] ** 2
    assert rms["m e4m3, root of v e4m3 (default)"] == pytest.approx(both**0.5, rel=0.2)
    assert rms["m e4m3, root of v e4m3 (default)"] == pytest.approx(
        updates.measure(Setting(10, False), "ours, 8 bits", 0)[RMS][0], rel=1e-6
    )


@pytest.mark.parametrize(("option", "value"), [("--steps", "10"), ("--ratios", "0")])
def test_candidates_refuse_what_counts_no_step(option, value, capsys):
    with pytest.raises(SystemExit):
        candidates.main([option, value])
    assert f"{option} {value}: " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["torchao, 8 bits", "torchao, FP8"])
def test_the_defect_is_torchaos_own(method):
    pytest.importorskip("torchao")
    found = updates.measure(Setting(1000, True), method, 0)
    assert found[LARGEST][0] > 1000


def test_ours_is_near_float32():
    found = updates.measure(Setting(1000, True), "ours, 8 bits", 0)
    assert found[LARGEST][0] < 3
    assert found[RMS][0] < 0.2
    assert abs(found[PROJECTION][0] - 1) < 0.05


def test_torchaos_steps_are_those_of_its_states_here(monkeypatch):
    """The same states by the reference take the same steps, but for roundings of an order of operations."""
    pytest.importorskip("torchao")
    monkeypatch.setitem(updates.OURS, "same", "torchao.8bit")
    theirs, ours = (updates.measure(Setting(10, False), name, 0) for name in ("torchao, 8 bits", "same"))
    assert theirs[LARGEST][0] == pytest.approx(ours[LARGEST][0], rel=0.01)
    assert theirs[PROJECTION][0] == pytest.approx(ours[PROJECTION][0], rel=0.01)


def row(kind, setting, method, metric, value, seed=0, scale="full"):
    return Row(experiment="optimizers", table=f"{kind}/{scale}/data", setting=setting, method=method, metric=metric,
               value=value, unit="", device="cpu", seed=seed)  # fmt: skip


def losses(values, method, scale="full"):
    return [row("paired", "m", method, HELD_OUT, value, seed, scale) for seed, value in enumerate(values)]


def test_gaps_are_paired():
    rows = losses([2.0, 4.0], BASE) + losses([2.02, 4.04], "8-bit states") + losses([9.0], "other")
    found = training.gaps(rows)
    assert set(found) == {"8-bit states"}
    assert found["8-bit states"][GAP][0] == pytest.approx(1.0)
    assert found["8-bit states"][INTERVAL][0] == pytest.approx(0.0, abs=1e-9)


def test_methods_can_be_named(monkeypatch):
    trained = []
    monkeypatch.setattr(
        run, "_trained", lambda settings, plan, method: trained.append((method, settings.seed)) or []
    )
    monkeypatch.setattr(run, "gap_rows", lambda *rest: [])
    # As on a GPU, which is not asked for its name.
    settings = replace(
        settings_for("full", "cpu", Path("/none")), device="cuda", only=("float32 states, 24-bit master",)
    )
    monkeypatch.setattr(run, "measure_each", lambda _, works, *rest: [work() for work in works.values()])
    run.run(settings)
    names = (training.BASE, "float32 states, 24-bit master")
    assert trained == [(name, seed) for name in names for seed in range(5)]
    with pytest.raises(ValueError, match="not trained at scale quick on cpu"):
        run.run(replace(settings, scale="quick", device="cpu"))


def test_the_page_names_the_largest_and_misses_targets():
    rows = [row("updates", one.name, "ours, 8 bits", LARGEST, 1.5) for one in updates.SETTINGS]
    rows += [row("updates", one.name, "ours, 4 bits", LARGEST, 1.8) for one in updates.SETTINGS]
    rows += [row("updates", one.name, "torchao, 8 bits", LARGEST, 7000.0) for one in updates.SETTINGS]
    rows += losses([2.0, 4.0], BASE) + losses([2.1, 4.3], "8-bit states")
    rows += [row("gaps", "m", "8-bit states", GAP, 0.4), row("gaps", "m", "8-bit states", INTERVAL, 0.2)]
    assert "torchao, 8 bits 7,000; ours, 8 bits 1.5; ours, 4 bits 1.8" in page.findings(rows)[0]
    said = str(page.headlines(rows)[0])
    assert "reaches 1.5 times in 8 bits and 1.8 times in 4 bits" in said
    assert "torchao's 7,000 in 8 bits (one gradient in 256 1 times larger)" in said
    assert "by an rms" not in said
    ordinary = [
        row("updates", Setting(ratio, False).name, method, page.RMS, value)
        for ratio, values in ((1, (0.11, 0.02)), (100_000, (0.81, 53.4)))
        for method, value in zip(page.COMPARED, values, strict=True)
    ]
    first = "rms of 0.11 (torchao 0.02) with gradients alike in a block, 0.81 (torchao 53.40) with one 10^5 times larger."
    assert first in str(page.headlines([*rows, *ordinary])[0])
    assert first in page.findings([*rows, *ordinary])[0]
    stopped = Setting(1_000, True).name
    rows = [
        replace(one, value=9e3) if (one.setting, one.method) == (stopped, "torchao, 8 bits") else one for one in rows
    ]  # fmt: skip
    case = "9,000 in 8 bits (one gradient in 256 1,000 times larger, the others 0 from step 40 on; 7,000 where they go on)"
    assert case in str(page.headlines(rows)[0])
    updated, gaps = page.targets_by_run(rows)
    assert [target.reached for target in updated.targets] == [True, True]
    assert [target.reached for target in gaps.targets] == [False]
    assert len(page.sections(rows)) == 2
    worse = [replace(one, value=4.0) if one.method == "ours, 8 bits" else one for one in rows]
    assert page.targets_by_run(worse)[0].targets[0].reached is False


def test_steps_are_timed_and_what_is_missing_or_fails_says_so(monkeypatch):
    def broken(ps):
        raise ValueError("no step")

    others = {"absent": speed.Method(broken, 1.0, "no_such_package"), "broken": speed.Method(broken, 1.0)}
    monkeypatch.setattr(speed, "METHODS", {**speed.METHODS, **others})
    monkeypatch.setattr(speed, "ON_CPUS", (*speed.ON_CPUS, *others))
    found = speed.measure(speed.Shape(2, 32), "cpu")
    for name in ("8-bit states", "4-bit states"):
        assert found[name][speed.TIME][0] > 0
        assert found[name][speed.FLOOR][0] > 0
    assert "status: missing: no_such_package is not installed" in found["absent"]
    assert "status: error: ValueError: no step" in found["broken"]


def test_the_page_has_times_and_their_targets():
    rows = [row("speed", "28 x 4096", "8-bit states", f"{speed.TIME}{speed.GRAPH}", 1.2)]
    rows += [
        row("speed", "28 x 4096", "8-bit states", speed.FLOOR, 1.1),
        row("speed", "28 x 4096", "torchao, 8 bits", speed.TIME, 7.5),
    ]
    (found,) = page.targets_by_run(rows)
    assert [target.reached for target in found.targets] == [False, None, None]
    assert page.sections(rows)[0].tables[0].lines[0] == ["8-bit states", "1.200", "", "1.100"]
    assert "8-bit states 1.20; torchao, 8 bits 7.50" in page.findings(rows)[0]
