"""Experiment `prefill_attention`: its numbers, and what its page says of rows."""

from dataclasses import replace

import pytest
import torch

from experiments.data import texts
from experiments.harness.rows import Journal, Row
from experiments.prefill_attention import page, run
from experiments.prefill_attention.run import ALL, ATTENTION, COSINE, NORM, WORST
from experiments.runs.run import RealModels, settings_for


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
    rows += [row(ALL, "int8", "KL", 1e-4)]
    errors, changes = page.findings(rows)
    assert errors == "Norm of the error on M (CPU, text): int8 2.5%, fp8 6.0%."
    assert changes == "Perplexity of M (CPU, text): int8 0.02%."
    attention, predicted = page.sections(rows)
    assert [line[:2] for line in attention.tables[0].lines] == [["int8", "0.99970"], ["fp8", ""]]
    assert [line[0] for line in predicted.tables[0].lines] == ["int8"]
    again = [replace(one, table=one.table.replace("text", "other")) for one in rows]
    drawn = [drawing.name for section in page.sections([*rows, *again]) for drawing in section.drawings]
    assert len(set(drawn)) == len(drawn) == 2
