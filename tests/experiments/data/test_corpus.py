"""The corpus: split by file, the same everywhere, a clear error where there is none."""

import importlib.util

import pytest

from experiments.data import corpus
from experiments.data.corpus import Document, from_folder
from tests.experiments.harness import tiny


def test_the_parts_are_disjoint_and_complete():
    made = tiny.corpus()
    train, held_out = ({document.path for document in part} for part in (made.train, made.held_out))
    assert not train & held_out
    assert train | held_out == {document.path for document in made.documents}
    assert held_out


def test_the_split_does_not_depend_on_other_files():
    assert Document("core/add.py", b"").held_out == Document("core/add.py", b"longer").held_out
    share = sum(Document(f"file{number}.py", b"").held_out for number in range(2000)) / 2000
    assert 0.08 < share < 0.12


def test_a_folder_is_read_without_its_tests(tmp_path):
    for name in (
        "b.py",
        "a.py",
        "tests/test_a.py",
        "core/tests/x.py",
        "core/benchmarks/y.py",
        "core/c.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x = 1\r\n")
    made = from_folder(tmp_path, "made", "1")
    assert [document.path for document in made.documents] == ["a.py", "b.py", "core/c.py"]
    assert made.documents[0].data == b"x = 1\n"
    assert made.name == f"made-1-{made.sha256[:8]}"
    (tmp_path / "a.py").write_text("x = 2\n")
    assert from_folder(tmp_path, "made", "1").sha256 != made.sha256


def test_an_empty_folder_and_a_missing_sympy_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="reinstall made"):
        from_folder(tmp_path, "made", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    corpus.load.cache_clear()
    with pytest.raises(ValueError, match="pip install sympy"):
        corpus.load()
    corpus.load.cache_clear()


def test_the_description_lists_every_file():
    described = tiny.corpus().describe()
    assert len(described["train_files"]) + len(described["held_out_files"]) == described["files"]
    assert described["sha256"] == tiny.corpus().sha256
