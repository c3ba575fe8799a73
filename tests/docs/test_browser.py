"""The documentation site in a browser: nothing from elsewhere, nothing missing, no scrolling sideways."""

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
    """The built pages; the build fails at any warning, that of a broken link for one."""
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
    "migration from bitsandbytes": "migration/bitsandbytes.html",
    "migrate from torchao": "migration/torchao.html",
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
}
ANSWERS = "#search-results ul.search > li a"


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
