"""Published accuracies: which rows stand beside them, and that the commands that measure them can be run."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from ao_lab.cli.app import app
from experiments.calibration.cases import arms_of, cases_of
from experiments.fp8_training import page as fp8_page
from experiments.fp8_training import real as fp8_real
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.models.quantized_model import WEIGHTS
from experiments.ptq.real import real_tasks
from experiments.qat.real import plan_of, planned
from experiments.report import accuracies
from experiments.report.accuracies import EXAMPLES, WAYS, counted, of_experiment
from experiments.runs.run import check_asked
from experiments.runs.settings import RealModels, Settings

BOARDED = [name for name in EXPERIMENTS if hasattr(EXPERIMENTS[name].page_module(), "comparisons")]


@pytest.fixture(scope="module")
def every():
    """All published values, without rows."""
    return [one for name in BOARDED for one in EXPERIMENTS[name].page_module().comparisons([])]


def rows_of(way, metric="wikitext: word_perplexity", value=7.5, examples=0.0, model="Llama-3.1-8B"):
    made = {
        "experiment": way.experiment, "table": "real some-folder/full/model", "setting": way.setting, "method": way.method,
        "unit": "", "device": "NVIDIA H200", "seed": 0,
    }  # fmt: skip
    file = {**made, "setting": "file", "method": "file"}
    claim = [Row(**file, metric=f"published: {model}", value=1.0)] if model else []
    return [*claim, Row(**made, metric=metric, value=value), Row(**made, metric=EXAMPLES, value=examples)]


def beside(rows, experiment="ptq"):
    found = accuracies.comparisons(experiment, rows)
    return {(one.model, one.method, one.metric): one.measured for one in found if one.measured is not None}


def test_ours_stands_beside_that_very_model_and_task_alone():
    way, word = WAYS["int8wo"], "perplexity per word, wikitext"
    both = {("Llama-3.1-8B", name, word): 7.5 for name in ("int8wo", "int8_rowwise/bf16")}
    assert beside(rows_of(way)) == both
    assert beside(rows_of(way, model="Llama-3-8B")) == {("Llama-3-8B", "int8wo", word): 7.5}
    assert not beside(rows_of(way, model=""))
    assert not beside(rows_of(way, model="Llama-3.2-1B"))
    assert not beside(rows_of(way, examples=100.0)), "a part of the examples is another number"
    assert not beside(rows_of(way, metric="perplexity"))
    key = ("Llama-3.1-8B", "int8_rowwise/bf16", "winogrande acc")
    assert beside(rows_of(way, metric="winogrande: acc", value=0.7)) == {key: 0.7}


def test_a_report_on_ones_own_model_shows_values_of_that_very_model_or_none():
    """What an experiment measures itself (proxies, the models that packages carry) has all of them beside it."""
    own, page = rows_of(WAYS["int8wo"]), EXPERIMENTS["ptq"].page_module()
    assert {one.model for one in page.comparisons(own)} == {"Llama-3.1-8B"}
    assert any(one.title == "Published accuracies" for one in page.sections(own))
    unknown = rows_of(WAYS["int8wo"], model="")
    assert not page.comparisons(unknown)
    assert not any(one.title == "Published accuracies" for one in page.sections(unknown))
    proxy = replace(own[-1], table="quality/quick/sympy-1.14.0-7bc7958f")
    assert len(page.comparisons([*unknown, proxy])) == len(of_experiment("ptq"))
    carried = [replace(row, table="real SmolLM2-135M-Instruct/full/model") for row in unknown]
    assert accuracies.is_given("ptq", carried)
    assert not accuracies.is_given("calibration", carried)
    trained = EXPERIMENTS["fp8_training"].page_module().comparisons(unknown)
    assert trained
    assert not accuracies.of_given_models("fp8_training", unknown, trained)


def test_methods_with_data_stand_on_the_page_of_calibration():
    way, key = WAYS["int4wo-64-GPTQ"], ("Llama-3-8B", "int4wo-64-GPTQ", "perplexity per word, wikitext")
    rows = rows_of(way, model="Llama-3-8B")
    assert beside(rows, "calibration") == {key: 7.5}
    assert not beside(rows, "ptq")
    page = EXPERIMENTS["calibration"].page_module()
    assert [one.measured for one in page.comparisons(rows) if (one.model, one.method) == key[:2]] == [7.5]
    lines = page.sections(rows)[-1].tables[0].lines
    assert next(line for line in lines if line[0] == "Llama-3-8B, int4wo-64-GPTQ")[4] == "7.500"


def test_fine_tuned_models_stand_beside_those_of_the_same_text_alone():
    way, key = WAYS["QAT 8da4w"], ("Llama-3-8B", "QAT 8da4w", "hellaswag acc")
    rows = rows_of(way, metric="hellaswag: acc", value=0.528, model="Llama-3-8B")
    assert not beside(rows, "qat")
    text = replace(
        rows[-1], table="real some-folder/full/oasst1.txt-0123abcd-held-out", metric="loss", value=2.0
    )
    assert beside([*rows, text], "qat") == {key: pytest.approx(52.8)}
    other = replace(text, table="real some-folder/full/alpaca.txt-0123abcd-held-out")
    assert not beside([*rows, other], "qat")


def test_every_accuracy_is_listed_once_with_a_command_or_a_reason(every):
    found = [one for one in every if accuracies.is_accuracy(one)]
    assert len({(one.model, one.method, one.metric, one.source) for one in found}) == len(found) - 2
    assert all(bool(one.command) != bool(one.reason) for one in found)
    words = f"Of {len(found)} published accuracies none is measured here, for 60 the table names the command that measures it, "
    assert counted(found).startswith(words)


def parsed(command):
    """A command's parameters, by the command line's own parser."""
    program, name, *words = shlex.split(command)
    assert program == "ao-lab"
    group = typer.main.get_command(app)
    found = group.get_command(group.make_context("ao-lab", [name], resilient_parsing=True), name)
    return found.make_context(name, words).params


def ways():
    """Published accuracies of models that a folder holds, and how they are measured."""
    found = [(one, WAYS[one.method]) for name in ("ptq", "calibration", "qat") for one in of_experiment(name)]
    trained = [(one, way) for one in fp8_page.of_models() if (way := accuracies.trained_in(one))]
    assert len(trained) == 10
    return [*found, *trained]


def test_commands_are_taken_by_the_command_line_and_measure_the_row():
    """Parsed by typer, checked as the command checks them, and among what the run then measures."""
    for one, way in ways():
        params = parsed(accuracies.command(one, way))
        assert (params["tables"], params["scale"], params["pages"]) == ([way.experiment], "full", False)
        assert accuracies.folder_of(one.model) in params["model"]
        assert params["text"] == (Path(f"{way.text}.txt") if way.text else None)
        real = RealModels(models=tuple(params["model"]))
        check_asked(params["tables"], real, params["only"])
        here = Settings(scale="full", device="cpu", cache=None, only=tuple(params["only"]), asked=real)
        assert params["task"] == [accuracies.TASKS[one.metric][0]]
        assert (way.setting, way.method) in measures(way.experiment, here)


def test_fine_tunings_in_fp8_stand_beside_ours():
    (one,) = [
        one for one in fp8_page.of_models() if (one.method, one.metric) == ("fp8_rowwise", "hellaswag_acc")
    ]
    rows = rows_of(accuracies.trained_in(one), metric="hellaswag: acc", value=0.53, model="Llama-3.2-3B")
    text = replace(
        rows[-1], table="real some-folder/full/oasst1.txt-0123abcd-held-out", metric="loss", value=2.0
    )
    found = [one for one in fp8_page.comparisons([*rows, text]) if one.measured is not None]
    assert [(one.method, one.metric, one.measured) for one in found] == [
        ("fp8_rowwise", "hellaswag acc", 0.53)
    ]
    assert all(one.measured is None for one in fp8_page.comparisons(rows))


def measures(experiment, settings):
    if experiment == "fp8_training":
        return [(WEIGHTS, task.method) for task in fp8_real.planned(settings)]
    if experiment == "qat":
        return [(task.setting, task.name) for task in planned(plan_of(settings))]
    if experiment == "ptq":
        return [(task.setting, task.method) for task in real_tasks(settings)]
    return [(case.setting, arm) for case in cases_of(settings) for arm in arms_of(settings, case)]
