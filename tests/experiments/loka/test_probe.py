"""Parts of `loka` that probe models and kernels: small runs, and what the page says of rows."""

from dataclasses import replace

import pytest
import torch

from experiments.harness.rows import Journal, Row
from experiments.loka import (
    every_scheme,
    faulty_kernels,
    page,
    prediction,
    probe_page,
    run,
    sampling_cost,
    schemes_page,
    subjects,
)
from experiments.models.click_training import ClickTraining
from experiments.report.results import by_run
from experiments.runs.settings import settings_for


@pytest.fixture
def small(monkeypatch):
    """A run of seconds: one model, one candidate, one fault."""
    size = subjects.Size(
        300, 40, 1280, 8, ClickTraining(steps=20, batch=256, evaluated=512), batch=256, probed=2, tested=2
    )
    for scale in ("quick", "wide"):
        monkeypatch.setitem(subjects.SIZES, scale, size)
    monkeypatch.setattr(run, "QUICK", {"models": ("DCN",), "candidates": ("rowwise",)})
    monkeypatch.setattr(run, "SOME_FAULTS", ("stale scale",))
    monkeypatch.setitem(faulty_kernels.CHANNELS, "quick", 256)
    monkeypatch.setattr(faulty_kernels, "RIGHT", {"exact sums": lambda case: case.right})
    cached = (subjects.subject, subjects.impressions, prediction.drawn, faulty_kernels.operands)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def test_a_run(small, tmp_path):
    """All lines are measured, and once; predictions are near what is measured."""
    settings, journal = (
        replace(settings_for("quick", "cpu", tmp_path), only=("probe", "cost", "kernels")),
        Journal(),
    )
    rows = run.run(settings, journal)
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    assert {row.table.split("/")[0] for row in rows} == {
        "sites",
        "outputs",
        "cost",
        "faults",
        "right kernels",
    }
    value = {(row.setting, row.method, row.metric): row.value for row in rows}
    assert value["DCN", "rowwise", prediction.RATIO] == pytest.approx(1, abs=0.35)
    assert value["DCN", "rowwise", f"{prediction.WORST}, reservoir"] < 1.2
    assert all(value["stale scale", kind, faulty_kernels.SIGMAS] > 5 for kind in faulty_kernels.KINDS)
    assert value["all", "all", "false alarms"] == 0
    assert run.run(settings, journal) == journal.rows == rows
    assert "Of right kernels 0 of 1 are taken for faulty ones." in page.findings(rows)
    assert len(probe_page.sections(rows)) == 5
    with pytest.raises(ValueError, match="unknown part 'probes' of loka"):
        run.run(replace(settings, only=("probes",)))


@pytest.mark.nightly
@pytest.mark.parametrize("wrapped", sampling_cost.WRAPPED)
def test_cost_on_two_ranks(wrapped):
    """Both ranks keep and join samples."""
    values = sampling_cost.rank_values(wrapped, batch=64)
    assert values[sampling_cost.STEP][0] > 0
    assert values[sampling_cost.GATHERED][0] > 0
    # Inputs and gradients of 7 x 64 rows: 1024 columns in, 1024 out.
    assert values[sampling_cost.KEPT][0] == pytest.approx(7 * 64 * 2048 * 4 / 1e6)


def row(table, setting, method, metric, value):
    return Row(experiment="loka", table=table, setting=setting, method=method, metric=metric, value=value, unit="",
               device="cpu", seed=0)  # fmt: skip


def test_targets_that_are_missed():
    """A layer predicted badly, a logit predicted too low, a fault that nothing finds, an alarm, and a cost."""
    sites = {
        prediction.LAYERS: 10,
        f"{prediction.WITHIN}, reservoir": 90,
        f"{prediction.WORST}, reservoir": 1.2,
    }
    rows = [row("sites/full/x", "DCN", "rowwise", metric, value) for metric, value in sites.items()]
    rows += [row("outputs/full/x", "DCN", method, prediction.RATIO, 0.8) for method in ("rowwise", "nf4")]
    rows += [
        row("faults/full/k", "no scale", kind, faulty_kernels.SIGMAS, 4.0) for kind in faulty_kernels.KINDS
    ]
    rows.append(row("right kernels/full/k", "all", "all", "false alarms", 1.0))
    rows.append(row("cost/full/x", "DCN", "rowwise", "a sample every 100 steps", 2.0))
    missed = [
        target.name for one in probe_page.targets_by_run(rows) for target in one.targets if not target.reached
    ]
    assert missed == [
        "share of layers within 5%, reservoir", "worst ratio of errors, reservoir",
        "DCN, rowwise: predicted over measured, either way", "no scale", "false alarms", "DCN: a sample every 100 steps",
    ]  # fmt: skip


def test_every_scheme_of_a_small_model(monkeypatch):
    """What is predicted is near what later examples show; a scheme that divides no layer has no line on the page."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.SiLU(), torch.nn.Linear(64, 16))
    batches = [(torch.randn(128, 48),) for _ in range(4)]
    monkeypatch.setitem(every_scheme.MODELS, "ViT", lambda device, seed: (model, batches))
    monkeypatch.setattr(every_scheme, "candidates", lambda: ("rowwise", "nf4", "int4_g128"))
    every_scheme.probed.cache_clear()
    rows = []
    for name in every_scheme.candidates():
        for metric, (value, _) in every_scheme.scheme_values("ViT", name, 0, "cpu").items():
            rows.append(row(f"{every_scheme.EVERY}/full/{every_scheme.DATA}", "ViT", name, metric, value))
    every_scheme.probed.cache_clear()
    values = {(one.method, one.metric): one.value for one in rows}
    assert values["rowwise", prediction.LAYERS] == 2
    assert values["rowwise", prediction.RATIO] == pytest.approx(1, abs=0.1)
    assert values["nf4", every_scheme.BITS] == 4
    assert values["int4_g128", prediction.LAYERS] == 0
    ((where, results),) = by_run(rows, every_scheme.EVERY).items()
    assert [line[0] for line in schemes_page.table(results, "ViT").lines] == ["rowwise", "nf4"]
    assert schemes_page.share_within(results) == 100
    assert schemes_page.drawing(where, results).name == "loka-schemes-vit-full-cpu"
    assert [one.reached for run in schemes_page.targets_by_run(rows) for one in run.targets] == [True, True]
    assert "In 2 schemes and recipes of a ViT 100.0% of layers" in schemes_page.findings(rows)[0]


def test_every_fault_shows_on_some_schemes():
    assert {faulty_kernels.schemes_of(name) for name in faulty_kernels.FAULTS} == set(faulty_kernels.PAIRS)
