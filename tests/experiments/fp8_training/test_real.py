"""Fine-tuning a real model in each recipe: the whole command on a random checkpoint, and what its rows are of."""

from dataclasses import replace

import pytest
import torch

from ao_lab.cli.app import main
from experiments.data import texts
from experiments.fp8_training import page, real, run
from experiments.harness.rows import Journal
from experiments.models import causal_lm
from experiments.models.quantized_model import WEIGHTS
from experiments.qat.real import PLANS
from experiments.runs.settings import RealModels, settings_for

pytest.importorskip("transformers")
TEXT = " ".join(
    f"Sentence {number} of a text about models, which is long enough to train on." for number in range(400)
)


@pytest.fixture(scope="module")
def rows(folder, tmp_path_factory):
    """Rows of `ao-lab reproduce fp8_training --model DIR --text FILE --only rowwise`, of fewer and shorter steps."""
    place = tmp_path_factory.mktemp("run")
    (place / "oasst1.txt").write_text(TEXT)
    plan, own = PLANS["quick"], texts.OwnText.of(place / "oasst1.txt")
    asked = RealModels(models=(str(folder),), windows=2, length=32, own_text=own)
    here = settings_for("quick", "cpu", place / "cache")
    journal = Journal()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(texts.VARIABLE, raising=False)
        patch.setitem(PLANS, "quick", replace(plan, tuning=replace(plan.tuning, steps=2, length=32)))
        run.run(replace(here, models=asked.models, asked=asked, only=("rowwise",)), journal)
    return journal.rows


def losses(rows, method):
    return {
        row.seed: row.value
        for row in rows
        if (row.method, row.metric) == (method, "loss") and "oasst1" in row.table
    }


def test_every_recipe_has_rows_of_every_seed(rows):
    names = {row.method for row in rows}
    assert names == {
        "bfloat16",
        "file",
        *(f"fine-tuned in {one}" for one in ("bfloat16", "rowwise")),
    }
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    assert {row.setting for row in rows} == {WEIGHTS, "file"}
    before = losses(rows, "bfloat16")[0]
    plain, rowwise = losses(rows, "fine-tuned in bfloat16"), losses(rows, "fine-tuned in rowwise")
    assert set(plain) == set(rowwise) == {0, 1}
    assert all(plain[seed] < before for seed in plain), "a model that was trained on the text knows it better"
    assert all(0 < abs(rowwise[seed] - plain[seed]) < 0.1 for seed in plain)


def test_only_linear_layers_but_a_tied_head_train_by_the_recipe(folder):
    model = causal_lm.load(causal_lm.of_folder(folder), "cpu")
    names = set(causal_lm.linears(model))
    real.convert(model, "rowwise")
    found = {name for name, one in model.named_modules() if type(one).__name__ == "LowPrecisionLinear"}
    assert found == names
    assert "lm_head" not in found
    assert isinstance(model.lm_head, torch.nn.Linear)


def test_the_page_has_a_line_for_each_recipe(rows):
    tables = [
        table for section in page.sections(rows) for table in section.tables if "oasst1" in table.caption
    ]
    (table,) = tables
    assert [line[0] for line in table.lines] == [
        "bfloat16",
        *(f"fine-tuned in {one}" for one in ("bfloat16", "rowwise")),
    ]
    assert "±" in table.lines[2][2]


@pytest.mark.parametrize(("only", "model", "message"), [
    ("fp7", True, "is no recipe of training"), ("paired", True, "is no recipe of training"), ("rowwise", False, "unknown part"),
])  # fmt: skip
def test_names_that_do_not_fit_are_refused(folder, tmp_path, capsys, monkeypatch, only, model, message):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    more = ["--model", str(folder)] if model else []
    command = ["reproduce", "fp8_training", *more, "--only", only, "--reports", str(tmp_path / "reports")]
    assert main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())
