"""Experiment `prefill_attention`: its numbers, and what its page says of rows."""

from dataclasses import replace

import pytest
import torch

from experiments.data import texts
from experiments.harness.rows import Journal, Row
from experiments.kv_cache.decode_attention import Heads, Size
from experiments.prefill_attention import page, run, speed
from experiments.prefill_attention.run import ALL, ATTENTION, COSINE, NORM, WORST
from experiments.runs.settings import RealModels, settings_for


def test_a_real_model(folder, tmp_path, monkeypatch):
    """Errors and predictions by recipe; every row is there once, and torch's function is what it was."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    asked = RealModels(models=(str(folder),), windows=2, length=40)
    settings = replace(settings_for("quick", "cpu", tmp_path), models=asked.models, asked=asked)
    before, journal = torch.nn.functional.scaled_dot_product_attention, Journal()
    rows = run.run(settings, journal)
    assert torch.nn.functional.scaled_dot_product_attention is before
    found = {(one.setting, one.method, one.metric): one.value for one in rows}
    assert {place[:2] for place in found} == {
        *((ATTENTION, name) for name in run.COMPARED["quick"]), *((ALL, name) for name in run.PREDICTED["quick"])
    }  # fmt: skip
    assert all(0.003 < found[ATTENTION, name, NORM] < 0.1 for name in ("int8", "fp8"))
    for name in run.COMPARED["quick"]:
        cosine, norm = found[ATTENTION, name, COSINE], found[ATTENTION, name, NORM]
        assert found[ATTENTION, name, COSINE + WORST] <= cosine < 1
        assert norm <= found[ATTENTION, name, NORM + WORST]
        assert cosine == pytest.approx(1 - norm**2 / 2, abs=1e-3)
    assert all(0 < found[ALL, name, "KL"] < 0.01 for name in run.PREDICTED["quick"])
    assert run.run(settings, journal) == rows


def row(setting, method, metric, value):
    return Row(experiment="prefill_attention", table="real M/full/text", setting=setting, method=method, metric=metric,
               value=value, unit="", device="cpu", seed=0)  # fmt: skip


def test_page():
    rows = [row(ATTENTION, method, metric, value) for method, value in (("int8", 0.025), ("fp8", 0.06))
            for metric in (NORM, NORM + WORST)]  # fmt: skip
    rows += [row(ATTENTION, "int8", COSINE, 0.9997), row(ALL, "int8", "perplexity, change", 0.02)]
    known = {
        "loss, change": 0.0,
        "loss, standard error of the change": 0.01,
        "windows": 4.0,
        "KL": 1e-4,
        "KL, standard error": 1e-5,
        "tokens of a window": 512.0,
    }
    rows += [row(ALL, "int8", metric, value) for metric, value in known.items()]
    errors, changes = page.findings(rows)
    short = "short run, CPU, 4 windows of 512 tokens, text"
    assert (
        errors
        == f"Error of attention over the norm of its result, M ({short}, the first window): int8 2.5%, fp8 6.0%."
    )
    told = "int8 +0.0 ± 3.2%; KL divergence from its own predictions, in nats: int8 0.000100 ± 0.000032."
    assert changes == f"Change of the perplexity of M ({short}): {told}"
    (without, _) = page.findings([*rows, row(ATTENTION, "int8, neither", NORM, 0.032)])
    assert "int8 without the transform and with the mean key 3.2%" in without
    attention, predicted = page.sections(rows)
    assert [line[:2] for line in attention.tables[0].lines] == [["int8", "0.99970"], ["fp8", ""]]
    assert [line[0] for line in predicted.tables[0].lines] == ["int8"]
    again = [replace(one, table=one.table.replace("text", "other")) for one in rows]
    drawn = [drawing.name for section in page.sections([*rows, *again]) for drawing in section.drawings]
    assert len(set(drawn)) == len(drawn) == 2


def test_speed_is_a_part(tmp_path, monkeypatch):
    """Recipes that --only names, beside torch's; the cosine is of what was computed."""
    monkeypatch.setitem(speed.SIZES, "cpu", (Size(1, 40),))
    settings, journal = replace(settings_for("quick", "cpu", tmp_path), only=("speed", "int8")), Journal()
    rows = run.run(settings, journal)
    found = {(one.method, one.metric): one.value for one in rows}
    assert {method for method, _ in found} == {"SDPA, flash", "int8"}
    assert found["int8", speed.TIME] > 0
    assert 0.998 < found["int8", speed.COSINE] < found["SDPA, flash", speed.COSINE] <= 1 + 1e-6
    assert speed.operations(Size(2, 3), Heads(4, 2, 8)) == 2 * 2 * 4 * 3 * 4 * 8
    monkeypatch.setattr(speed, "measure", None)
    assert run.run(settings, journal) == rows


def test_the_page_of_times_misses_the_bar():
    times = {"SDPA, cuDNN": 100.0, "SDPA, flash": 130.0, "int8": 80.0, "fp8": 90.0}
    rows = [replace(row("1 x 8192", method, speed.TIME + speed.GRAPH, us), table="speed/full/normal-states", device="H200")
            for method, us in times.items()]  # fmt: skip
    assert page.speeds(speed_results(rows), "1 x 8192") == {"int8": 1.25, "fp8": pytest.approx(100 / 90)}
    assert [target.reached for target in page.targets_by_run(rows)[0].targets] == [True]
    slower = [replace(one, value=81.0) if one.method == "int8" else one for one in rows]
    assert [target.reached for target in page.targets_by_run(slower)[0].targets] == [False]
    (section,) = page.sections(rows)
    assert next(line for line in section.tables[0].lines if line[1] == "int8")[-1] == "1.25"
    assert "1 x 8192 tokens (H200, normal-states): int8 1.25, fp8 1.11" in page.findings(rows)[0]


def speed_results(rows):
    return next(iter(page.by_run(rows, speed.SPEED).values()))


def test_a_tile_whose_call_outlasts_its_slice_has_a_time():
    """On a watch that says five seconds for each call."""
    pytest.importorskip("triton")
    from tests.gpu.attention import prefill

    class Slow(prefill.CudaWatch):
        def __init__(self):
            pass

        def sync(self):
            pass

        def capture(self, calls):
            return calls[0]

        def seconds(self, calls, *, cold=False):
            return [5.0] * len(calls)

    assert prefill.timed(Slow(), lambda: None) == 5e6
