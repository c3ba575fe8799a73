"""The public names of ao_lab: the stub that type checkers read is what runs, and each name is public where it is defined."""

import ast
import importlib
from pathlib import Path

import pytest

import ao_lab
from ao_lab.install.packages import STUB
from tests.support.runs import forks

ROOT = Path(ao_lab.__file__).resolve().parent.parent


def imports():
    """Module and name of every import of the stub."""
    nodes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    # Only "from x import y as y" makes a name public for a strict checker.
    assert all(alias.name == alias.asname for node in nodes for alias in node.names)
    return [(node.module, alias.name) for node in nodes for alias in node.names]


def test_type_checkers_see_the_public_names_and_no_others():
    listed = [name for module, name in imports() if module != "ao_lab"]
    assert sorted([*listed, "__version__"]) == ao_lab.__all__
    assert {name for module, name in imports() if module == "ao_lab"} == set(ao_lab.SUBMODULES)


def test_all_names_are_there_once():
    names = [name for _, name in imports()]
    assert len(set(names)) == len(names)
    assert dir(ao_lab) == sorted([*ao_lab.__all__, *ao_lab.SUBMODULES])


@pytest.mark.parametrize("module", sorted(set(ao_lab.HOMES.values())))
def test_each_is_public_in_its_module(module):
    home = importlib.import_module(module)
    names = [name for name, where in ao_lab.HOMES.items() if where == module]
    assert set(names) <= set(home.__all__)
    if module != "reference":
        assert [name for name in names if getattr(ao_lab, name) is not getattr(home, name)] == []


@pytest.mark.parametrize("package", ["ao_lab", "reference", "fast"])
def test_other_names_are_none(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'quantise'"):
        _ = importlib.import_module(package).quantise


SUBMODULES_FIRST = """
import importlib, pathlib, {package}
from reference.lazy import homes_of
homes = homes_of(pathlib.Path({stub!r}))
modules = {{name: importlib.import_module(home) for name, home in homes.items()}}
scope = {{}}
exec("from {package} import *", scope)
assert {package}.__all__ == dir({package}) == sorted(homes) and set(homes) < set(scope)
print([name for name, module in modules.items() if getattr({package}, name) is not getattr(module, name)])
"""


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_a_folder_never_hides_the_function_of_its_name(package):
    program = SUBMODULES_FIRST.format(package=package, stub=str(ROOT / package / "__init__.pyi"))
    done = without("nothing", program)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def without(library, program):
    """Run a program in a process that has nothing of ours, where a library cannot be imported."""
    hide = f"import sys; assert {library!r} not in sys.modules; sys.modules[{library!r}] = None; "
    return forks.python("-c", hide + program, server="transformers")


def test_everything_can_be_imported_without_jax():
    """Submodules need extras, so the star leaves them out; `jax` stays the library's name."""
    done = without(
        "jax",
        "from ao_lab import *; import ao_lab; quantize_, SCHEMES; print('jax' in dir(ao_lab), 'jax' in globals())",
    )
    assert (done.stdout, done.returncode) == ("True False\n", 0), done.stderr


@pytest.mark.parametrize(
    ("library", "program", "said"),
    [
        ("jax", "import ao_lab; ao_lab.jax", "jax is not installed; pip install 'ao_lab[jax]'"),
        ("jax", "import ao_lab.jax", "jax is not installed; pip install 'ao_lab[jax]'"),
        ("hypothesis", "from ao_lab import testing", "hypothesis is not installed; pip install hypothesis"),
    ],
)
def test_submodules_say_what_to_install(library, program, said):
    done = without(library, program)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
