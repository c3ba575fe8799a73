"""The pages in a browser: Debian's Chromium by Playwright. Skipped, with the reason, where either is missing."""

import shutil
from types import SimpleNamespace

import pytest

from experiments.harness.rows import ROOT, Row
from experiments.report.content import Section, Table
from experiments.report.pages import ASSETS, TEMPLATES, Page, render
from experiments.report.scoreboard import scoreboard
from tests.support.browser import launched

REPORTS = ROOT / "reports"
#: Milliseconds to the first paint and until a page is loaded. Pages take less than 400 on one slow core.
MOST_MILLISECONDS = 1000
#: Read by all; the others are of the same templates.
FIRST, LARGEST = "index.html", "linear.html"
PAGES = sorted(path.name for path in REPORTS.glob("*.html"))
BY_DAY = (FIRST, LARGEST, "scoreboard.html", "history.html", "answers.html", "linear-tables-1.html")
#: Elements that begin above the end of the bar, or below the window, after a click on their link.
HIDDEN = """async () => {
  const hidden = [];
  for (const link of document.querySelectorAll("a[href^='#']")) {
    link.click();
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    const top = document.getElementById(link.hash.slice(1)).getBoundingClientRect().top;
    const bar = document.querySelector("nav").getBoundingClientRect().bottom;
    if (top < bar - 1 || top > innerHeight) hidden.push(`${link.hash} at ${top}, the bar ends at ${bar}`);
  }
  return hidden;
}"""


@pytest.fixture(scope="module")
def browser():
    with launched() as made:
        yield made


@pytest.fixture
def show(browser):
    """Opens pages in windows of a size; what a page raises fails the test."""
    opened, raised = [], []

    def show(name, width=1280, height=900, **settings):
        page = browser.new_page(viewport={"width": width, "height": height}, **settings)
        page.on("pageerror", lambda error: raised.append(str(error)))
        opened.append(page)
        page.goto((REPORTS / name).as_uri())
        return page

    yield show
    for page in opened:
        page.close()
    assert raised == []


@pytest.mark.parametrize("name", [FIRST, LARGEST])
def test_headings_are_visible_after_navigation(show, name):
    assert show(name).evaluate(HIDDEN) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in PAGES]
)
def test_a_phone_does_not_scroll_sideways(show, name):
    page = show(name, 390, 844)
    page.evaluate("for (const one of document.querySelectorAll('details:not(.table)')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture
def first_page(tmp_path):
    """The first page with one experiment and a figure of 640 pixels, without scripts of tables."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "figures").mkdir()
    for name in ASSETS:
        shutil.copy(TEMPLATES / name, tmp_path / "assets")
    (tmp_path / "figures" / "overview.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="300"><rect width="640" height="300"/></svg>'
    )
    one = SimpleNamespace(
        name="ptq",
        question="How?",
        main_finding="so",
        counted="",
        headlines=[],
        runs=["short run on CPU"],
        days="2026-11-29",
    )
    card = SimpleNamespace(
        value="2x",
        what="speed",
        beside="bfloat16",
        run="CPU",
        day="2026-11-29",
        row=SimpleNamespace(commit=""),
        target="no target",
        kernels="",
        spread="",
    )
    overview = SimpleNamespace(name="overview", caption="Speed")
    values = {
        "pages": [one],
        "cards": [("ptq", card, None)],
        "further": [],
        "asked": [],
        "docs": True,
        "overview": overview,
        "commit": "",
        "families": True,
        "fewest": 4096,
        "devices": ["CPU"],
        "days": "2026-11-29",
    }
    path = tmp_path / "index.html"
    path.write_text(render("index.html.j2", scoreboard=scoreboard([]), **values))
    return path


def test_a_phone_shows_devices_and_the_whole_figure(show, first_page):
    page = show(first_page, 390, 844)
    page.wait_for_function("document.querySelector('figure img').complete")
    assert page.locator("td", has_text="short run on CPU").is_visible()
    assert page.locator("td", has_text="2026-11-29").is_visible()
    assert 300 < page.locator("figure img").bounding_box()["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_scrolls_sideways_says_so(show):
    page = show("kernels.html", 390, 844)
    figure = page.locator(".wide").first
    figure.scroll_into_view_if_needed()
    page.wait_for_selector(".wide.more")
    width, inside = figure.evaluate("(box) => [box.clientWidth, box.scrollWidth]")
    assert width < 390 < inside
    assert "sideways" in figure.evaluate("(box) => getComputedStyle(box, '::before').content")


def test_a_phone_shows_published_values_and_ours_with_their_devices(show):
    page = show("scoreboard.html", 390, 844)
    page.wait_for_selector("table.dataTable")
    for column in (1, 2, 3, 4, 6, 7, 9, 10):
        box = page.locator(f"table.dataTable tbody tr:first-child td:nth-child({column})").bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390


def test_the_first_page_is_painted_in_a_second(show):
    page = show(FIRST)
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert max(painted, loaded) < MOST_MILLISECONDS
    assert page.locator(".card").nth(2).bounding_box()["y"] < 900
    assert page.locator("figure img").first.bounding_box()["y"] < 900


def test_figures_are_drawn_and_dark_screens_are_dark(show):
    page = show(FIRST, color_scheme="dark")
    assert page.evaluate("document.querySelector('figure img').naturalWidth") > 300
    assert (
        sum(
            map(
                int,
                page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(","),
            )
        )
        < 120
    )


def test_opened_tables_are_legible_on_dark_screens(show):
    page = show("scoreboard.html", color_scheme="dark")
    page.wait_for_selector("table.dataTable")
    behind = """(element) => {
      const dark = (color) => color.match(/[\\d.]+/g).map(Number);
      for (let one = element; one; one = one.parentElement) {
        const [red, green, blue, alpha = 1] = dark(getComputedStyle(one).backgroundColor);
        if (alpha > 0.5) return red + green + blue;
      }
    }"""
    for place in ("table.dataTable tbody td", "table.dataTable th", ".dt-container .dt-length"):
        element = page.locator(place).first
        assert element.evaluate(behind) < 200
        assert (
            element.evaluate("(element) => getComputedStyle(element).color.match(/\\d+/g).map(Number)[0]")
            > 150
        )


def test_filters_leave_a_device_a_shape_and_a_scheme(show):
    page = show(LARGEST)
    before = page.locator("section:visible").count()
    page.select_option("select[name=device]", "NVIDIA H200")
    page.select_option("select[name=subject]", "14336 x 4096")
    page.fill("input[name=text]", "int8")
    titles = page.locator("section:visible h2").all_text_contents()
    assert 0 < len(titles) < before
    assert all("H200" in one and "14336 x 4096" in one for one in titles if "Published" not in one)
    table = page.locator("details.table:visible").first
    table.evaluate("one => one.open = true")
    page.wait_for_selector("table.dataTable")
    cells = table.locator("tbody tr:visible td:first-child").all_text_contents()
    assert cells
    assert all("int8" in one for one in cells)
    page.click("button[type=reset]")
    page.wait_for_function(f"document.querySelectorAll('section:not([hidden])').length === {before}")


@pytest.fixture
def filtered_page(tmp_path):
    """A page of two sections of two small tables each."""
    (tmp_path / "assets").mkdir()
    for name in ASSETS:
        shutil.copy(TEMPLATES / name, tmp_path / "assets")
    lines = [["int4", "16.5"], ["int8", "4.0"]]
    tables = [Table(f"{count} tokens", ["layer", "us"], lines) for count in (2, 16)]
    sections = [Section(title, (), (), tables) for title in ("Weights", "Experts")]
    place = {
        "experiment": "linear",
        "table": "weights/full/1x1",
        "setting": "1 row",
        "device": "cpu",
        "seed": 0,
    }
    rows = [Row(**place, method=name, metric="time", value=1.0, unit="us") for name in ("bfloat16", "int4")]
    page = Page("linear", "Linear", (), (), None, sections, (), "linear.csv.gz", rows, "", ())
    path = tmp_path / "linear.html"
    path.write_text(render("page.html.j2", page=page))
    return path


def test_words_of_a_line_its_table_and_its_heading_are_searched(show, filtered_page):
    page = show(filtered_page)
    assert page.get_attribute("input[name=text]", "placeholder") == "int4 16 tokens"
    for words, told, sections in (
        ("int4 16", "2 lines in 2 tables", 2),
        ("int4 16 weights", "1 line in 1 table", 1),
        ("int4 17", "0 lines in 0 tables", 0),
    ):
        page.fill("input[name=text]", words)
        assert page.locator("form.filter output").text_content() == told
        assert page.locator("section:visible").count() == sections
        assert page.url.endswith(f"?text={words.replace(' ', '+')}")
    page.fill("input[name=text]", "int4 16")
    assert page.locator("tbody tr:visible").count() == 2
    assert page.locator("details.table[open] summary small").all_text_contents() == ["1 of 2 lines"] * 2
    page.click("button[type=reset]")
    page.wait_for_function("!document.querySelector('details.table[open]')")
    assert page.locator("summary small").first.text_content() == "2 lines"
    page.goto(f"{filtered_page.as_uri()}?text=int8+experts")
    assert page.locator("form.filter output").text_content() == "2 lines in 2 tables"


def test_columns_sort_by_value(show):
    page = show("scoreboard.html")
    page.wait_for_selector("table.dataTable")
    page.select_option("select[name=metric]", "tokens/s")
    page.select_option("select[name=published-on]", "H100")
    page.locator("table.dataTable").first.locator("th").nth(5).click()
    page.wait_for_selector("th[aria-sort='ascending']")
    values = page.locator("table.dataTable").first.locator("tbody tr td:nth-child(6)").all_text_contents()
    assert len(values) > 3
    assert list(map(float, values)) == sorted(map(float, values))
