"""Imports that import-linter does not see: by a name in a string, of undeclared libraries, of private names of other files."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
#: Each package may import those behind it.
ORDER = ("experiments", "ao_lab", "fast", "reference")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `make test` installs; the other extras are for clients whom their users choose.
INSTALLED_EXTRAS = ("experiments", "models", "test", "jax", "ao", "hf", "lint", "docs")
# Installed together with another requirement, which chooses the version.
COMES_WITH = {"jaxlib": "jax", "huggingface-hub": "transformers"}
#: Files that import upwards by a string.
UPWARDS = {"ao_lab/cli/doctor.py"}


@cache
def syntax(package):
    """(path from the root, what `is_looked_at` of its syntax) of every module of a package, read once for all tests."""
    return [
        (path.relative_to(ROOT).as_posix(), [*filter(is_looked_at, ast.walk(ast.parse(path.read_text())))])
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def is_looked_at(node):
    """Whether a node imports, is a string that may be a module's name, or calls what imports by one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and re.fullmatch(r"\w+(\.\w+)+", node.value) is not None
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_module(name):
    """Whether a dotted name is one of our modules or packages."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def named_modules(nodes):
    """Our modules that strings name: with a dot anywhere, a package alone as what `import_module` is called with."""
    for node in nodes:
        if isinstance(node, ast.Constant) and is_module(node.value):
            yield node.value
        elif isinstance(node, ast.Call):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and a.value in ORDER)


def test_no_string_names_a_module_above():
    found = {
        path: sorted(above)
        for rank, package in enumerate(ORDER)
        for path, nodes in syntax(package)
        if (above := {name for name in named_modules(nodes) if name.split(".")[0] in ORDER[:rank]})
    }
    assert {path: names for path, names in found.items() if path not in UPWARDS} == {}


def private_imports(nodes):
    """What a file imports from another one of ours under a name that is private there."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ORDER:
            yield from (alias.name for alias in node.names if re.match(r"_[^_]", alias.name))


def test_no_private_names_are_shared():
    """What two files use has a public name."""
    found = {path: list(private_imports(nodes)) for package in ORDER for path, nodes in syntax(package)}
    assert {path: names for path, names in found.items() if names} == {}


def imported_libraries(nodes):
    """Top-level names of the third-party modules that a file imports."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(ORDER)


def test_imports_are_declared():
    """Every third-party module that a package imports is a requirement, or an extra."""
    extras = PROJECT["optional-dependencies"].values()
    declared = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    allowed = {canonicalize_name(Requirement(text).name) for text in declared} | set(COMES_WITH)
    undeclared = {
        f"{path}: {name}"
        for package in ORDER
        for path, nodes in syntax(package)
        for name in imported_libraries(nodes)
        if canonicalize_name(name) not in allowed
    }
    assert sorted(undeclared) == []


def requirement_closure(texts):
    """Names of everything that these requirements bring along on this machine."""
    closure, queue = set(), [Requirement(text) for text in texts]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        try:
            further = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            further = []
        wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
        new = [
            r for r in map(Requirement, further) if r.marker is None or any(map(r.marker.evaluate, wanted))
        ]
        if name not in closure:
            queue += new
        closure.add(name)
    return closure


def test_constraints_pin_everything():
    """What make installs is pinned, indirect requirements included; CUDA packages are pinned by torch itself."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = (r for extra in INSTALLED_EXTRAS for r in PROJECT["optional-dependencies"][extra])
    needed = requirement_closure([*PROJECT["dependencies"], *extras])
    needed = {name for name in needed if name not in COMES_WITH and not re.match("nvidia-|cuda-", name)}
    assert sorted(needed - {canonicalize_name(name) for name in pins}) == []
