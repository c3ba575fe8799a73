"""What is made of rows: the roofline, the page, the command line."""

import json
from dataclasses import replace

import pytest
import torch

import reference
from ao_lab.cli.app import main
from experiments.harness.paths import Paths
from experiments.harness.rows import publish, read
from experiments.kernels import bench as command
from experiments.kernels import page, run
from experiments.kernels.baselines import BASELINES
from experiments.kernels.cases import CASES
from experiments.kernels.operations import LARGE, SHAPES, SHOWN
from experiments.kernels.page import roof_of, roofline
from experiments.report import plots
from experiments.report.targets import Target
from tests.experiments.harness.fake_watch import FakeWatch, bench, broken, flipped


@pytest.fixture(scope="module")
def sample_rows(tmp_path_factory):
    names = ["quantize.fp8_rowwise", "quantize.mxfp4.packed", "swiglu.fp8_rowwise", "small.fp8_rowwise"]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LARGE, "16x4096"):
            patch.setitem(SHAPES, name, (64, 512))
        fast = broken("swiglu_quantize", flipped("codes"))
        made = bench(tmp_path_factory.mktemp("bench"), fast=fast, baselines=BASELINES[:1])
        shapes = {name: SHAPES[name] for name in (*LARGE, "16x4096")}
        rows = run.measure(made, run.pairs([CASES[name] for name in names], shapes))
        # The host of a test is whatever it is.
        return [replace(row, value=10.0) if row.metric == "host time" else row for row in rows]


def test_the_roofline_is_drawn_from_rows(sample_rows):
    (found,) = page.results_of(sample_rows).values()
    text = plots.svg(roofline(found))
    for word in (
        "quantize.fp8_rowwise",
        "swiglu.fp8_rowwise",
        "fastest baseline",
        "target",
        "copy",
        "16384x14336",
    ):
        assert f"{word}</text>" in text.replace("\n", ""), word
    assert "small.fp8_rowwise" not in text
    slow = [replace(row, value=0.2) if row.metric == "fraction" else row for row in sample_rows]
    (below,) = page.results_of(slow).values()
    assert "below a target" in plots.svg(roofline(below))
    assert "below a target" not in text
    plots.svg(roofline([]))


def test_the_roof_is_the_copies(sample_rows):
    (found,) = page.results_of(sample_rows).values()
    ok = [line for line in found if line.ok and line.shape in LARGE]
    roof = roof_of(ok)
    assert [size for size, _ in roof] == [2 * 2 * 64 * 512 / 1e9]
    assert (
        min(line.values["copy rate"] for line in ok)
        <= roof[0][1]
        <= max(line.values["copy rate"] for line in ok)
    )


def test_the_page_shows_misses_and_slow_rows(sample_rows, tmp_path):
    slow = [
        replace(row, value=0.2) if row.metric == "fraction" and row.method == "quantize.mxfp4.packed" else row
        for row in sample_rows
    ]
    slow = [
        replace(row, value=0.5) if row.metric == "ratio" and row.setting.startswith("quantize.fp8") else row
        for row in slow
    ]
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    publish(places.rows("kernels"), slow)
    assert len(read(places.rows("kernels"))) == len(slow)
    from experiments.report.pages import write_pages

    write_pages(places)
    text = (places.reports / "kernels.md").read_text()
    assert "**Missed targets: 4.**" in text
    assert "quantize.mxfp4.packed at 16384x4096 (fraction 0.2 of 0.9)" in text
    assert "swiglu.fp8_rowwise at 16384x14336 (wrong: codes" in text
    assert "**Slower than a baseline: 2.**" in text
    assert "SLOWER than torch eager" in text
    assert "(figures/kernels-roofline.svg)" in text
    assert "(figures/kernels-operations.svg)" in text
    assert (places.figures / "kernels-roofline.svg").exists()
    assert "(kernels.md)" in (places.reports / "README.md").read_text()


def test_tables_name_the_rows_of_their_lines(sample_rows):
    floors, baselines, *_ = page.sections(sample_rows)
    assert {row.method for row in floors.tables[0].rows} >= {"quantize.fp8_rowwise"}
    assert baselines.tables[0].rows


def test_a_miss_by_little_shows_enough_digits():
    assert str(Target("speedup", 1.7958, 1.8, **SHOWN)) == "speedup 1.796 of 1.8"


def test_list_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in shown] == list(CASES)
    assert shown[0]["targets"] == {"fraction": 0.95}
    assert main(["bench", "dequantize.mxfp4", "--list"]) == 0
    assert "dequantize.mxfp4.packed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], "ao-lab doctor"),
        (["bench", "mxfp4", "--shape", "16384x4096"], "ao-lab doctor"),
        (["bench", "mxfp5"], "mxfp4"),
        (["bench", "--shape", "large"], "ROWSxCOLUMNS"),
        (["bench", "small", "--shape", "16384x4096"], "none of these"),
    ],
)
def test_without_a_gpu_bench_is_one_line_and_code_2(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_reproduce_without_a_gpu_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv("AO_LAB_REPORTS", str(tmp_path))
    assert main(["reproduce", "kernels"]) == 1
    assert "torch sees none" in capsys.readouterr().err


def test_bench_shows_what_it_measured(monkeypatch, capsys, tmp_path, sample_rows):
    (found,) = page.results_of(sample_rows).values()
    monkeypatch.setattr(command, "has_device", lambda: True)
    monkeypatch.setattr(command, "part", lambda work, with_baselines: found if with_baselines else [])
    assert main(["bench", "mxfp4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["lines"]
    assert shown[0]["case"] == found[0].case
    assert main(["bench", "mxfp4"]) == 0
    assert "MISSED" in capsys.readouterr().out
    assert main(["bench", "mxfp4", "--no-baselines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == []


def test_a_complete_run_is_published(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "CASES", {name: CASES[name] for name in ("quantize.mxfp4", "small.fp8_rowwise")})
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, (64, 512))
    made = bench(tmp_path)
    monkeypatch.setattr(command, "settings_for", lambda *arguments: replace(made.settings, scale="full"))
    monkeypatch.setattr(run, "CudaWatch", FakeWatch)
    monkeypatch.setattr(run, "PLAN", made.plan)
    monkeypatch.setattr(run, "host_times", lambda calls, *arguments, **options: dict.fromkeys(calls, 1e-6))
    # Calls from JAX have a test of their own, of a size for a CPU.
    monkeypatch.setattr(run, "installed", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "fast", reference)
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    found, written = command.complete(with_baselines=False, paths=places)
    assert {line.case for line in found} == {"quantize.mxfp4", "small.fp8_rowwise"}
    assert all(line.ok for line in found)
    assert {row.table for row in read(places.rows("kernels"))} == {"kernels/full/random-normal"}
    assert (places.reports / "kernels.md").exists()
    assert any("kernels.csv.gz" in where for _, where in written)
