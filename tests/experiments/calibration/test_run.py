"""Methods with data on real models: the whole command on a random checkpoint, and what "recovered" is."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ao_lab.choose.result import Trial
from ao_lab.cli.app import main
from ao_lab.eval import Tokens
from experiments.calibration import cases, page, run
from experiments.calibration.cases import ARMS, Case, arms_of, cases_of, check_parts, methods_of
from experiments.calibration.drawings import seconds_of
from experiments.calibration.run import share
from experiments.data import texts
from experiments.data.texts import calibration_documents, drawn_sequences
from experiments.harness.measuring import Deadline, is_late
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, Row, read
from experiments.models.causal_lm import of_folder
from experiments.report.real_runs import RECOVERED
from experiments.report.results import Results
from experiments.runs.outcome import say_late
from experiments.runs.settings import RealModels, Settings

pytest.importorskip("transformers")
TABLE = "real tiny-llama/quick"


@pytest.fixture(scope="module")
def reproduced(folder, tmp_path_factory):
    """Rows of `ao-lab reproduce calibration --model DIR`, and where they and the pages lie."""
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AO_LAB_CACHE", str(place / "cache"))
        patch.delenv(texts.VARIABLE, raising=False)
        patch.setitem(cases.ARMS, "nothing yet", (("NoSuchMethod", {}),))
        patch.setitem(run.SEQUENCES, "quick", 10)
        patch.setitem(cases.DRAWN, "quick", (("int3_g64_asymmetric", "search by inputs"),))
        patch.setattr(cases, "DRAWS", 3)
        assert main(command(folder, place, "nothing yet")) == 0
    return place, read(Paths(place / "cache", place / "reports").rows("calibration"))


def command(folder, place, *more):
    only = ["int3_g64_asymmetric", "search by inputs", "gptq", "hqq", *more]
    options = ["--reports", str(place / "reports"), "--device", "cpu", "--windows", "3", "--length", "32"]
    return [
        "reproduce",
        "calibration",
        "--model",
        str(folder),
        *(w for one in only for w in ("--only", one)),
        *options,
    ]


class Steps:
    """A clock that goes on by a second where it is asked, and remembers what was then under way."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def until(folder, tmp_path, monkeypatch, seconds):
    """Journal and rows of what was not measured, of a run that ends after so many questions for the time."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setitem(run.SEQUENCES, "quick", 8)
    asked = RealModels(models=(str(folder),), windows=2, length=32)
    only = ("int3_g64_asymmetric", "gptq", "hqq")
    here = Settings(scale="quick", device="cpu", cache=tmp_path, models=asked.models, asked=asked, only=only)
    journal = Journal()
    return journal, run.measure_model(here, of_folder(folder), journal, Deadline(seconds, Steps()))


def test_a_method_that_is_under_way_ends_between_layers(folder, tmp_path, monkeypatch, capsys):
    """What was done before stays, what it was at is named, and nothing begins after it."""
    journal, failed = until(folder, tmp_path, monkeypatch, 24.0)
    assert {row.method for row in journal.rows} == {"file", "bfloat16", "rounding"}
    states = {row.method: row.metric for row in failed}
    assert set(states) == {"gptq", "hqq"}
    assert all(is_late(state) for state in states.values())
    assert "stopped at gptq, int3_g64_asymmetric, seed 0: " in states["gptq"]
    assert " of 7; the 24 s of this run did not reach it" in states["gptq"]
    assert "stopped" not in states["hqq"]
    say_late(failed)
    assert "2 measurements not run: stopped at gptq" in capsys.readouterr().err


def test_without_time_no_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "bench_of", lambda *_: pytest.fail("loaded"))
    journal, failed = until(folder, tmp_path, monkeypatch, 0.5)
    assert journal.rows == []
    assert {row.method for row in failed} == {"rounding", "gptq", "hqq"}
    assert page.sections(failed)
    assert page.findings(failed) is not None


def test_a_command_without_time_says_what_it_did_not_measure(folder, tmp_path, monkeypatch, capsys):
    """A program that reads the exit code or `--json`, and who reads the page, see that nothing is done."""
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    short = [*command(folder, tmp_path), "--seconds", "0.001"]
    assert main([*short, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["not_measured"]
    assert {one["method"] for one in told["not_measured"]} >= {"rounding", "gptq"}
    assert all("s of this run did not reach it" in one["reason"] for one in told["not_measured"])
    assert "Not measured: " in (tmp_path / "reports" / "index.html").read_text(encoding="utf-8")
    assert main(short) == 1
    said = capsys.readouterr()
    assert "did not reach it; the same command goes on with them." in " ".join(said.out.split())
    assert "no finding" not in said.err
    assert "nothing that was asked for was measured" in said.err


def test_sequences_of_a_seed_are_drawn_once(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setitem(run.SEQUENCES, "quick", 2)
    asked = RealModels(models=(str(folder),), windows=2, length=32)
    here = run.prepared(Settings(scale="quick", device="cpu", cache=tmp_path, asked=asked), of_folder(folder))
    assert here.with_seed(1).batches is here.with_seed(1).batches
    assert here.with_seed(1).batches is not here.batches


def test_a_choice_is_a_case_of_its_own(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setitem(run.SEQUENCES, "quick", 8)
    monkeypatch.setattr(run.choice, "BUDGETS", (3.0, 4.25))
    for name, value in (("SEQUENCES", 8), ("TOKENS", 32), ("ALONE", 4)):
        monkeypatch.setitem(getattr(run.choice, name), "quick", value)
    asked = RealModels(models=(str(folder),), windows=2, length=32)
    here = Settings(
        scale="quick",
        device="cpu",
        cache=tmp_path,
        models=asked.models,
        asked=asked,
        only=("choice", "search"),
    )
    rows = run.run(here)
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    for bits in (3.0, 4.25):
        found = values(rows, "model", "rounding", f"choice, {bits:g} bits")
        assert 2.375 <= found["bits per weight"] <= bits
        least = min(value for name, value in found.items() if name.startswith("uniform") and "int2" in name)
        assert found["choice: KL measured"] <= least
        assert found["time to choose, all budgets"] > 0
        assert found["choice: tokens of scores and measurements"] == 8 * 32
        assert found["choice: layers measured alone"] == 4
        assert -1 <= found["choice: rank correlation of layers alone"] <= 1
    assert found["choice: KL measured"] < found["choice: KL of one scheme at this size"]
    (one,) = page.real_runs(rows)
    assert seconds_of(one, "choice, 4.25 bits", "rounding") > found["time to choose, all budgets"]
    (section,) = page.sections(rows)
    *_, chosen, rules = section.tables
    assert [line[0] for line in chosen.lines] == ["choice, 3 bits", "choice, 4.25 bits"]
    assert all("int2_g64_asymmetric_bf16" in line[-1] for line in chosen.lines)
    assert {line[1] for line in rules.lines} == {"3 bits", "4.25 bits"}
    for bits, rule in ((3.0, "one scheme for all layers"), (4.25, "first and last layers in 8 bits")):
        ours, theirs = (
            values(rows, "sympy", "rounding", f"{name}, {bits:g} bits") for name in ("choice", rule)
        )
        assert theirs[run.choice.OVER] == pytest.approx(ours["KL"] / theirs["KL"], rel=1e-5)
        assert theirs[run.choice.OVER_ERROR] > 0
    one = values(rows, "model", "rounding", "one scheme for all layers, 3 bits")
    assert (one["bits per weight"], one["rule: int2_g64_asymmetric_bf16"]) == (2.375, 1)


def values(rows, data, method, setting="int3_g64_asymmetric"):
    found = [row for row in rows if (row.method, row.setting) == (method, setting)]
    return {
        row.metric: row.value
        for row in found
        if row.seed == 0 and row.table.partition("/quick/")[2].startswith(data)
    }


def test_a_choice_is_held_against_what_lies_at_its_size():
    """Geometrically between two trials; a rule by hand has its first and last block in 8 bits."""
    trials = [
        Trial("a", 200.0, 0.0, 4.0, True),
        Trial("b", 100.0, 0.0, 16.0, True),
        Trial("c", 400.0, 0.0, 1.0, False),
    ]
    assert run.choice.interpolated(trials, 150.0) == pytest.approx(8.0)
    assert run.choice.interpolated(trials, 200.0) == pytest.approx(4.0)
    assert run.choice.interpolated(trials, 300.0) == pytest.approx(2.0)
    assert math.isnan(run.choice.interpolated(trials, 99.0))
    assert run.choice.rank_correlation([1.0, 5.0, 9.0, 7.0], [0.1, 0.2, 0.9, 0.4]) == pytest.approx(1.0)
    assert run.choice.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    parts = ("self_attn.q_proj", "mlp.up_proj")
    layers = {
        f"model.layers.{i}.{part}": nn.Linear(64, 64, device="meta") for i in range(3) for part in parts
    }
    names = [f"{name}.weight" for name in layers]
    settings = run.choice.candidates(layers, 2)
    rule = settings[f"first and last layers in 8 bits, {run.choice.LOWEST}"]
    assert [rule[name] == "int8_rowwise" for name in names] == [True, True, False, False, True, True]
    assert settings[f"alone, {names[3]}"] == {names[3]: run.choice.LOWEST}


def test_methods_have_rows_and_what_they_recover(reproduced):
    _, rows = reproduced
    rounding, gptq = (values(rows, "sympy", method) for method in ("rounding", "gptq"))
    assert "KL, recovered" not in rounding
    assert gptq["KL, recovered"] == pytest.approx(100 * (1 - gptq["KL"] / rounding["KL"]), rel=1e-5)
    assert gptq["KL, recovered"] > 0
    assert gptq["KL, standard error of the recovered"] > 0
    model = values(rows, "model", "gptq")
    assert model["tokens seen"] == 10 * 64
    assert model["bits per weight"] == values(rows, "model", "rounding")["bits per weight"]
    assert values(rows, "sympy", "bfloat16", "weights")["KL"] == 0


def test_what_is_not_there_or_not_defined_says_so(reproduced):
    _, rows = reproduced
    assert list(values(rows, "model", "nothing yet")) == [
        "status: missing: ao_lab has no method NoSuchMethod"
    ]
    (said,) = values(rows, "model", "hqq")
    assert said.startswith("status: ")
    assert "hqq" in said.lower()


def test_the_page_has_both_pictures_and_a_table(reproduced):
    place, rows = reproduced
    (section,) = page.sections(rows)
    assert [one.name.rpartition("-tiny")[0] for one in section.drawings] == [
        "calibration-bytes",
        "calibration-minutes",
    ]
    table, best, draws = section.tables
    assert [line[3] for line in best.lines] == ["2"]
    assert [line[:4] for line in draws.lines] == [
        ["int3_g64_asymmetric", "search by inputs", draws.lines[0][2], "3"]
    ]
    assert " ± " in draws.lines[0][4]
    first = values(rows, "sympy", "search by inputs")["KL"]
    shown, half = next(line for line in table.lines if line[1] == "search by inputs")[5].split(" ± ")
    assert shown == f"{first:.{len(half.partition('.')[2])}f}"
    assert {row.seed for row in rows if row.method == "search by inputs"} == {0, 1, 2}
    seen = [row.value for row in rows if (row.method, row.metric) == ("search by inputs", "KL")]
    assert len(set(seen)) == 3, "each draw is of other sequences"
    assert {row.seed for row in rows if row.method == "gptq"} == {0}
    lines = {line[1]: line for line in table.lines}
    assert lines["rounding"][-4:-1] == ["", "", ""]
    assert "±" in lines["gptq"][-4]
    assert 0 < float(lines["gptq"][-2]) < 1
    assert "search by inputs" in lines
    assert page.main_finding(rows).startswith("tiny-llama, sympy-")
    assert (place / "reports" / "index.html").is_file()


def test_the_page_says_what_was_not_measured(reproduced):
    """One of the two schemes of the scale was asked for, and all of its methods."""
    _, rows = reproduced
    (one,) = page.real_runs(rows)
    assert page.missing(one) == ["**Not measured yet at this scale**: mxfp4_rceil."]
    assert page.missing(one)[0] in page.sections(rows)[0].paragraphs
    (part,) = page.real_runs([row for row in rows if row.method != "gptq"])
    assert page.missing(part) == [
        "**Not measured yet at this scale**: int3_g64_asymmetric by gptq; mxfp4_rceil."
    ]


def test_a_card_says_on_which_grid_the_weights_lay(reproduced):
    """What a tiny model with weights of its own does not say."""
    _, rows = reproduced
    (one,) = page.real_runs(rows)
    grid = replace(one.whole.rows[0], setting="file", metric="grid: layers Q4_1 (blocks of 32)")
    before = replace(one, whole=Results([grid]))
    assert page.quantized_before(before) == " of a file quantized before (layers Q4_1 (blocks of 32))"
    never = replace(one, whole=Results([replace(grid, metric="grid: none: float32, never quantized")]))
    assert not page.quantized_before(never)


def test_a_share_is_paired_by_window():
    ours, base = [1.0, 2.0, 3.0], [2.0, 4.0, 6.0]
    assert share(ours, base, (0, 0, 0)) == (0.5, 0.0)
    mean, error = share([1.0, 3.0, 2.0], base, (0, 0, 0))
    ratio = 0.5
    rest = np.array([1 - ratio * 2, 3 - ratio * 4, 2 - ratio * 6]) / 4
    assert (mean, error) == (0.5, pytest.approx(rest.std(ddof=1) / math.sqrt(3)))
    assert math.isnan(share(ours, [0.0, 0.0, 0.0], (0, 0, 0))[0])


def settings(tmp_path, **changes):
    return replace(Settings(scale="full", device="cpu", cache=tmp_path), **changes)


def test_schemes_and_methods_of_a_run(tmp_path):
    everything = settings(tmp_path)
    assert [case.setting for case in cases_of(everything)][:3] == [
        "int3_g64_asymmetric", "mxfp4_rceil", "mxfp4_rceil, inputs mxfp4_rceil",
    ]  # fmt: skip
    assert arms_of(everything, Case("mxfp4_rceil", None))[0] == "rounding"
    assert "smooth" not in arms_of(everything, Case("mxfp4_rceil", None))
    assert "smooth" in arms_of(everything, Case("mxfp4_rceil", "mxfp4_rceil"))
    some = settings(tmp_path, only=("nvfp4", "int5_g64", "gptq"))
    assert [case.setting for case in cases_of(some)] == ["nvfp4, inputs nvfp4", "nvfp4", "int5_g64"]
    assert arms_of(some, Case("nvfp4", None)) == ["rounding", "gptq"]
    budgets = [case.budget for case in cases_of(everything) if case.budget is not None]
    assert budgets == [3.0, 2.5, 4.25] * 3
    (first, *_) = cases_of(settings(tmp_path, only=("choice", "gptq", "hqq")))
    assert (first.setting, arms_of(settings(tmp_path), first)) == (
        "choice, 3 bits",
        ["rounding", "search by inputs", "gptq", "awq + gptq"],
    )
    check_parts(["gptq", "nvfp4", "torchao.int4_g64_tinygemm", "choice"])
    with pytest.raises(ValueError, match="unknown part 'gptk'"):
        check_parts(["gptk"])


def test_draws_are_a_part(tmp_path):
    """Rounding once, then each method on five seeds; a seed's sequences and AutoRound's order are of that seed."""
    scheme, methods = "int2_g64_asymmetric", ("gptq", "gptq + autoround")
    here = settings(tmp_path, only=("draws", scheme, *methods))
    tasks = [(case.setting, arm, seed) for case, arm, seed in cases.tasks_of_run(here)]
    assert tasks == [
        (scheme, "rounding", 0),
        *((scheme, method, seed) for seed in range(5) for method in methods),
    ]
    assert [methods_of("gptq + autoround", seed)[-1].seed for seed in (0, 3)] == [0, 3]
    short = cases.tasks_of_run(settings(tmp_path, scale="quick", only=("draws",)))
    assert len(short) == 1 + 5 * len(cases.SHORT_DRAWN)
    schemes = {case.setting for case, _, _ in cases.tasks_of_run(settings(tmp_path, only=("draws", "hqq")))}
    assert schemes == {name for name, _ in cases.DRAWN["full"]}
    with pytest.raises(ValueError, match="draws are of schemes and methods of ours, not of choice"):
        check_parts(["draws", "choice"])


def test_draws_are_compared_seed_by_seed():
    def row(method, seed, value):
        return Row(experiment="calibration", table="real m/full/t", setting="int3_g64", method=method, metric=RECOVERED,
                   value=value, unit="%", device="cpu", seed=seed)  # fmt: skip

    rows = [row("gptq", seed, 50.0 + 10 * seed) for seed in range(3)]
    rows += [row("autoround", seed, 51.0 + 10 * seed) for seed in range(3)]
    rows += [row("hqq", 0, 9.0)]
    (one,) = page.real_runs(rows)
    lines = page.draws_table(one).lines
    half = 4.302653 * 10 / math.sqrt(3)
    assert [line[1:] for line in lines] == [
        ["gptq", "t", "3", f"60.0 ± {half:.1f}", ""],
        ["autoround", "t", "3", f"61.0 ± {half:.1f}", "1.0 ± 0.0 over gptq"],
    ]


def test_every_method_is_made_of_records():
    known = {"Rotate", "Smooth", "AWQ", "Clip", "HQQ", "GPTQ", "AutoRound", "LowRank", "BiasCorrection"}
    assert {name for arm in ARMS.values() for name, _ in arm} <= known
    assert methods_of("rounding") == ()
    assert [one.name for one in methods_of("awq + gptq")] == ["awq", "clip", "gptq"]


def letters(text):
    return Tokens(torch.tensor([ord(letter) for letter in text]), list(range(1, len(text) + 1)))


def test_a_seed_draws_sequences():
    documents = ["ab " * 200, "xy " * 200, "short"]
    made = drawn_sequences(documents, letters, 16, 12, 0, [7])
    assert made.shape == (12, 16)
    assert made[:, 0].tolist() == [7] * 12
    assert {chr(one) for one in made[:, 1:].flatten().tolist()} == set("abxy ")
    assert torch.equal(made, drawn_sequences(documents, letters, 16, 12, 0, [7]))
    assert not torch.equal(made, drawn_sequences(documents, letters, 16, 12, 1, [7]))
    with pytest.raises(ValueError, match="no document has twice"):
        drawn_sequences(["short"], letters, 16, 1, 0)


def test_what_methods_see_is_no_text_that_judges():
    judged = texts.evaluation_texts(None)[0].documents[0]
    assert all(one[:2000] not in judged for one in calibration_documents(None) if len(one) > 2000)


def test_the_command_refuses_unknown_parts(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    assert main(["reproduce", "calibration", "--model", str(folder), "--only", "gptk"]) == 2
    assert (
        "unknown part 'gptk' of calibration; the nearest is gptq; the parts are rounding; search"
        in " ".join(capsys.readouterr().err.split())
    )
    assert json.loads(json.dumps(list(ARMS)))[0] == "rounding"
