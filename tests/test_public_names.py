"""The public names of ao_lab: type checkers see those that exist, and each is public in the module that has it."""

import ast
import importlib
from pathlib import Path

import pytest

import ao_lab


def checked_names(path):
    """Module and name of every import for type checkers, under its own name, in the order of the file."""
    (block,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    # Only "from x import y as y" makes a name public for a strict checker.
    assert all(alias.name == alias.asname for node in block.body for alias in node.names)
    return [(node.module, alias.name) for node in block.body for alias in node.names]


def test_type_checkers_see_the_public_names_and_no_others():
    table = [
        *(("ao_lab", name) for name in ao_lab.SUBMODULES),
        *((f"ao_lab.{module}", name) for name, module in ao_lab.HOMES.items()),
        *(("reference", name) for name in ao_lab.SPECIFIED),
    ]
    assert sorted(checked_names(Path(ao_lab.__file__))) == sorted(table)


def test_all_names_are_there_once():
    assert len(set(ao_lab.__all__)) == len(ao_lab.__all__)
    assert dir(ao_lab) == ao_lab.__all__
    assert sum(map(len, ao_lab.NAMES.values())) == len(ao_lab.HOMES)


@pytest.mark.parametrize("module", [*ao_lab.NAMES, "reference"])
def test_each_is_public_in_its_module(module):
    home = importlib.import_module(module if module == "reference" else f"ao_lab.{module}")
    names = ao_lab.SPECIFIED if module == "reference" else ao_lab.NAMES[module]
    assert set(names) <= set(home.__all__)
    if module != "reference":
        assert [name for name in names if getattr(ao_lab, name) is not getattr(home, name)] == []


def test_other_names_are_none():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = ao_lab.quantise
