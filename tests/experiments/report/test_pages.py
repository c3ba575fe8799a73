"""Pages and figures come from rows and nothing else.

Comparisons whose peer has no value are listed, with the reason that rows give and a command.
"""

import base64
import gzip
import json
import re
import shlex
from dataclasses import replace

import pytest
import typer

from ao_lab.cli.app import app
from experiments.formats import run as formats
from experiments.harness import rows as rows_module
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, publish, read
from experiments.ptq import run as ptq
from experiments.report import pages, plots
from experiments.report.content import Headline, brief, headlines_of
from experiments.report.peers import EXPECTED, missing, peer_of
from experiments.report.results import by_run, family, number
from experiments.report.scoreboard import scoreboard
from tests.experiments.harness import tiny

# The first page: headlines with number, device and date, a line for each experiment, and no more than is read in a minute.
REPORTS = ROOT / "reports"
PAGE = (REPORTS / "README.md").read_text()
MOST_BYTES, HEADLINES = 12_000, 9
#: All but those whose rows take long to read.
SMALL = ("decode", "fp8_training", "generate", "kernels", "qat", "qat_overhead", "sparsity", "speed")


def row(value, device="NVIDIA H200", date="2026-11-26T10:00:00Z"):
    return Row(
        experiment="linear", table="weights/full/x", setting="1 row", method="int4", metric="time", value=value, unit="us",
        device=device, seed=0, date=date,
    )  # fmt: skip


def test_a_headline_has_the_values_device_and_days_of_its_rows():
    (found,) = headlines_of(
        "int4 takes {a:.1f} us, int8 {b:.1f}", a=row(10.52), b=row(15.6, date="2026-11-27T")
    )
    assert str(found) == "int4 takes 10.5 us, int8 15.6 (NVIDIA H200, 2026-11-26 to 2026-11-27)."
    assert headlines_of("{a} {b}", a=row(1.0), b=None) == []
    assert str(Headline("x", [row(1.0, date="")])) == "x (NVIDIA H200)."


def test_the_first_page_is_short():
    assert len(PAGE.encode()) <= MOST_BYTES
    headlines = re.findall(
        r"^- .+ \((?:NVIDIA .+|CPU|short run on CPU), \d{4}-.+\)\. \[\w+\]\(\w+\.md\)$", PAGE, re.MULTILINE
    )
    assert len(headlines) == HEADLINES
    assert all(re.search(r"\d", one) for one in headlines)
    for name in EXPERIMENTS:
        if Paths.default(REPORTS).rows(name).exists():
            assert f"| {EXPERIMENTS[name].page_module().QUESTION} | " in PAGE
            assert PAGE.count(f" | [{name}]({name}.md) | ") == 1


@pytest.mark.parametrize("name", SMALL)
def test_headlines_are_of_the_committed_rows(name):
    module, rows = EXPERIMENTS[name].page_module(), read(Paths.default(REPORTS).rows(name))
    # What a card says is said once.
    card = re.search(rf"^- \*\*.+ \[{name}\]\({name}\.md\)$", PAGE, re.MULTILINE)
    for headline in pages.optional(module, "headlines", rows):
        assert (f"- {headline} [{name}]({name}.md)" in PAGE) != bool(card)
    said = module.main_finding(rows)
    told = brief(said)
    assert f"| {told[:1].upper()}{told[1:]} | [{name}]" in PAGE


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    made = tiny.settings(folder, ["mxfp4", "int4_g32_asymmetric", "nf4", "torchao.nvfp4"])
    return {"formats": formats.run(made), "ptq": ptq.run(made)}


def published(rows, folder):
    made = Paths(folder / "no cache is needed", folder / "reports")
    for name, measured in rows.items():
        publish(made.rows(name), measured)
    return made


@pytest.fixture
def places(rows, tmp_path):
    return published(rows, tmp_path)


@pytest.fixture(scope="module")
def written(rows, tmp_path_factory):
    """Pages of all rows."""
    made = published(rows, tmp_path_factory.mktemp("written"))
    pages.write_pages(made)
    return made


def test_pages_need_no_network_and_no_file_that_is_not_there(written):
    """The first page holds no table of an experiment: that has a page of its own."""
    found = {name: (written.reports / f"{name}.html").read_text() for name in ("index", "formats", "ptq")}
    for html in found.values():
        assert "https://" not in html
        linked = re.findall(r"""(?:src|href)=["']([^"'#]+)["']""", html)
        assert linked
        assert [name for name in linked if not (written.reports / name).is_file()] == []
    drawn = {name for html in found.values() for name in re.findall(r'src="(figures/[^"]+)"', html)}
    assert len(drawn) == len(list(written.figures.glob("*.svg")))
    assert "proxy model" in found["ptq"]
    assert "Every scheme on" not in found["index"]
    assert "Every scheme on" in found["formats"]
    assert not written.cache.exists()
    for name in ("README.md", "formats.md", "limits.md", "ptq.md"):
        assert (written.reports / name).stat().st_size > 100


def test_the_same_rows_give_the_same_files(places):
    places.rows("ptq").unlink()
    pages.write_pages(places)
    first = {path: path.read_bytes() for path in places.reports.rglob("*") if path.is_file()}
    pages.write_pages(places)
    assert first == {path: path.read_bytes() for path in places.reports.rglob("*") if path.is_file()}


def test_a_missing_result_stays_missing(places, rows):
    kept = [row for row in rows["ptq"] if (row.method, row.metric) != ("nf4", "accuracy")]
    places.rows("formats").unlink()
    publish(places.rows("ptq"), kept)
    pages.write_pages(places)
    line = next(
        line for line in (places.reports / "ptq.md").read_text().splitlines() if line.startswith("| nf4")
    )
    assert line.split("|")[6].strip() == ""


def test_nothing_measured_makes_an_empty_report(tmp_path):
    made = pages.write_pages(Paths(tmp_path, tmp_path / "reports"))
    assert [what for what, _ in made] == [*["report"] * 6, *["answers"] * 2, *["report"] * 2]


def test_bits_stand_beside_the_tensors_that_they_are_of(written):
    page = (written.reports / "formats.md").read_text()
    for setting in ("normal", "outlier channels", "weights", "activations"):
        assert f"| {setting}: bits per element |" in page
    assert 'that of "normal"' in page
    assert 'that of "weights"' in page


def test_the_page_says_what_tensor_wide_scales_see(written):
    assert "found for each window apart" in (written.reports / "ptq.md").read_text()


def test_results_are_grouped_by_run(rows):
    other = [replace(row, device="GPU") for row in rows["ptq"]]
    groups = by_run([*rows["ptq"], *other], ptq.QUALITY)
    assert [where.device for where in groups] == ["GPU", "cpu"]
    (one, two) = groups.values()
    assert one.methods == two.methods
    assert one.value("weights", "mxfp4", "bits per weight") == pytest.approx(4.25)
    assert one.value("weights", "mxfp4", "no such metric") is None


def test_families_and_numbers():
    assert [
        family(name)
        for name in ("float32", "fp8_rowwise", "mxint8", "te.nvfp4", "int8_rowwise", "nf4", "int4_g32_cast")
    ] == ["plain", "FP8", "MX", "NVFP4", "integer", "NF4", "integer"]
    assert [number(value, 1) for value in (None, float("nan"), float("inf"), 1.25)] == [
        "",
        "NaN",
        "exact",
        "1.2",
    ]


def test_every_marker_has_its_name_under_the_pointer():
    text = plots.svg(plots.dots(["a & b", "c"], {"s": [1.0, None], "t": [2.0, 3.0]}, "x", base=1.0))
    assert re.findall(r"<use [^>]*><title>([^<]*)</title></use>", text) == [
        "a &amp; b, s: 1",
        "a &amp; b, t: 2",
        "c, t: 3",
    ]
    assert "titled-" not in text
    wrong = plots.dots(["a"], {"s": [1.0]}, "x")
    plots.TITLES[wrong]["titled-0"].append("two")
    with pytest.raises(ValueError, match="2 titles for 1 markers"):
        plots.svg(wrong)


def test_the_scripts_of_the_tables_lie_beside_the_pages(written):
    text = (written.reports / "assets" / "datatables.js").read_text()
    packed = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert b"DataTable" in gzip.decompress(base64.b64decode(packed["js"]))
    assert "assets/datatables.js" in (written.reports / "assets" / "report.js").read_text()
    assert "assets/report.js" in (written.reports / "ptq.html").read_text()


def test_a_stand_in_fills_no_published_cell():
    """Committed rows: what stands beside a published value is of the real shapes, on a GPU."""
    from experiments.decode import page as decode
    from experiments.qat_overhead import page as overhead

    data = rows_module.ROOT / "reports" / "data"
    found = [*decode.comparisons(rows_module.read(data / "decode.csv"))]
    found += overhead.comparisons(rows_module.read(data / "qat_overhead.csv"))
    measured = [one for one in found if one.measured is not None]
    assert measured
    assert all("cpu" not in one.measured_on for one in measured)
    quick = [row for row in rows_module.read(data / "decode.csv") if "stand-in" in row.table]
    assert quick
    assert all(one.measured is None for one in decode.comparisons(quick))
    board = scoreboard(found)
    assert [len(table.lines) for table in board.tables] == [len(measured), len(found) - len(measured)]
    assert {one.source for one in found} == set(board.sources)


def test_plots_leave_gaps_and_survive_no_values():
    text = plots.svg(plots.dots(["a", "b"], {"s": [1.0, None]}, "x", errors={"s": [0.1, None]}, symlog=0.1))
    assert text.startswith("<svg")
    assert "s</text>" in text.replace("\n", "")
    plots.svg(plots.heatmap(["a"], ["b"], [[None]], "x"))
    plots.svg(plots.dots([], {"s": []}, "x"))
    plots.svg(plots.scatter_panels({"one": [plots.Point(1.0, -2.0, "MX", "mxfp4")]}, "x", "y", symlog=0.1))


def test_lines_of_a_table_fit_its_columns():
    with pytest.raises(ValueError, match="2 cells under 3 columns"):
        pages.Table("A table", ["name", "a", "b"], [["one", "1", "2"], ["two", "3"]])


def peer_row(method, metric, value=1.0, setting="128 rows", device="cpu"):
    return Row(experiment="linear", table="torchao/quick/layer", setting=setting, method=method, metric=metric, value=value,
               unit="", device=device, seed=0)  # fmt: skip


def lines(*rows):
    return [line for line in missing({"linear": rows}).lines if line[0] == "linear"]


def test_a_peer_without_a_value_is_listed_with_its_reason():
    absent = peer_row("torchao int8wo", "status: missing: torchao is not installed")
    command = "`ao-lab reproduce linear --scale quick --device cpu --changed`"
    assert lines(absent) == [
        ["linear", "torchao", "torchao, quick", "cpu", "1", "1", "missing: torchao is not installed", command]
    ]
    other = [peer_row("torchao int4wo", "time", 2.0), peer_row("torchao int4wo", "status: ok")]
    assert lines(absent, *other)[0][4:6] == ["1", "2"]
    assert lines(*other) == []


def test_a_later_value_of_the_same_comparison_counts():
    assert (
        lines(
            peer_row("torchao int8wo", "status: not run: the time was over"),
            peer_row("torchao int8wo", "time"),
        )
        == []
    )


def test_an_expected_peer_without_any_row_is_listed():
    (line,) = lines(peer_row("int8", "time"))
    assert (line[1], line[4], line[6]) == ("torchao", "all", "not run")
    assert {line[0] for line in missing({}).lines} == {one.experiment for one in EXPECTED}
    own = missing({"calibration": [row(1.0)], "linear": [row(1.0)]}, ["calibration"])
    assert {line[0] for line in own.lines} == {"linear"}


def test_times_that_a_cpu_does_not_measure_are_no_missing_comparison():
    assert lines(peer_row("torchao int8wo", "status: not run: times are of a GPU at full scale")) == []


def test_conventions_of_others_are_our_code():
    assert peer_of(peer_row("quantize.torchao.nf4", "time")) == ""
    assert peer_of(peer_row("torchao.nf4", "time")) == ""
    assert peer_of(peer_row("after_torchao", "time")) == ""
    assert peer_of(peer_row("ours", "time", setting="torchao")) == "torchao"
    assert peer_of(peer_row("2:4, cuSPARSELt searched", "time")) == "cuSPARSELt"


def test_commands_are_taken_by_the_command_line():
    group = typer.main.get_command(app)
    for one in EXPECTED:
        assert one.experiment in EXPERIMENTS
        if one.command.startswith("ao-lab "):
            _, name, *words = shlex.split(one.command)
            command = group.get_command(group.make_context("ao-lab", [name], resilient_parsing=True), name)
            assert command.make_context(name, words).params["tables"] == [one.experiment]


def test_labels_of_near_points_do_not_cover_each_other():
    near = [plots.Point(1.0 + 0.01 * number, 1.0, "MX", f"scheme_{number}") for number in range(4)]
    figure = plots.scatter_panels({"one": [*near, plots.Point(2.0, 2.0, "MX", "far")]}, "x", "y")
    boxes = [note.get_window_extent() for note in figure.axes[0].texts]
    assert len(boxes) == 5
    assert not [1 for place, box in enumerate(boxes) for other in boxes[:place] if box.overlaps(other)]
