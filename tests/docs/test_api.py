"""API pages: built without warnings, every public name on its page, every function of arrays with a stated contract."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def api():
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(api, tmp_path_factory):
    made = tmp_path_factory.mktemp("docs")
    assert api.build(made) == []
    return made


def test_every_public_name_is_on_its_page(api, folder):
    assert api.missing(folder) == []
    assert (folder / "ao_lab" / "jax.html").is_file()
    page = folder / "fast.html"
    page.write_text(page.read_text().replace('id="linear_pair"', ""))
    assert api.missing(folder) == ["fast.linear_pair is not on its page"]


def test_functions_of_arrays_state_shapes_dtypes_and_errors(api):
    assert api.unstated() == []


def test_what_is_not_stated_is_found(api, monkeypatch):
    import reference

    def encode(x):
        """Codes of x."""

    monkeypatch.setattr(reference, "encode", encode)
    assert [line for line in api.unstated() if line.startswith("reference.encode ")] == [
        "reference.encode states no shapes",
        "reference.encode states no dtypes",
        "reference.encode states no errors",
    ]
