"""A browser for tests of pages: Debian's Chromium by Playwright. Where either is missing, tests are skipped with the reason."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def launched() -> Iterator[Any]:
    """The browser, until the block ends. CHROMIUM names its program."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(
            f"no browser here: none of {', '.join(NAMES)} (apt-get install chromium), and CHROMIUM names none"
        )
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()
