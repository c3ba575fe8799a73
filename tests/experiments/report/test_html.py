"""The pages as files, without a browser: sizes, links and anchors, texts for those who do not see, numbers, plain words."""

import ast
import itertools
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from ao_lab.intervals import half_interval
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, read
from experiments.report import committed, history, pages, plots, ratio_maps
from experiments.report.content import (
    Card,
    Comparison,
    Drawing,
    Headline,
    Section,
    Table,
    Windows,
    brief,
    lead,
    member,
    parts,
    readable,
    runs_of,
    sentences,
    windows_in,
)
from experiments.report.pages import TEMPLATES, further_pages
from experiments.report.phones import dots_twice, ratio_map_twice
from experiments.report.plots import NARROW
from experiments.report.ratio_maps import Ratios
from experiments.report.results import Results, by_run, number, shown
from experiments.report.scoreboard import better, scoreboard, short

REPORTS = ROOT / "reports"
PAGES = sorted(path.name for path in REPORTS.glob("*.html"))
#: Bytes of a page, and of the first.
MOST, MOST_OF_FIRST = 300_000, 100_000


class Parsed(HTMLParser):
    """The elements of a page: tags with attributes, ids, and how many cells each table has."""

    def __init__(self, name):
        super().__init__()
        self.elements, self.tables = [], []
        self.feed((REPORTS / name).read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag in ("td", "th") and self.tables:
            self.tables[-1].append("")

    def handle_data(self, data):
        if self.tables and self.tables[-1]:
            self.tables[-1][-1] += data.strip()

    @property
    def ids(self):
        return {given["id"] for _, given in self.elements if given.get("id")}


parsed = cache(Parsed)


def test_pages_are_small():
    assert {"index.html", "scoreboard.html", "history.html", "linear.html"} <= set(PAGES)
    sizes = {name: (REPORTS / name).stat().st_size for name in PAGES}
    assert {name: size for name, size in sizes.items() if size > MOST} == {}
    assert sizes["index.html"] < MOST_OF_FIRST


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere_and_nothing_is_empty(name):
    page = parsed(name)
    for tag, given in page.elements:
        target = given.get("href") or given.get("src") or ""
        file, _, anchor = target.partition("#")
        assert not target.startswith("http"), target
        assert not file or (REPORTS / file).is_file(), target
        assert not anchor or anchor in (parsed(file) if file else page).ids, target
        if tag == "img":
            assert len(given["alt"]) > 10
        if tag == "table":
            assert given["aria-label"]
        assert "style" not in given, (
            "widths and colours are those of report.css, which knows phones and dark screens"
        )
    assert all(any(cells) for cells in page.tables)


def test_the_style_wraps_scrolls_and_follows_the_system():
    style = (TEMPLATES / "report.css").read_text()
    assert (REPORTS / "assets" / "report.css").read_text() == style
    for rule in (
        "scroll-margin-top",
        "prefers-color-scheme: dark",
        "max-width: 100%",
        "overflow-wrap: anywhere",
    ):
        assert rule in style
    assert re.findall(r"(?<![-\w])width: *\d+px", style) == []


def test_the_first_screen_has_numbers_a_figure_and_the_count():
    text, page = (REPORTS / "index.html").read_text("utf-8"), parsed("index.html")
    cards = [given for tag, given in page.elements if given.get("class") == "card"]
    assert 3 <= len(cards) <= 6
    body = text[text.index("<h1>") :]
    assert body.index(" published values ") < body.index('class="card"')
    assert text.count("<img ") == 1
    assert len(re.findall(r"<small>[^<]+, \d{4}-\d\d-\d\d, commit [0-9a-f]{8}", text)) == len(cards)


def published(metric, value, measured):
    return Comparison("m", "x", metric, "", value, "H100", "a paper", measured)


def test_the_count_is_of_the_lines():
    board = scoreboard(
        [published("time", 1.0, 2.0), published("perplexity", 8.1, None), published("time", 1.0, None)]
    )
    assert board.counted == (
        "No published accuracy is measured here yet (0 of 1); 1 of 3 published values are compared with one measured here "
        "(same model or random weights of its shapes, method and metric; devices may differ)"
    )
    many = [
        replace(published("time", 1.0, 2.0), model=f"{name} {size}")
        for name, size in zip("aaab", "1234", strict=True)
    ]
    assert scoreboard(many).counted.endswith(", 3 of them in one benchmark of 3 cases, a")
    assert "in one benchmark" not in scoreboard(many[2:]).counted
    assert [len(table.lines) for table in board.tables] == [1, 2]
    many = scoreboard([published("time", 1.0, 1.0)] * 41)
    assert [table.caption for table in many.tables] == ["Published values and ours: m"]
    assert many.divided == 'Of the 41 values 41 in the table "Published values and ours: m".'


def test_a_filter_lists_the_shapes_of_a_large_benchmark_last():
    shapes = [f"a M={size:02}" for size in range(41)]
    board = scoreboard([replace(published("time", 1.0, None), model=name) for name in [*shapes, "b", "c 1"]])
    assert board.cells("model") == ["b", "c 1", *shapes]


def test_less_time_is_better_and_every_published_metric_has_a_direction():
    assert [better(one) for one in ("time", "peak memory", "loss", "speed over bfloat16", "throughput")] == [
        "less", "less", "less", "more", "more",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="whether more or less 'sharpness' is better"):
        better("sharpness")
    found = [
        one
        for record in EXPERIMENTS.values()
        for one in getattr(record.page_module(), "comparisons", lambda rows: [])([])
    ]
    assert len(found) > 500
    assert {better(one.metric) for one in found} == {"more", "less"}


def test_ratios_of_times_on_two_devices_are_in_parentheses():
    def cell(metric, unit, on):
        board = scoreboard([replace(published(metric, 2.0, 1.0), unit=unit, measured_on=on)])
        return board.measured[0].lines[0][3]

    assert cell("time", "ms", "NVIDIA H200, CUDA graph") == "(0.50)"
    assert [cell("time", "ms", "NVIDIA H100 80GB HBM3"), cell("speedup", "x", "NVIDIA H200")] == [
        "0.50",
        "0.50",
    ]
    assert cell("peak memory", "GB", "NVIDIA H200") == "0.50"


def test_small_values_keep_their_digits():
    assert [short(one) for one in (0.0036, 1.5667, 126.94, 48645.3, None)] == [
        "0.0036",
        "1.567",
        "126.9",
        "48645",
        "",
    ]
    assert [number(one, 2) for one in (0.0036, -0.00004, 0.0, 0.3, -2.0)] == [
        "0.0036",
        "-4e-05",
        "0.00",
        "0.30",
        "-2.00",
    ]


def row(table="quality/full/x", value=1.0, **changes):
    given = {
        "date": "2026-11-26T10:00:00Z",
        "commit": "0123abcd",
        "device": "cpu",
        "metric": "speed",
        **changes,
    }
    return Row(experiment="ptq", table=table, setting="s", method="m", value=value, unit="", seed=0, **given)


def test_short_runs_are_left_out_where_there_are_full_ones():
    full, quick, alone = row(), row("quality/quick/x"), row("layers/quick/x")
    assert shown([full, quick, alone]) == [full, alone]
    assert shown([quick]) == [quick]


def test_numbers_of_short_runs_are_marked():
    full, quick = row(device="NVIDIA H200"), row("quality/quick/x")
    assert Card(quick, "1", "speed", "bfloat16").run == "short run on CPU"
    assert str(Headline("Twice", [quick, full])) == "Twice (short run on CPU, NVIDIA H200, 2026-11-26)."


def test_short_runs_stand_behind_full_ones_on_the_first_screen():
    short, full = (Card(row(f"quality/{scale}/x"), "1", "speed", "bfloat16") for scale in ("quick", "full"))
    made = [SimpleNamespace(cards=[short, full]), SimpleNamespace(cards=[full] * 5)]
    assert pages.first_cards(made) == [full] * 6
    assert pages.first_cards([SimpleNamespace(cards=[short, full])]) == [full, short]


def test_the_figure_of_the_first_screen_has_the_values_of_its_bars():
    bars = {"layer, 1 token": {"ao_lab": 2.702, "torchao": 1.55}}
    drawn = pages.draw_overview([Card(row(device="NVIDIA H200"), "2.70x", "speed", "bfloat16", bars)])
    assert all(f">{value}</text>" in pages.svg(drawn.figure) for value in ("2.70", "1.55"))
    assert "(NVIDIA H200, 2026-11-26)" in drawn.caption


@pytest.mark.parametrize("name", [path.name for path in REPORTS.glob("*.html")])
def test_marks_of_markdown_are_not_shown(name):
    """Backticks, but in the lists that filters suggest."""
    text = (REPORTS / name).read_text("utf-8")
    assert re.findall(r"<(?:td|th|h2|p|li|small|span|figcaption)\b[^>]*>[^<]*`[^`<]+`", text) == []


def test_the_history_keeps_one_row_a_commit_and_its_line_rises_with_values():
    first, second = row(value=1.0), row(value=2.0, date="2026-11-27T10:00:00Z", commit="4567abcd")
    kept = history.in_order([second, first, first, row(value=1.5, date="2026-11-26T09:00:00Z")])
    assert [one.value for one in kept] == [1.0, 2.0]
    (found,) = history.histories(kept, [("speed of m", second)])
    assert found.line == "3.0,25.0 117.0,3.0"
    assert found.table.lines[0] == ["2026-11-27", "4567abcd", "2", "+100.0%, better"]
    assert history.History("", [first]).line == ""
    assert found.ends == "1 on 2026-11-26, now 2"
    assert found.direction == "higher is better"
    assert found.moved
    assert not history.History("", [first, replace(second, value=1.00001)]).moved
    flat = history.History("", [row(value=1.366), row(value=1.384)])
    heights = [float(point.partition(",")[2]) for point in flat.line.split()]
    assert 1 < heights[0] - heights[1] < 1.5  # of 22: 1.3% looks like 1.3%, not like a rise from nothing
    points = [replace(one, unit="points") for one in flat.rows]
    assert history.History("", points).least == history.LEAST_POINTS
    judged = [history.judged(row(metric=name), 5.0) for name in ("time", "speed", "gap, bits per byte")]
    assert judged == [", worse", ", better", ", worse"]
    assert history.judged(row(metric="time"), 1.0) == ""
    gaps = [replace(row(value=value, metric="gap, bits per byte"), unit="%") for value in (-0.03, 0.01)]
    assert history.changed(*gaps) == "+0.04 points"  # no -133.3%, better
    assert history.changed(gaps[0], replace(gaps[1], value=0.26)) == "+0.29 points, worse"
    assert history.changed(gaps[0], gaps[0]) == "unchanged"
    shares = [replace(row(value=value, metric="recovered"), unit="%") for value in (97.0, 92.94)]
    assert history.changed(*shares) == "-4.06 points, worse"
    assert history.changed(*shares, half=2.8) == "-4.06 points, worse"
    assert history.changed(*shares, half=2.9) == "-4.06 points"  # within sqrt(2) * 2.9


def test_a_history_tells_what_small_steps_add_up_to_and_knows_intervals():
    days = [
        row(value=value, date=f"2026-11-2{day}T10:00:00Z")
        for day, value in ((5, 1.967), (6, 2.803), (7, 2.729), (8, 2.702))
    ]
    found = history.History("", days)
    assert found.before == "-1.0%"
    assert found.first == "+37.4%, better; since the best, 2.803 on 2026-11-26: -3.6%, worse"
    assert found.ends == "1.967 on 2026-11-25, now 2.702, best 2.803"
    assert history.History("", days[:1]).before == history.History("", days[:1]).first == ""
    share = replace(row(value=92.94, metric="recovered"), unit="%")
    half = replace(share, metric="recovered, 95% interval", value=4.1)
    assert history.halves_of([share, half]) == {share.key: 4.1}
    change = replace(row(value=10.0, metric=history.CHANGE), unit="%")
    known = dict(zip(history.OF_PERPLEXITY, (0.0, 0.01, 32.0), strict=True))
    beside = [replace(change, metric=metric, value=value) for metric, value in known.items()]
    assert history.halves_of([change, *beside])[change.key] == pytest.approx(
        2.04, abs=0.01
    )  # t of 31 degrees


def test_values_of_the_first_screen_have_their_history_committed():
    rows = read(REPORTS / "data" / history.FILE)
    assert rows == history.in_order(rows)
    assert len({one.key for one in rows}) < len(rows)


def test_old_versions_of_a_file_give_their_values():
    old = (
        b"experiment,table,setting,method,metric,value,unit,published,device,seed,source_hash\n"
        b"linear,t/full/x,s,m,time,3.5,us,,cpu,0,ab\n"
    )
    (found,) = committed.parsed(old, compressed=False)
    assert (found.experiment, found.value, found.commit, found.date) == ("linear", 3.5, "", "")
    assert list(committed.parsed(b"a,b\n1,2\n", compressed=False)) == []


def test_long_sentences_have_a_lead_and_a_list():
    text = "Weights (an H200; 1 token), speed over bfloat16: " + "; ".join(
        f"scheme {place} at 1.{place} (a, b)" for place in range(12)
    )
    assert lead(text) == "Weights (an H200; 1 token), speed over bfloat16"
    assert parts(text + ".")[-1] == "scheme 11 at 1.11 (a, b)"
    assert len(parts(text)) == 12
    bold = f"**Not measured: 3.** {'a' * 90} (x: y); {'b' * 90}; {'c' * 90}."
    assert (lead(bold), len(parts(bold))) == ("**Not measured: 3.**", 3)
    assert (lead("Short: a; b; c."), parts("Short: a; b; c.")) == ("Short: a; b; c.", [])


def test_a_list_is_seen_and_its_end_opens():
    """Six members stand on the page; a sentence a line; README.md takes the sentences that fit."""
    text = "Speed over bfloat16: " + "; ".join(f"scheme {place} {'x' * 30}" for place in range(9)) + "."
    macro = "{% from 'macros.html.j2' import said %}{{ said(text) }}"
    shown, _, folded = pages.environment(True).from_string(macro).render(text=text).partition("<details>")
    assert (shown.count("scheme "), folded.count("scheme ")) == (6, 3)
    several = "Gap (a. B c) 1.2. Loss 3.4. 5 seeds."
    assert sentences(several) == ["Gap (a. B c) 1.2", "Loss 3.4", "5 seeds"]
    assert brief(f"Short. B{'a' * 400}.") == "Short"
    assert brief("a" * 400) == "a" * 400
    assert (
        brief(f"Speed: {'a' * 200}; {'b' * 100}; {'c' * 100}; d")
        == f"Speed: {'a' * 200}; {'b' * 100}; 2 more"
    )
    assert [member(one) for one in ("int8", "int4 g128, zero points")] == ["int8", "int4 g128 (zero points)"]


def test_labels_keep_off_dots_and_other_labels():
    panels = {"a": [plots.Point(x, 1.0, "integer", f"label {x}") for x in (1.0, 1.02, 1.04)]}
    figure = plots.scatter_panels(panels, "x", "y", columns=1)
    axis = figure.axes[0]
    dots = plots.boxes(axis, [(point.x, point.y) for point in panels["a"]])
    labels = [text.get_window_extent() for text in axis.texts if text.get_text()]
    assert not any(label.overlaps(dot) for label in labels for dot in dots)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))


def test_figures_have_no_empty_lines():
    text = plots.svg(plots.dots(["measured", "absent"], {"s": [1.0, None], "t": [None, None]}, "x"))
    assert "measured" in text
    assert "absent" not in text
    assert "absent" not in plots.svg(
        ratio_maps.ratio_map(Ratios(["measured", "absent"], ["1"], [[2.0], [None]], "x"))
    )


def test_figures_of_nothing_are_left_out():
    nothing = [
        plots.dots(["a"], {"s": [None]}, "x", base=1.0, symlog=0.1),
        plots.curves({"s": [None]}, "x", "y", base=0.0),
    ]
    assert [Drawing("a", "", one).empty for one in nothing] == [True, True]
    assert not Drawing("a", "", plots.curves({"s": [1.0, None]}, "x", "y", percent=True)).empty


def test_what_does_not_fit_goes_to_further_pages_by_whole_sections():
    def section(name, day, lines):
        rows = [row(date=f"2026-11-{day}T")]
        return Section(
            name, tables=[Table(f"{name}{place}", ["a"], [["x" * 1000]] * lines, rows) for place in (0, 1)]
        )

    old, new = section("old", 20, 60), section("new", 28, 60)
    assert further_pages([old, new]) == [[(old, table) for table in old.tables]]
    assert further_pages([section("small", 20, 1), new]) == []


def test_data_have_readable_names():
    names = (
        "14336x4096",
        "llama-3.1-8b-8-layers",
        "prose-1-f09e1e60",
        "llama-3-8b-two-blocks-random",
        "wikitext-2-v1-test",
    )
    assert [readable(one) for one in names] == [
        "14336 x 4096", "Llama-3.1-8B, 8 layers", "corpus prose", "Llama-3-8B, two blocks (random weights)",
        "wikitext-2-v1-test",
    ]  # fmt: skip


#: Words with a private meaning, and what the field says.
PRIVATE = {
    r"stand-ins?\b": "proxy model",
    r"\b(fraction of the|the|of the) floors?\b": "roofline bound",
    r"fraction of a copy|rate of a copy": "memory-bandwidth utilisation",
    r"\brows of inputs\b": "tokens",
    r"\b(three|matrix) products\b|\bProducts (with|of stored)": "matmuls",
    r"has the bits of": "bitwise equal to",
    r"\b(quick|full) scale\b": "short run",
}


def test_pages_speak_the_fields_words():
    """Of texts of page modules; names of rows (metrics, methods) are data."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {match.group()!r}: say {word!r}"
        for path in [
            *(ROOT / "experiments").glob("*/*page*.py"),
            *(ROOT / "experiments" / "report").glob("*.py"),
        ]
        for node in texts_of(path)
        for words, word in PRIVATE.items()
        if " " in node.value
        and (match := re.search(words, node.value))
        and node.value != "fraction of the floor"
    ]
    assert found == []


def texts_of(path):
    """The strings of a module but its docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_every_experiment_says_what_it_asks():
    for record in EXPERIMENTS.values():
        module = record.page_module()
        assert getattr(module, "QUESTION", "?").endswith("?")


def test_a_run_of_little_text_is_a_short_one_at_any_scale():
    def of(windows, length):
        return [row(metric="windows", value=windows), row(metric="tokens of a window", value=length)]

    little, enough = of(2, 512), of(16, 512)
    several = [replace(one, method="other") for one in little]
    assert str(windows_in([*enough, *several])) == "2 windows of 512 tokens"
    assert windows_in([row()]) is None
    assert Windows(8, 512).few
    assert not Windows(16, 512).few
    (where,) = by_run(little, "quality")
    assert where.run == "short run, CPU, 2 windows of 512 tokens"
    (where,) = by_run(enough, "quality")
    assert where.run == "CPU, 16 windows of 512 tokens"
    assert [runs_of(one) for one in (little, enough)] == [["short run on CPU"], ["CPU"]]
    assert Card(row(), "1", "loss", "bfloat16", rows=little).run == "short run on CPU"
    assert not Card(row(), "1", "loss", "bfloat16", rows=enough).short


def test_an_interval_over_books_counts_no_more_books_than_windows():
    rows = [row("real M/full/books-held-out", metric="windows", value=value) for value in (2.0, 32.0)]
    assert [Results([one]).count for one in rows] == [2, 7]


def test_an_interval_is_over_the_windows_of_its_own_line():
    """A part of a table that was measured again on another number of windows has another quantile."""
    rows = [row(metric="windows", value=4.0), row(metric="error", value=1.0)]
    rows += [replace(one, method="again", value=one.value * (32 if number == 0 else 1) / (4 if number == 0 else 1))
             for number, one in enumerate(rows)]  # fmt: skip
    results = Results(rows)
    first, again = (results.half(one.setting, one.method, "error") for one in (rows[0], rows[2]))
    assert (first, again) == (half_interval(1.0, 4), half_interval(1.0, 32))


def sizes_of(figure):
    """The sizes of an SVG's texts, in points."""
    return [
        float(one) for one in re.findall(r"(?:font:|font-size:) ?(?:\w+ )*([\d.]+)(?:px)?", plots.svg(figure))
    ]


def test_texts_of_figures_are_large_enough_to_read():
    rows, columns, values = ["a", "b"], [str(one) for one in range(13)], [[0.5] * 13, [2.0] * 13]
    made = [
        plots.heatmap(rows, columns, values, "x"),
        ratio_maps.ratio_map(Ratios(rows, columns, values, "x", "tokens")),
        ratio_maps.narrow_ratio_map(Ratios(rows, columns, values, "x", "tokens")),
        plots.dots(rows, {"one": [0.001, 30.0]}, "x", symlog=0.01),
    ]
    for figure in made:
        found = sizes_of(figure)
        assert found
        assert min(found) >= plots.SMALLEST
    wide = plots.heatmap(rows * 20, [str(one) for one in range(60)], [[1.0] * 60] * 40, "x")
    assert wide.get_size_inches()[0] * 96 < 1100
    assert plots.svg(made[2]).count(">tokens</text>") == 2


def test_series_of_dots_differ_and_none_hides_another():
    series = {str(number): [1.0, 2.0] for number in range(7)}
    figure = plots.dots(["a", "b"], series, "x", errors={name: [0.1, 0.1] for name in series})
    lines = [one[0] for one in figure.axes[0].containers]
    assert len({(one.get_color(), one.get_marker()) for one in lines}) == len(lines) == 7
    assert len({height for one in lines for height in one.get_ydata()}) == 14


def test_a_figure_for_a_phone_is_narrow_and_breaks_labels():
    wide, narrow = dots_twice(["int8 dynamic, int4 g32 weight, compiled"], {"ours": [1.0]}, "speed")
    assert narrow.get_figwidth() == NARROW < wide.get_figwidth()
    assert all("\n" in one.get_text() for one in narrow.axes[0].get_yticklabels())
    long = [f"batch {batch}, not compiled, beside torchao" for batch in range(12)]
    for figure in ratio_map_twice(Ratios(["int4"], long, [[2.0] * len(long)], "speed")):
        assert {label.get_rotation() for axis in figure.axes[:2] for label in axis.get_xticklabels()} >= {
            ratio_maps.SLANT
        }
    _, narrow = ratio_map_twice(Ratios(["int4 g128, prepared and frozen"], ["1"], [[2.0]], "speed", end=16.0))
    assert {label.get_rotation() for label in narrow.axes[0].get_xticklabels()} == {0.0}
    assert "\n" in narrow.axes[0].get_yticklabels()[0].get_text()


def test_a_card_says_how_times_spread_and_whose_kernels_they_are_of():
    place = {
        "experiment": "decode",
        "table": "decode/full/x",
        "setting": "s",
        "method": "m",
        "device": "GPU",
        "seed": 0,
    }
    values = {
        "time": (2.0, "us"),
        "time, 20%": (1.9, "us"),
        "time, 80%": (2.5, "us"),
        "speed": (3.0, "ratio"),
    }
    rows = [Row(**place, metric=name, value=value, unit=unit) for name, (value, unit) in values.items()]
    card = Card(rows[-1], "3x", "speed", "bfloat16", rows=rows)
    assert card.spread == "most times lie -5.0 to +25.0% from their median"
    assert card.kernels == "with the code of that commit: today's kernels may be faster or slower"
    assert Card(rows[-1], "3x", "speed", "bfloat16").spread == ""
