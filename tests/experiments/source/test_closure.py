"""What a measurement reaches, and what changes its hash, on a small tree."""

import ast
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.harness.rows import ROOT
from experiments.source import definitions
from experiments.source.closure import Closure, SourceTree
from experiments.source.definitions import definitions_of

FILES = {
    "fast/__init__.py": """
        from fast.quantize.quantize import quantize
        from fast.sparsity import prune
        from fast.tables import load
        load()
    """,
    "fast/quantize/__init__.py": "",
    "fast/quantize/quantize.py": '''
        """Quantizers."""
        from __future__ import annotations
        import torch
        from typing import TYPE_CHECKING
        from fast.rules import scale as scale_of, unused
        if TYPE_CHECKING:
            from fast.sparsity import Mask

        LIMIT = 448.0

        def quantize(x: torch.Tensor, mask: Mask | None = None) -> torch.Tensor:
            """Codes."""
            # A comment.
            biggest = torch.max(x)
            if biggest > LIMIT:
                raise ValueError(f"{biggest} is too large")
            from .lazy import rounded
            return rounded(x / scale_of(biggest))
    ''',
    "fast/quantize/lazy.py": "import fast.tables as tables\n\ndef rounded(x):\n    return tables.TABLE['round'](x)\n",
    "fast/rules.py": "FLOOR = 2.0\n\ndef scale(m):\n    return m / FLOOR\n\ndef unused(m):\n    return m\n",
    "fast/tables.py": """
        TABLE = {}
        def enter(function):
            TABLE[function.__name__] = function
            return function
        def load():
            from fast import entries
    """,
    "fast/entries.py": """
        from fast.tables import enter
        @enter
        def round(x):
            return x + 1
        def other(x):
            return x
    """,
    "fast/sparsity.py": "class Mask:\n    pass\n\ndef prune(x):\n    return x\n",
    "run.py": "",
    "experiments/__init__.py": "",
    "experiments/run.py": """
        import fast
        from experiments.books import note
        def run(x):
            note(x)
            return fast.quantize(x)
    """,
    "experiments/books.py": "def note(x):\n    return x\n",
}
ROOTS = ("experiments.run.run",)


def dedented(text):
    lines = text.split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    return "\n".join(line[min(indents, default=0) :] for line in lines)


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedented(text))
    return tmp_path


def closure(root, roots=ROOTS):
    return Closure(SourceTree(root, ("fast", "experiments"), ("experiments.books",)), roots)


def edit(root, name, before, after):
    path = root / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


def test_names_are_followed_to_their_definitions(tree):
    reached = {".".join(node) for node in closure(tree).numbers}
    assert reached == {
        "experiments.run.run",
        "fast.quantize.quantize.quantize",
        "fast.quantize.quantize.LIMIT",
        "fast.quantize.lazy.rounded",
        "fast.rules.scale",
        "fast.rules.FLOOR",
        "fast.tables.TABLE",
        "fast.tables.load",
        "fast.tables.enter",
    }
    assert sorted(closure(tree).modules) == [
        "experiments.run",
        "fast",
        "fast.entries",
        "fast.quantize.lazy",
        "fast.quantize.quantize",
        "fast.rules",
        "fast.tables",
    ]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fast/quantize/quantize.py", "# A comment.", "# Another."),
        ("fast/quantize/quantize.py", '"""Codes."""', '"""Other words."""'),
        ("fast/quantize/quantize.py", "is too large", "exceeds the limit"),
        ("fast/quantize/quantize.py", "x: torch.Tensor,", "x,"),
        ("fast/quantize/quantize.py", "biggest", "largest"),
        ("fast/quantize/quantize.py", "from .lazy import rounded", "from fast.quantize.lazy import rounded"),
        ("fast/quantize/quantize.py", "scale as scale_of, unused", "scale as scale_of"),
        ("fast/rules.py", "return m\n", "return 2 * m\n"),
        ("fast/sparsity.py", "return x", "return 0"),
        ("fast/entries.py", "def other(x):\n    return x", "def other(x):\n    return 0"),
        ("experiments/books.py", "return x", "return 0"),
        ("experiments/run.py", "import fast\n", "import fast\nX = 1\n"),
    ],
)
def test_what_runs_nothing_changes_no_hash(tree, name, before, after):
    hash_before = closure(tree).hash
    edit(tree, name, before, after)
    assert closure(tree).hash == hash_before


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fast/rules.py", "FLOOR = 2.0", "FLOOR = 4.0"),
        ("fast/quantize/quantize.py", "448.0", "240.0"),
        ("fast/quantize/quantize.py", "biggest > LIMIT", "biggest >= LIMIT"),
        ("fast/quantize/quantize.py", "ValueError", "TypeError"),
        ("fast/quantize/lazy.py", "'round'", "'floor'"),
        ("fast/entries.py", "x + 1", "x + 2"),
        ("fast/tables.py", "__name__", "__qualname__"),
        ("fast/__init__.py", "load()", "pass"),
        ("experiments/run.py", "fast.quantize(x)", "fast.prune(x)"),
    ],
)
def test_what_runs_changes_the_hash_and_names_its_module(tree, name, before, after):
    first = closure(tree)
    edit(tree, name, before, after)
    second = closure(tree)
    assert second.hash != first.hash
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert first.modules.get(module) != second.modules.get(module)


def test_moves_and_new_names_of_modules_and_functions_change_no_hash(tree):
    before = closure(tree).hash
    (tree / "fast/numerics").mkdir()
    (tree / "fast/rules.py").rename(tree / "fast/numerics/rounding_rules.py")
    edit(tree, "fast/numerics/rounding_rules.py", "def scale(", "def block_scale(")
    edit(
        tree,
        "fast/quantize/quantize.py",
        "from fast.rules import scale as scale_of, unused",
        "from fast.numerics import rounding_rules",
    )
    edit(tree, "fast/quantize/quantize.py", "scale_of(", "rounding_rules.block_scale(")
    assert closure(tree).hash == before
    # A function in a module of its own.
    edit(
        tree,
        "fast/quantize/lazy.py",
        "def rounded(x):\n    return tables.TABLE['round'](x)\n",
        "from fast.again import rounded\n",
    )
    (tree / "fast/again.py").write_text(
        "from fast.tables import TABLE\n\ndef rounded(x):\n    return TABLE['round'](x)\n"
    )
    assert closure(tree).hash == before


def test_a_module_as_a_value_counts_as_a_whole(tree):
    edit(tree, "experiments/run.py", "fast.quantize(x)", "getattr(fast, x)(x)")
    before = closure(tree).hash
    edit(tree, "fast/sparsity.py", "def prune(x):\n    return x", "def prune(x):\n    return 0")
    assert closure(tree).hash != before


def test_modules_named_by_text_count(tree):
    edit(
        tree,
        "fast/quantize/lazy.py",
        "def rounded(x):",
        "from importlib import import_module\n\ndef rounded(x):\n    import_module('fast.sparsity')",
    )
    before = closure(tree).hash
    edit(tree, "fast/sparsity.py", "return x", "return 0")
    assert closure(tree).hash != before


def test_a_name_that_several_imports_bind_means_each(tree):
    edit(
        tree,
        "fast/quantize/lazy.py",
        "def rounded(x):",
        "def rounded(x):\n    if x:\n        from fast.sparsity import prune as f\n    else:\n        from torch import f\n"
        "    f(x)",
    )
    before = closure(tree).hash
    edit(tree, "fast/sparsity.py", "return x", "return 0")
    assert closure(tree).hash != before


def test_packages_named_by_text_count(tree):
    edit(
        tree,
        "experiments/run.py",
        "return fast.quantize(x)",
        "from importlib import import_module\n    return getattr(import_module('fast'), x)(x)",
    )
    before = closure(tree).hash
    edit(tree, "fast/sparsity.py", "def prune(x):\n    return x", "def prune(x):\n    return 0")
    assert closure(tree).hash != before


def test_stubs_say_where_names_are(tree):
    (tree / "fast/__init__.py").write_text("def __getattr__(name):\n    return name\n")
    (tree / "fast/__init__.pyi").write_text("from fast.quantize.quantize import quantize as quantize\n")
    assert ("fast.quantize.quantize", "quantize") in closure(tree).numbers


def test_unknown_roots_are_named(tree):
    with pytest.raises(ValueError, match=r"'fast\.nothing'"):
        closure(tree, ["fast.nothing"])


def test_roots_of_this_clone_differ_and_are_stable():
    packages = ("reference", "fast", "ao_lab", "experiments")
    found = {}
    for root in ("reference.encode", "reference.quantize", "fast.encode", "fast.quantize", "fast.linear"):
        found[root] = Closure(SourceTree(ROOT, packages), [root])
    assert len({one.hash for one in found.values()}) == len(found)
    assert Closure(SourceTree(ROOT, packages), ["fast.encode"]).hash == found["fast.encode"].hash
    assert not any(name.startswith(("experiments", "ao_lab")) for name in found["fast.linear"].modules)
    assert not any(name.startswith("fast") for name in found["reference.quantize"].modules)


OPERATORS = {
    "pk/__init__.py": "from pk import first, second\n",
    "pk/ops.py": "def register(name, body):\n    pass\n",
    "pk/first.py": "from pk.ops import register\n\ndef first(x):\n    return x\n\nregister('first', first)\n",
    "pk/second.py": "from pk.ops import register\n\ndef second(x):\n    return x + 1\n\nregister('second', second)\n",
}


def test_a_name_means_the_same_while_another_thread_follows_it(tree, monkeypatch):
    """Methods of an experiment are measured at once, and their rows hashed at once."""
    name = "fast", ("quantize",)
    expected, source = SourceTree(tree, ("fast",)).resolve(*name), SourceTree(tree, ("fast",))
    assert expected[0] is not None
    reached, go_on, module = threading.Event(), threading.Event(), source.module

    def waits_in_the_other_thread(name):
        if threading.current_thread() is other:
            reached.set()
            go_on.wait(10)
        return module(name)

    monkeypatch.setattr(source, "module", waits_in_the_other_thread)
    other = threading.Thread(target=source.resolve, args=name)
    other.start()
    try:
        assert reached.wait(10)
        assert source.resolve(*name) == expected
    finally:
        go_on.set()
        other.join()


def test_a_parse_that_another_thread_spoils_is_repeated(monkeypatch):
    """CPython 3.11 raises SystemError where threads build trees at once."""
    parse, calls = ast.parse, []

    def spoilt(text):
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=69, after=64)")
        return parse(text)

    with monkeypatch.context() as patched:
        patched.setattr(definitions.ast, "parse", spoilt)
        assert set(definitions_of("x = 1\n", "m", False).definitions) == {"x"}
        assert len(calls) == 3
        patched.setattr(definitions.ast, "parse", lambda text: spoilt(calls.clear()))  # never done
        with pytest.raises(SystemError, match="recursion depth"):
            definitions_of("x = 1\n", "m", False)


def test_threads_parse_one_after_the_other(monkeypatch):
    parse, inside, most = ast.parse, [], []

    def counted(text):
        inside.append(text)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return parse(text)

    with monkeypatch.context() as patched:
        patched.setattr(definitions.ast, "parse", counted)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: definitions_of("x = 1\n", name, False), "abcdefgh"))
    assert most == [1] * 8


def test_versions_of_python_give_one_hash(monkeypatch):
    """Python 3.12 leaves empty texts beside a nested format, where 3.11 has none."""
    source = "def f(x, width):\n    return f'{x:<{width}} {x}'\n"
    parse = ast.parse

    def as_later(text):
        tree = parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                node.values.append(ast.Constant(""))
        return tree

    before = definitions_of(source, "m", False).definitions["f"].text(str)
    with monkeypatch.context() as patched:
        patched.setattr(definitions.ast, "parse", as_later)
        later = definitions_of(source, "m", False).definitions["f"].text(str)
    assert later == before


def test_settings_of_a_package_count_for_all_of_it(tree):
    """Those that name nothing of ours; where the package is not imported they change nothing."""
    before, other = closure(tree).hash, closure(tree, ("fast.quantize",)).hash
    edit(tree, "experiments/__init__.py", "", "import os\nos.environ.setdefault('A', 'b')\n")
    assert closure(tree).hash != before
    assert closure(tree, ("fast.quantize",)).hash == other


def test_a_registration_concerns_its_own_module(tmp_path):
    """With `register` as a registrar another module's operator changes nothing, one's own does; without, both do."""
    hashes = {}
    for changed in ("", "pk/first.py", "pk/second.py"):
        root = tmp_path / (changed.replace("/", "-") or "as-it-is")
        for name, text in OPERATORS.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("return x", "return 2 * x") if name == changed else text)
        for registrars in ((), ("pk.ops.register",)):
            tree = SourceTree(root, ("pk",), registrars=registrars)
            hashes[changed, bool(registrars)] = Closure(tree, ["pk.first.first"]).hash
    assert hashes["pk/second.py", True] == hashes["", True]
    assert hashes["pk/first.py", True] != hashes["", True]
    assert hashes["pk/second.py", False] != hashes["", False]
