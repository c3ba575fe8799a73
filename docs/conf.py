"""How the documentation site is built: ``make docs``, or ``sphinx-build -n -W docs build/docs``.

Pages are the Markdown files of this folder. API pages, tables and pictures are written into ``generated/`` from the code and
the committed results before they are read; the examples are executed. Nothing is fetched, by the build or by the pages.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Of libraries that autodoc imports; those of Sphinx itself are errors (-W).
warnings.simplefilter("ignore")

import ao_lab  # noqa: E402
from docs import api, docstrings, generate  # noqa: E402

generate.write(HERE / "generated")

project = "ao_lab"
author = "the ao_lab authors"
version = release = os.environ.get("DOCS_VERSION", ao_lab.__version__)
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
root_doc = "index"
# Pages about the repository, which link its source files, are read there.
exclude_patterns = ["ARCHITECTURE.md", "SECURITY.md", "examples", "generated/parts", "**/README.rst"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "reports": {"url": "{{path}}"}}
suppress_warnings = ["config.cache"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
nitpicky = True

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "generated/examples",
    "filename_pattern": r"/\w+\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "min_reported_time": 30,
    "show_memory": False,
    "write_computation_times": False,  # that page has scripts of other hosts
    "show_signature": False,
    "plot_gallery": True,
    "image_scrapers": (generate.scrape,),
}

html_theme = "pydata_sphinx_theme"
html_title = f"ao_lab {release}"
html_show_sourcelink = False
html_show_copyright = False
html_sidebars = {"index": [], "get_started": [], "choose": []}
html_static_path = ["static"]
html_search_scorer = str(HERE / "static" / "scorer.js")
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_context = {"default_mode": "auto"}  # without it the theme warns of an empty one in a browser's console
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "header_links_before_dropdown": 9,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
# Published sites of several versions share a list of them, in the theme's form; a local build has one version and no list.
if "DOCS_VERSIONS_URL" in os.environ:
    html_theme_options |= {
        "switcher": {"json_url": os.environ["DOCS_VERSIONS_URL"], "version_match": version},
        "check_switcher": False,
        "navbar_start": ["navbar-logo", "version-switcher"],
    }


def setup(app: object) -> None:
    """Docstrings are Markdown; what they name becomes a link where it has a place on a page."""
    docstrings.connect(app, api.places())
    generate.connect(app)
