"""Versions outside of the tested range are told of once; the range holds what is pinned and asked for."""

import importlib.metadata
import re
import tomllib
import types
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ao_lab
from ao_lab.cli.doctor import library
from ao_lab.install import versions
from ao_lab.install.extras import needed

ROOT = Path(__file__).resolve().parents[3]


def test_the_range_holds_the_pins_and_nothing_below_what_is_required():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    required = {Requirement(line).name: Requirement(line).specifier for line in lines}
    for name, (oldest, newest) in versions.TESTED.items():
        named = name.replace("_", "-")
        assert versions.outside(name, pins[named]) is None
        assert required[named].contains(f"{oldest}.99")
        assert versions.numbers(oldest) <= versions.numbers(newest)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("5.22.9", "tested with transformers 5.23 to 5.24; this is 5.22.9.*pip install -U"),
        ("4.57.1", "pip install -U transformers"),
        ("5.23.0", None),
        ("5.24.3.dev0+local", None),
        ("5.25.0", "this is 5.25.0, which may differ in names and layouts: a newer ao_lab may know it"),
        ("6.0", "this is 6.0"),
        ("unknown", "this is unknown"),
    ],
)
def test_what_is_said(version, said):
    found = versions.outside("transformers", version)
    assert found is None if said is None else re.search(said, found)


@pytest.mark.parametrize("use", [lambda: ao_lab.__getattr__("quantize_"), lambda: needed("transformers")])
def test_one_warning_at_the_first_use(monkeypatch, use):
    monkeypatch.setattr(versions, "_checked", set())
    monkeypatch.setattr(versions, "TESTED", {"transformers": ("1.0", "1.5"), "torch": ("0.1", "99.0")})
    monkeypatch.setitem(versions.sys.modules, "torchao", types.ModuleType("torchao"))  # one without a version
    transformers = pytest.importorskip("transformers")
    versions._checked.clear()
    with pytest.warns(UserWarning, match=r"tested with transformers 1.0 to 1.5; this is") as told:
        use()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()
    assert versions.outside("transformers", transformers.__version__)


def test_doctor_says_it(monkeypatch):
    version = importlib.metadata.version("torch")
    monkeypatch.setitem(versions.TESTED, "torch", ("0.1", "99.0"))
    assert library("torch").detail == version
    monkeypatch.setitem(versions.TESTED, "torch", ("1.0", "1.5"))
    assert library("torch").detail.endswith("(tested: 1.0 to 1.5)")
