"""Corpora by name: found, read, identified, and refused with what to do."""

import hashlib
import lzma

import pytest

from ao_lab.eval import NAMED
from experiments.data import books as assemble
from experiments.data import corpora
from experiments.data.corpus import STRETCH, TextFile, evaluation_texts
from tests.experiments.harness import tiny

TEXTS = {
    "train": b"one\n\x0c\ntwo\n",
    "heldout": b"x" * STRETCH + b"tail\n",
    "wikitext2-valid": b"valid\n",
    "wikitext2-test": b"test\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a small corpus of the form of `prose`, whose record has its hashes."""
    names = {"train": ["b", "a"], "heldout": ["h"]}
    monkeypatch.setattr(assemble, "by_hash", lambda listed: names.get(listed[0].split, ["w"]))
    monkeypatch.setattr(assemble, "sources", lambda: [FakeSource(split) for split in TEXTS])
    monkeypatch.setattr(FakeSource, "document", property(lambda self: self), raising=False)
    made = []
    for split, text in TEXTS.items():
        (tmp_path / f"{split}.txt.xz").write_bytes(lzma.compress(text))
        digest = hashlib.sha256(text).hexdigest()
        made.append(TextFile(f"{split}.txt.xz", split, 1, len(text), digest))
    monkeypatch.setattr(assemble, "FILES", tuple(made))
    return tmp_path


class FakeSource:
    def __init__(self, split):
        self.split = split


def test_corpora_are_found_by_their_records(monkeypatch):
    assert list(corpora.corpora()) == ["sympy", "prose"]
    monkeypatch.setattr("experiments.data.corpus.load", tiny.corpus)
    assert corpora.load() is tiny.corpus()
    assert sum(one.bytes for one in assemble.PROSE.files) == 81_872_753


def test_splits_are_those_of_the_files(folder):
    made = corpora.load("prose", folder)
    assert [one.path for one in made.train] == ["train/b", "train/a"]
    assert [one.data for one in made.train] == [b"one\n", b"two\n"]
    assert [(one.path, len(one.data)) for one in made.held_out] == [
        ("heldout/h/0000", STRETCH),
        ("heldout/h/0001", 5),
    ]
    assert list(evaluation_texts(made)) == ["heldout/h", "wikitext2-valid/w", "wikitext2-test/w"]
    assert made.name == f"prose-1-{made.sha256[:8]}"
    assert list(evaluation_texts(tiny.corpus())) == ["held out"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train", lambda path: path.unlink(), r"train\.txt\.xz is missing; .*--build DIR"),
        ("heldout", lambda path: path.write_bytes(b"text"), r"heldout\.txt\.xz is no xz file"),
        (
            "wikitext2-test",
            lambda path: path.write_bytes(lzma.compress(b"Test\n")),
            r"test\.txt\.xz is another text: SHA-256 \w{64} of 5 bytes.* of 5\. Copy",
        ),
    ],
)
def test_another_text_is_refused(folder, name, change, message):
    change(folder / f"{name}.txt.xz")
    with pytest.raises(ValueError, match=message):
        corpora.load("prose", folder)


def test_wrong_names_and_folders_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="nearest is prose; the corpora are sympy, prose"):
        corpora.load("pros")
    with pytest.raises(ValueError, match="--corpus-path"):
        corpora.load("prose")
    with pytest.raises(ValueError, match=r"gone is no folder"):
        corpora.load("prose", tmp_path / "gone")
    with pytest.raises(ValueError, match="leave --corpus-path out"):
        corpora.load("sympy", tmp_path)


def test_texts_that_ao_lab_eval_names_are_those_of_the_corpus():
    """`ao_lab` imports nothing of here, so it has the name and hash of the file again."""
    held = {
        (corpus, file.name, file.sha256)
        for corpus in corpora.corpora()
        for file in corpora.corpora()[corpus].files
    }
    assert {(one.corpus, one.file, one.sha256) for one in NAMED.values()} <= held
