"""docs/SECURITY.md: the tests that it names exist, and no source runs what it reads."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE.replace("\n  ", ""))))
#: Calls that run text, pickles or a shell.
RUNS = {"eval", "exec", "compile", "__import__"}
LOADS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}


def test_every_statement_has_its_test():
    assert len(NAMED) > 25
    for file, name in NAMED:
        assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / file).read_text(), re.MULTILINE), (
            f"{file}::{name}"
        )
    assert len(re.findall(r"::test_", PAGE)) == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", PAGE))


def _is_true(node):
    return getattr(node, "value", None) is True


def dangers(tree):
    """What a module calls that runs what it is given."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        words = {one.arg: one.value for one in node.keywords}
        function = node.func
        if isinstance(function, ast.Name) and function.id in RUNS:
            yield node.lineno, function.id
        if isinstance(function, ast.Name) and function.id in ("njit", "jit") and _is_true(words.get("cache")):
            yield node.lineno, "Numba's pickles without is_own_cache"
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner, name = function.value.id, function.attr
            if owner in LOADS and name in ("load", "loads", "open", "Unpickler"):
                yield node.lineno, f"{owner}.{name}"
            if (owner, name) == ("torch", "load") and not _is_true(words.get("weights_only")):
                yield node.lineno, "torch.load without weights_only=True"
            if (owner, name) in (("os", "system"), ("os", "popen")):
                yield node.lineno, f"{owner}.{name}"
        for word in ("trust_remote_code", "shell", "allow_pickle"):
            if word in words and getattr(words[word], "value", None) is not False:
                yield node.lineno, word


@pytest.mark.parametrize("package", ["reference", "fast", "ao_lab", "experiments"])
def test_nothing_runs_what_it_reads(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, what in dangers(ast.parse(path.read_text()))
    ]
    assert found == []


FOUND = (
    "eval(x)",
    "pickle.loads(x)",
    "torch.load(p)",
    "torch.load(p, weights_only=False)",
    "f(trust_remote_code=True)",
)


@pytest.mark.parametrize("text", FOUND)
def test_what_would_be_found(text):
    assert list(dangers(ast.parse(text)))
