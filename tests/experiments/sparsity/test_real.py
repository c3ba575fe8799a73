"""2:4 on a real model: all scores on a random checkpoint, and what their rows are of."""

from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.data import texts
from experiments.harness.rows import Journal
from experiments.models.causal_lm import Bench, linears, of_folder
from experiments.report.real_runs import CHANGE, KL
from experiments.runs.settings import RealModels, settings_for
from experiments.sparsity import page, real, run

pytest.importorskip("transformers")
ONLY = ("dense + int4", "2:4, magnitude", "2:4, sparsegpt", "2:4, sparsegpt + int4")


@pytest.fixture(scope="module")
def rows(folder, tmp_path_factory):
    """Rows of `ao-lab reproduce sparsity --model DIR --only ...`."""
    asked = RealModels(models=(str(folder),), windows=2, length=32)
    here = settings_for("quick", "cpu", tmp_path_factory.mktemp("cache"))
    journal = Journal()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(texts.VARIABLE, raising=False)
        run.run(replace(here, models=asked.models, asked=asked, only=ONLY), journal)
    return journal.rows


def value(rows, method, metric):
    return next(
        row.value for row in rows if (row.method, row.metric) == (method, metric) and "-source" in row.table
    )


def test_every_arm_is_measured_and_the_base_is_at_no_distance(rows):
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    assert {row.method for row in rows} == {"bfloat16", "file", *ONLY}
    assert value(rows, "bfloat16", KL) == value(rows, "bfloat16", CHANGE) == 0
    assert value(rows, "2:4, sparsegpt", KL) > value(rows, "dense + int4", KL) > 0
    assert value(rows, "2:4, magnitude", KL) > value(rows, "2:4, sparsegpt", KL)
    assert value(rows, "2:4, sparsegpt + int4", KL) > value(rows, "2:4, sparsegpt", KL)


def test_all_layers_but_a_tied_head_are_pruned(folder):
    bench = Bench.of(of_folder(folder), (), 32, 2, "cpu")
    model = real.pruned(bench, [], "2:4, magnitude")
    for name, layer in linears(model).items():
        groups = (layer.weight != 0).reshape(-1, 4).sum(1)
        assert int(groups.max()) == 2, name
    assert int((model.lm_head.weight == 0).sum()) == 0
    assert all(int((layer.weight == 0).sum()) == 0 for layer in linears(bench.base).values()), (
        "the base stays"
    )


def test_the_page_has_a_line_for_each_arm(rows):
    sections = page.sections(rows)
    (table,) = sections[0].tables
    assert [line[0] for line in table.lines] == ["bfloat16", *ONLY]
    assert page.findings(rows)[0].startswith(
        "2:4 without training, tiny-llama, perplexity over the dense model's on sympy-"
    )


@pytest.mark.parametrize(("only", "model"), [("language", True), ("2:4, magnitude", False)])
def test_parts_and_arms_are_not_mixed(folder, tmp_path, capsys, monkeypatch, only, model):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    more = ["--model", str(folder)] if model else []
    assert main(["reproduce", "sparsity", *more, "--only", only, "--reports", str(tmp_path / "reports")]) == 2
    assert only in " ".join(capsys.readouterr().err.split())
