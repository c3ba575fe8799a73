"""The documentation site: every public name on one page, docstrings as Sphinx reads them, links that lead somewhere.

`make docs` builds it and fails at any warning; these tests hold the parts that a build does not see.
"""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs import api, docstrings, generate, numerics, results  # noqa: E402
from docs.topics import TOPICS, names  # noqa: E402

ON_PAGES = [name for topic in TOPICS.values() for name in names(topic)]
#: What `from ao_lab.jax import *` has beside functions: a module, whose names have places of their own.
MODULES = {"ao_lab.jax.training"}


def public():
    """Full names of all that `ao_lab` and its public submodules export."""
    found = {f"ao_lab.{name}" for name in importlib.import_module("ao_lab").__all__}
    return found | {f"{module}.{name}" for module in api.SUBMODULES for name in api.public(module)} - MODULES


def test_every_public_name_is_on_exactly_one_page():
    assert sorted(public() - set(ON_PAGES)) == []
    assert sorted(name for name in set(ON_PAGES) if ON_PAGES.count(name) > 1) == []


def test_pages_have_the_names_of_the_specification_and_the_kernels():
    pages = api.pages()
    for package in ("reference", "fast"):
        assert [
            name for name in api.public(package) if f":: {package}.{name}\n" not in pages[f"{package}.md"]
        ] == []
    assert ":: ao_lab.quantize_\n" in pages["quantize.md"]
    assert all(f"({slug}.md)" in pages["index.md"] for slug in TOPICS)


def test_a_name_that_is_not_there_stops_the_build(monkeypatch):
    monkeypatch.setitem(TOPICS, "choose", TOPICS["choose"]._replace(names="choose_ no_such_name"))
    with pytest.raises(AttributeError, match="no_such_name"):
        api.pages()


PLACES = {"encode": "ao_lab.encode", "ao_lab.encode": "ao_lab.encode", "fast.encode": "fast.encode"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x_ and *y", r"x\_ and \*y"),
        ("see `encode`", r"see \ :py:obj:`encode <ao_lab.encode>`\ "),
        ("`other(x)` is code", r"\ ``other(x)``\  is code"),
        ("* a\n  b", "* a\n  b"),
        ("a\n  b", "a\nb"),
        ("a:\n\n    x = y_\n\nb", "a:\n\n.. code-block:: python\n\n   x = y_\n\n\nb"),
    ],
)
def test_docstrings_mean_themselves(text, expected):
    """Up to empty lines, of which one is as good as several."""
    lines = [line for line in docstrings.converted(text, PLACES).split("\n") if line.strip()]
    assert lines == [line for line in expected.split("\n") if line]


def test_docstrings_link_to_the_function_of_their_package():
    assert "<fast.encode>" in docstrings.converted("`encode`", PLACES, "fast.decode")
    assert "py:obj" not in docstrings.converted("`encode`", PLACES, "ao_lab.encode")


def test_every_record_is_on_its_page_and_drawn(monkeypatch):
    pages = numerics.pages()
    assert all(f"| `{name}` |" in pages["schemes.md"] for name in numerics.SCHEMES)
    assert all(f"| `{name}` |" in pages["formats.md"] for name in numerics.FORMATS)
    assert "error-mx-0-dark.svg" in pages["schemes.md"]
    more = {**numerics.FORMATS, "posit8": numerics.FORMATS["float8_e4m3fn"]}
    monkeypatch.setattr(numerics, "FORMATS", more)
    with pytest.raises(ValueError, match=r"docs/numerics\.py: \['posit8'\]"):
        numerics.pages()


def test_links_to_reports():
    content = ["[a](../../reports/ptq.md) [b](../reports/limits.md#x)"]
    generate.rewrite(None, "guides/qat", content)
    assert content == ["[a](reports:../reports/ptq.html) [b](reports:../reports/limits.html)"]
    with pytest.raises(ValueError, match=r"reports/none\.md, which is not there"):
        generate.rewrite(None, "faq", ["[a](../reports/none.md)"])


def test_pages_are_found_by_what_people_search_for():
    content = ["# Questions\n\nText."]
    generate.rewrite(None, "faq", content)
    assert content[0].startswith("# Questions\n\n```{index} !why is my model not faster, ")
    assert content[0].endswith("```\n\nText.")
    written = {f"generated/results/{name}" for name in results.pages()}
    named = [f"{name}.md" for name in generate.SEARCHED]
    assert [name for name in named if name not in written and not (ROOT / "docs" / name).is_file()] == []


def test_reports_are_pages_of_the_site_and_are_found():
    pages = results.pages()
    assert len(pages) > 15
    assert "](linear.md)" in pages["index.md"]
    assert "](../../../reports/limits.md)" in pages["index.md"]
    assert all(word in pages["linear.md"] for word in ("int4", "16 tokens", "H200"))
    assert "<details" not in pages["linear.md"]
    head = pages["linear.md"].partition("\n## ")[0]
    assert "| int4 g128 |" in head
    assert "speed over bfloat16" in head
    listed = "<details><summary><strong>Not measured yet</strong> (20)</summary>\n\n- gptq\n\n</details>"
    table = "<details><summary>Losses (1 line)</summary>\n\n| a |\n|---|\n| 1 |\n\n</details>"
    made = results.page("one", f"# One\n\n## Part\n\n{listed}\n\n{table}\n")
    assert "- Not measured yet (20)\n" in made
    assert "strong" not in made
    assert "- Table: Losses (1 line)" in made
    assert "| 1 |" in made


def test_copies_of_reports_lead_back_to_the_site_and_search_it():
    found = generate.with_header("<head></head>\n<body>\n<nav></nav>")
    assert found.startswith('<head></head>\n<body>\n<header class="site"><a href="../index.html">ao_lab</a>')
    assert '<form action="../search.html"><input name="q"' in found
    made = {f"generated/{name}/index.md" for name in ("api", "examples")}
    written = {f"generated/results/{name}" for name in results.pages()} | made
    gone = [
        name
        for name in generate.HEADER
        if f"{name}.md" not in written and not (ROOT / "docs" / f"{name}.md").is_file()
    ]
    assert gone == []


def test_links_of_reports_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("")
    (tmp_path / "a.html").write_text(
        '<a href="data/a.csv">a</a> <a href="limits.md#x">b</a> <img src="figures/c.svg"> <a href="#d">'
    )
    assert generate.broken(tmp_path) == ["a.html: limits.md", "a.html: figures/c.svg"]


# Every function of arrays states its contract.


def test_functions_of_arrays_state_shapes_dtypes_and_errors():
    assert api.unstated() == []


def test_what_is_not_stated_is_found(monkeypatch):
    import reference

    def encode(x):
        """Codes of x."""

    monkeypatch.setattr(reference, "encode", encode)
    assert [line for line in api.unstated() if line.startswith("reference.encode ")] == [
        "reference.encode states no shapes",
        "reference.encode states no dtypes",
        "reference.encode states no errors",
    ]
