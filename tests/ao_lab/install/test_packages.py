"""Both spellings of a module are one module: `reference.formats` and `ao_lab.reference.formats`."""

import importlib

import pytest

import reference
from ao_lab.install import packages


def test_the_other_spelling_has_the_same_objects():
    inside = importlib.import_module("ao_lab.reference")
    assert inside.FORMATS is reference.FORMATS
    stored = importlib.import_module("ao_lab.reference.quantize.stored")
    assert stored.Quantized is reference.Quantized
    # Importing what lies below a package hides no function of the package's name.
    assert inside.quantize is reference.quantize
    assert "quantize" in dir(inside)


@pytest.mark.parametrize("name", ["ao_lab.reference.nothing", "ao_lab.references"])
def test_what_is_not_there_is_named_as_it_was_asked_for(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("inside", "name", "own"),
    [
        (False, "ao_lab.fast.ops", "fast.ops"),
        (False, "fast.ops", None),
        (True, "fast.ops", "ao_lab.fast.ops"),
        (True, "ao_lab.fast", None),
        (True, "faster", None),
        (False, "ao_lab.gemm", None),
    ],
)
def test_own_spelling(monkeypatch, inside, name, own):
    monkeypatch.setattr(packages, "INSIDE", inside)
    assert packages.own_spelling(name) == own
