"""Text to measure models on: a file of one's own, WikiText-2 by name, or text that every installation has, the source of sympy.

WikiText-2 is read from a folder of the corpus `prose`. That holds the release of the paper, wikitext-2-v1 (words and
punctuation apart, rare words as <unk>), not wikitext-2-raw-v1, which perplexities of language models are mostly published of.

Of sympy those files count whose path's hash falls into a tenth (as the experiments keep them from training), in the order of
their paths. Its version and hash name it, because another version is another text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import lzma
from dataclasses import dataclass
from pathlib import Path

SKIPPED = frozenset({"tests", "benchmarks"})
SHARE = 0.1
SAME = "runs on the same text with the same --limit and --length"
PER_TOKEN = "token_perplexity and accuracy of models with one tokenizer"
PROSE = f"{SAME}: {PER_TOKEN}, word_perplexity and bits_per_byte of any"


@dataclass(frozen=True)
class Text:
    """Text, its name and what numbers on it compare with, which results carry.

    code: whether it is a program's source, where white space separates no words.
    """

    name: str
    text: str
    compares: str = PROSE
    code: bool = False


@dataclass(frozen=True)
class NamedText:
    """A text that has a name: the file of a corpus that holds it, its release, and the SHA-256 of its uncompressed bytes."""

    corpus: str
    file: str
    release: str
    sha256: str
    compares: str


NAMED = {
    "wikitext2": NamedText(
        corpus="prose",
        file="wikitext2-test.txt.xz",
        release="wikitext-2-v1-test",
        sha256="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        compares=(
            f"{PROSE}. "
            "This is wikitext-2-v1 (tokenized, with <unk>); published perplexities of language models are mostly of "
            "wikitext-2-raw-v1, another text: give its wiki.test.raw by --text FILE"
        ),
    )
}


def text_of(given: str | None, corpus: Path | None = None) -> Text:
    """The text of a name or a file, or the built-in one.

    given: a name of `NAMED`, else a file's path, None for the built-in text. corpus: the folder that named texts are read from.
    ValueError where the text is missing, empty, no UTF-8, not the one of its name, or sympy is not installed.
    """
    check_text(given, corpus)
    if given is None:
        return built_in()
    if given in NAMED and corpus is not None:
        return named(given, corpus)
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with some thousand words")
    return Text(f"{path.name}-{digest(text)}", text)


def check_text(given: str | None, corpus: Path | None) -> None:
    """ValueError for a file, or a folder of a named text, that is not there; nothing is read."""
    if given in NAMED:
        one = NAMED[given]
        if corpus is None or not (corpus / one.file).is_file():
            found = "give its folder by --corpus-path" if corpus is None else f"{corpus} has no {one.file}"
            raise ValueError(
                f"--text {given} is a text of the corpus {one.corpus}: {found} (`ao-lab corpus {one.corpus}` says where it "
                f"comes from, --build DIR makes it)"
            )
    elif corpus is not None:
        raise ValueError(
            f"--corpus-path is the folder of named texts; with it goes --text {' or '.join(NAMED)}"
        )
    elif given is not None and not Path(given).is_file():
        raise ValueError(
            f"--text {given} is no file; give one with some thousand words, or a name: {', '.join(NAMED)}"
        )


def named(name: str, folder: Path) -> Text:
    """The text of a name; ValueError where the file holds another."""
    one = NAMED[name]
    path = folder / one.file
    try:
        data = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is no xz file ({error}); copy it again") from error
    if (found := hashlib.sha256(data).hexdigest()) != one.sha256:
        raise ValueError(
            f"{path} is not {one.release}: its SHA-256 is {found}, not {one.sha256}; copy it again"
        )
    return Text(f"{one.release}-{found[:8]}", data.decode(), one.compares)


def built_in() -> Text:
    """A tenth of the source of the installed sympy, about a megabyte."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the built-in text is the source of sympy, which is not installed; give --text FILE")
    root = Path(spec.submodule_search_locations[0])
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [path for path in paths if held_out(path) and not SKIPPED.intersection(path.split("/"))]
    text = "".join((root / path).read_text(encoding="utf-8").replace("\r\n", "\n") for path in chosen)
    return Text(
        f"sympy-{importlib.metadata.version('sympy')}-{digest(text)}",
        text,
        f"{SAME}: {PER_TOKEN}, bits_per_byte of any. It is Python source: no "
        "published perplexity compares, and there is none per word",
        code=True,
    )


def held_out(path: str) -> bool:
    """Whether a file is of the tenth that is measured on."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") < SHARE * 2**64


def digest(text: str) -> str:
    """The first letters of a hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


__all__ = ["NAMED", "Text", "built_in", "check_text", "text_of"]
