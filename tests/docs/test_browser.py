"""The documentation site in a browser: nothing from elsewhere, nothing missing, no scrolling sideways."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from tests.support.browser import launched

ROOT = Path(__file__).resolve().parents[2]
#: A phone, and a window.
WIDTHS = (390, 1280)
LEAST_PAGES = 50


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; the build fails at any warning, that of a broken link for one. AO_LAB_SITE: the folder in this
    clone that `make docs` has built just now."""
    if built := os.environ.get("AO_LAB_SITE"):
        return ROOT / built
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-n",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        folder / "trees",
        "docs",
    ]
    done = subprocess.run([*command, folder / "pages"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "pages"


def pages(site):
    """Pages of the site itself; those of the reports are tested where they are made."""
    return [path for path in sorted(site.rglob("*.html")) if not {"reports", "_static"} & set(path.parts)]


def problems(page, path, width):
    """What is wrong with one page."""
    found = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"missing {request.url}"))
    page.on(
        "request",
        lambda one: found.append(f"from elsewhere {one.url}") if one.url.startswith("http") else None,
    )
    page.goto(path.as_uri(), wait_until="load")
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append("scrolls sideways")
    return found


@pytest.mark.nightly
def test_every_page(site):
    assert len(pages(site)) >= LEAST_PAGES
    wrong = {}
    with launched() as browser:
        for width in WIDTHS:
            for path in pages(site):
                page = browser.new_page(viewport={"width": width, "height": 900})
                if found := problems(page, path, width):
                    wrong[f"{path.relative_to(site)} at {width}"] = found
                page.close()
    assert wrong == {}


@pytest.mark.nightly
def test_a_wrong_page_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<div style="width: 900px">x</div><img src="none.png"><script>no_such()</script>')
    with launched() as browser:
        found = problems(browser.new_page(viewport={"width": 390, "height": 900}), page, 390)
    assert "scrolls sideways" in found
    assert len(found) == 3


@pytest.mark.nightly
def test_links_of_the_site_lead_to_files(site):
    """Those of and to reports, too, which Sphinx does not look at."""
    gone = []
    for path in [*pages(site), *(site / "reports").glob("*.html")]:
        for link in re.findall(r'href="([^"#?:]+)(?:[#?][^"]*)?"', path.read_text(encoding="utf-8")):
            if not (path.parent / link).exists():
                gone.append(f"{path.relative_to(site)}: {link}")
    assert gone == []


#: What a stranger types, and a page that is one of the first two answers.
ASKED = {
    "why is my model not faster": "faq.html",
    "why is it slow": "faq.html",
    "migration": "migration/index.html",
    "migration from bitsandbytes": "migration/bitsandbytes.html",
    "migration from AutoAWQ": "migration/index.html",
    "migrate from torchao": "migration/torchao.html",
    "the speed of int4 at 16 tokens on an H200": "generated/results/linear.html",
    "what calibration wins for NVFP4": "generated/results/calibration.html",
    "what misses its target": "generated/results/index.html",
    "how many published values have a measured one": "generated/results/index.html",
    "which numbers are of short runs": "generated/results/index.html",
    "the history of one number": "generated/results/index.html",
    "Recipe": "generated/api/configurations.html",
    "custom format": "guides/formats.html",
    "calibration": "guides/calibrate.html",
    "NVFP4 calibration": "generated/results/calibration.html",
    "int4 16 tokens H200": "generated/results/linear.html",
    "int4 speed 16 tokens": "generated/results/linear.html",
    "speed of int4 on H200": "generated/results/linear.html",
    "linear layer speed": "generated/results/linear.html",
    "history": "generated/results/index.html",
    "LoRA": "guides/lora.html",
    "save_pretrained": "generated/api/checkpoints.html",
    "explain": "generated/api/quantize.html",
    "TransformerEngine": "migration/transformer_engine.html",
    "te.Linear": "migration/transformer_engine.html",
    "scoreboard": "generated/results/index.html",
    "confidence interval": "glossary.html",
    "encode rounding": "numerics/rounding.html",
    "1-3-4": "guides/formats.html",
}
ANSWERS = "#search-results ul.search > li a"
#: An index as Sphinx writes it: two pages, a function, a class with a method, and what people search for by page.
INDEX = {
    "docnames": ["guide", "api", "results"],
    "filenames": ["guide.md", "api.md", "results.md"],
    "titles": ["Guide", "API", "Results"],
    "alltitles": {"Guide": [[0, None]], "API": [[1, None]]},
    "indexentries": {"speed of int4": [[2, "index-0", True]], "perplexity": [[0, "index-1", True]]},
    "objects": {
        "ao_lab": [[1, 0, 1, "", "quantize_"], [1, 1, 1, "", "Recipe"]],
        "ao_lab.Layer": [[1, 2, 1, "", "recipe"]],
    },
    "objnames": {
        "0": ["py", "function", "function"],
        "1": ["py", "class", "class"],
        "2": ["py", "attribute", "attribute"],
    },
    "terms": {"int4": [0, 1], "speed": 0, "quantize_": 1, "recipe": 1},
    "titleterms": {"guid": 0},
}


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """The first answers to words, and what is suggested, by Sphinx's own scripts, our scorer and INDEX."""
    basic = Path(pytest.importorskip("sphinx").__file__).parent / "themes" / "basic" / "static"
    scripts = [
        (basic / name).read_text() for name in ("doctools.js", "sphinx_highlight.js", "searchtools.js")
    ]
    language = (
        "const stopwords = new Set(['how', 'have', 'at']); class Stemmer { stemWord(word) { return word; } }"
    )
    scripts += [
        language,
        (ROOT / "docs" / "static" / "scorer.js").read_text(),
        f"Search.setIndex({json.dumps(INDEX)})",
    ]
    options = "const DOCUMENTATION_OPTIONS = {BUILDER: 'html', FILE_SUFFIX: '.html', LINK_SUFFIX: '.html'};"
    path = tmp_path_factory.mktemp("search") / "search.html"
    body = "".join(f"<script>{one}</script>" for one in (options, *scripts))
    path.write_text(f'<html data-content_root="./"><body><div id="search-results"></div>{body}</body></html>')
    with launched() as browser:
        page = browser.new_page()

        def ask(words):
            page.goto(f"{path.as_uri()}?q={quote_plus(words)}")
            page.wait_for_function("document.querySelector('.search-summary').innerText")
            found = [one.get_attribute("href").partition("?")[0] for one in page.locator(ANSWERS).all()]
            line = page.locator(".suggestion")
            return found, line.inner_text() if line.count() else ""

        yield ask


def test_pages_are_ranked_by_what_people_search_for(search):
    assert search("how speed at int4")[0][:2] == ["results.html", "guide.html"]
    assert search("Recipe")[0][0] == "api.html#ao_lab.Recipe"
    assert "results.html" not in search("int4")[0]


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("quanitze_", "quantize_"), ("qantize", "quantize_"), ("quantizee", "quantize_"), ("quantise", "quantize_"),
        ("ao_lab.Recpie", "Recipe"), ("perplexty int4", "perplexity"), ("quantize", ""), ("quantum", ""), ("have speed", ""),
    ],
)  # fmt: skip
def test_names_one_edit_away_are_suggested(search, words, suggested):
    assert search(words)[1] == (f"Did you mean {suggested}?" if suggested else "")


@pytest.mark.nightly
def test_the_search_answers_what_people_ask(site):
    """By one of its first two results."""
    missed = {}
    with launched() as browser:
        page = browser.new_page()
        for words, wanted in ASKED.items():
            page.goto(f"{(site / 'search.html').as_uri()}?q={quote_plus(words)}")
            page.locator(ANSWERS).first.wait_for()
            found = [
                one.get_attribute("href").partition("?")[0].partition("#")[0]
                for one in page.locator(ANSWERS).all()[:2]
            ]
            missed |= {} if wanted in found else {words: found}
    assert missed == {}
