"""docs/ARCHITECTURE.md is short, and what it names is there: files, folders, functions."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
MOST_LINES, LONGEST = 300, 160
#: The index has about 25 questions.
LEAST_QUESTIONS = 20
TREES = ("reference", "fast", "ao_lab", "experiments", "tests", "reports", "docs", ".ci")
PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, TREES))})/[\w./]*)(?:::(\w+))?`")
#: Folders of the table of the tree, beside each other in the first cell.
FOLDER = re.compile(r"`([\w/]+/)`")


def missing(text, root=ROOT):
    """Paths and functions of a text that are not there; the links of a page are relative to docs/."""
    gone = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not (root / "docs" / link).exists()]
    for path, name in PATH.findall(text):
        if not (root / path).exists():
            gone.append(path)
        elif name and name not in defined(root / path):
            gone.append(f"{path}::{name}")
    return gone


def defined(path):
    """Functions and classes of a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def table(title):
    """Lines of the table under a heading, without its head."""
    section = PAGE.read_text().split(f"## {title}")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_it_is_short():
    lines = PAGE.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [number for number, line in enumerate(lines, start=1) if len(line) > LONGEST] == []


def test_what_it_names_is_there():
    assert missing(PAGE.read_text()) == []


def test_every_question_of_the_index_has_a_path():
    questions = table("Where is the rule for")
    assert len(questions) >= LEAST_QUESTIONS
    assert [line for line in questions if not PATH.search(line.split(" | ")[1])] == []


def test_folders_of_the_tree_are_there():
    tree, gone = "", []
    for line in table("The tree"):
        folders = FOLDER.findall(line.split(" | ")[0])
        if line.startswith("| **"):
            (tree,) = folders
        parent = tree
        for folder in [] if line.startswith("| **") else folders:
            found = next(
                (ROOT / base / folder for base in (parent, tree) if (ROOT / base / folder).is_dir()), None
            )
            gone += [folder] if found is None else []
            parent = parent if found is None else str(found.parent.relative_to(ROOT))
    assert gone == []


def test_every_package_has_a_phrase():
    named = {name for line in table("The tree") for name in FOLDER.findall(line.split(" | ")[0])}
    inner = {path.parent.name for tree in TREES[:3] for path in (ROOT / tree).glob("*/__init__.py")}
    assert {name for name in inner if not any(folder.startswith(f"{name}/") for folder in named)} == set()


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("`fast/dispatch.py::run` and [it](../fast/dispatch.py)", []),
        ("`fast/dispatch.py::walk`", ["fast/dispatch.py::walk"]),
        ("`fast/nowhere.py`", ["fast/nowhere.py"]),
        ("[it](../fast/nowhere.py#here)", ["../fast/nowhere.py"]),
    ],
)
def test_what_is_not_there_is_found(text, gone):
    assert missing(text) == gone


# docs/SECURITY.md: the tests that it names exist, and no source runs what it reads.

SECURITY_PAGE = (ROOT / "docs" / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", SECURITY_PAGE.replace("\n  ", ""))))
#: Calls that run text, pickles or a shell.
RUNS = {"eval", "exec", "compile", "__import__"}
LOADS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}


def test_every_statement_has_its_test():
    assert len(NAMED) > 25
    for file, name in NAMED:
        assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / file).read_text(), re.MULTILINE), (
            f"{file}::{name}"
        )
    assert len(re.findall(r"::test_", SECURITY_PAGE)) == len(
        re.findall(r"`tests/[\w/]+\.py::test_\w+`", SECURITY_PAGE)
    )


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
    "eval(x)", "pickle.loads(x)", "torch.load(p)", "torch.load(p, weights_only=False)", "f(trust_remote_code=True)",
)  # fmt: skip


@pytest.mark.parametrize("text", FOUND)
def test_what_would_be_found(text):
    assert list(dangers(ast.parse(text)))
