"""Texts that pretrained language models are evaluated on, in windows of tokens, and text that methods are calibrated on.

With the corpus `prose` there are two texts, of two kinds: the test text of WikiText-2 (release wikitext-2-v1: words and
punctuation apart, rare words as <unk>; most published perplexities are of wikitext-2-raw-v1, which is another text), and seven
books that no calibration sees. Without it there is the source of the installed sympy, and rows say so.

Perplexity is computed as the field does: the text in windows that do not overlap (stride = window), from its start, by the
model's own tokenizer; loss is the mean of -log p over predicted tokens, perplexity e to the loss, per token. A window predicts
all of its tokens but the first; where the tokenizer puts a token before a text (BOS), each window begins with it and predicts
all of its text. Of several documents each gives as many windows as the others, its first ones.

Standard errors are over windows of one document, and over documents where there are several (windows of one book are no
independent samples; the mean of each book is one).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ao_lab.eval import Tokens, built_in, digest, standard_error, windows_of
from experiments.data.corpora import read
from experiments.data.corpus import TRAIN, Corpus, SplitCorpus

#: The environment's name of a folder of the corpus `prose`.
VARIABLE = "AO_LAB_PROSE"
WIKITEXT, BOOKS = "wikitext2-test", "heldout"


@dataclass(frozen=True)
class EvaluationText:
    """A text: its name in rows, what pages say of it, and its documents."""

    name: str
    about: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class TextWindows:
    """Windows of a text: token ids (windows, length), the document of each, and the place of the first predicted token.

    bytes: of UTF-8 that the windows stand for. share: the part of their tokens that is predicted.
    """

    text: EvaluationText
    ids: Tensor
    documents: tuple[int, ...]
    first: int
    bytes: int
    share: float

    @property
    def predicted(self) -> int:
        """How many tokens are predicted."""
        return int(self.ids.shape[0] * (self.ids.shape[1] - self.first))


def prose_of(corpus: Corpus | None, cache: Path) -> SplitCorpus | None:
    """The corpus `prose`: the one that was given, else that in $AO_LAB_PROSE or in the cache's folder `prose`, else None.

    ValueError where a folder is there and holds another text. What was read is held in memory.
    """
    if isinstance(corpus, SplitCorpus):
        return corpus
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else cache / "prose"
    if not named and not folder.is_dir():
        return None
    files = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in folder.glob("*"))
    return _read_once(folder, tuple(files))


@lru_cache(maxsize=1)
def _read_once(folder: Path, files: tuple[tuple[str, int, int], ...]) -> SplitCorpus:
    """The corpus in a folder of these files, sizes and times: unpacking takes a second, and what runs keep asks each time."""
    return read(folder)


def evaluation_texts(prose: SplitCorpus | None) -> tuple[EvaluationText, ...]:
    """WikiText-2's test text and the held-out books; without the corpus `prose` the source of sympy."""
    if prose is None:
        text = built_in()
        name = f"{text.name.rpartition('-')[0]}-source"
        return (EvaluationText(name, "a tenth of the source of the installed sympy (Python)", (text.text,)),)
    wikitext = EvaluationText(
        "wikitext-2-v1-test", "the test text of WikiText-2 (wikitext-2-v1)", documents_of(prose, WIKITEXT)
    )
    books = EvaluationText(
        "books-held-out",
        "seven books of Standard Ebooks, none of them calibrated on",
        documents_of(prose, BOOKS),
    )
    return wikitext, books


#: Letters of a token, at most: four of English, seldom eight.
LETTERS = 8
#: The part of one's own text that is held out, its end.
HELD_OUT = 0.1


@dataclass(frozen=True)
class OwnText:
    """A text of the user's: its name, what models train on or methods see, and its end, which is held out. whole: nothing does,
    and all of it is evaluated on, as `ao-lab compare --text` does. alone: nothing else is evaluated on."""

    name: str
    train: str
    held_out: str
    whole: bool = False
    alone: bool = False

    @classmethod
    def of(cls, path: Path, whole: bool = False, alone: bool = False) -> OwnText:
        """The text of a file; ValueError where there is none, for one that cannot be read as UTF-8, and one without letters."""
        if not path.is_file():
            raise ValueError(f"--text {path} is no file; give one with some thousand words")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text {path} cannot be read as text in UTF-8: {error}") from error
        cut = len(text) - int(HELD_OUT * len(text))
        if not text[cut:].strip():
            raise ValueError(
                f"--text {path} holds {len(text)} characters; give a text of some thousand words"
            )
        # As `ao-lab compare` calls it, on every page.
        return cls(
            re.sub(r"[^\w.+-]+", "_", path.name) or "text", text[:cut], text[cut:], whole, whole or alone
        )

    @property
    def evaluation(self) -> EvaluationText:
        """What is evaluated on: the held-out end, or all of it."""
        text = self.train + self.held_out
        name = f"{self.name}-{digest(text)}"
        if self.whole:
            return EvaluationText(name, f"the text {self.name}", (text,))
        about = f"the last tenth of the text {self.name}" + ", which no model trains on" * (not self.alone)
        return EvaluationText(f"{name}-held-out", about, (self.held_out,))

    def check_drawn(self, length: int) -> None:
        """ValueError where methods can draw no sequences of so many tokens from what they may see."""
        if len(self.train) <= 2 * LETTERS * length:
            raise ValueError(
                f"--text {self.name}: methods draw sequences of {length} tokens from its first nine tenths, so that "
                f"they need more than {2 * LETTERS * length} letters and have {len(self.train)}; give a longer text"
            )

    def __repr__(self) -> str:
        digest = hashlib.sha256((self.train + self.held_out).encode()).hexdigest()[:12]
        return f"OwnText({self.name!r}, {digest})"


def is_held_out(name: str, file: str) -> bool:
    """Whether a text of this name is the held-out end of a user's file, whatever the file holds."""
    return re.fullmatch(rf"{re.escape(file)}-[0-9a-f]{{8}}-held-out", name) is not None


def documents_of(prose: SplitCorpus, split: str) -> tuple[str, ...]:
    """The texts of a split, whole."""
    return tuple(one.data.decode() for one in prose.documents if one.path.startswith(f"{split}/"))


def calibration_documents(prose: SplitCorpus | None) -> tuple[str, ...]:
    """Text that methods may see: the books of the training split, else the part of sympy's source that is not held out."""
    if prose is not None:
        return documents_of(prose, TRAIN)
    from experiments.data import corpus

    return tuple(one.data.decode(errors="replace") for one in corpus.load().train)


def token_windows(
    text: EvaluationText,
    encode: Callable[[str], Tokens],
    length: int,
    count: int,
    beginning: Sequence[int] = (),
) -> TextWindows:
    """At most `count` windows of `length` tokens, those of `beginning` included; ValueError where a document has not one.

    Documents take turns, so that each has as many as the others or one more.
    """
    each = -(-count // len(text.documents))
    chosen = text.documents[: min(count, len(text.documents))]
    found = [windows_of(document, encode, length, each, beginning) for document in chosen]
    places = [(turn, number) for turn in range(each) for number in range(len(found))]
    taken = [(turn, number) for turn, number in places if turn < len(found[number].ids)][:count]
    ids = torch.stack([found[number].ids[turn] for turn, number in taken])
    size = sum(found[number].bytes / len(found[number].ids) for _, number in taken)
    return TextWindows(
        text, ids, tuple(number for _, number in taken), found[0].first, round(size), found[0].share
    )


def mean_and_error(values: Sequence[float], documents: Sequence[int]) -> tuple[float, float]:
    """Mean over windows, and its standard error: over documents where several have windows, else over windows."""
    mean = sum(values) / len(values)
    groups: dict[int, list[float]] = {}
    for value, document in zip(values, documents, strict=True):
        groups.setdefault(document, []).append(value)
    if len(groups) == 1:
        return mean, standard_error(list(values))
    return mean, standard_error([sum(group) / len(group) for group in groups.values()])


def ratio_and_error(
    above: Sequence[float], below: Sequence[float], documents: Sequence[int]
) -> tuple[float, float]:
    """The ratio of two means over the same windows, and its linearized standard error as of `mean_and_error`; NaN over 0."""
    mean, _ = mean_and_error(below, documents)
    if mean == 0:
        return float("nan"), float("nan")
    ratio = mean_and_error(above, documents)[0] / mean
    rest = [(one - ratio * other) / mean for one, other in zip(above, below, strict=True)]
    return ratio, mean_and_error(rest, documents)[1]


def drawn_sequences(
    documents: Sequence[str],
    encode: Callable[[str], Tokens],
    length: int,
    count: int,
    seed: int,
    beginning: Sequence[int] = (),
) -> Tensor:
    """Token ids (count, length) of stretches of documents that a seed draws, each behind the tokens of `beginning`.

    A document is drawn by its size, a place in it evenly; tokens are those of the text from there, which begins at the next
    white space. ValueError where no document is long enough.
    """
    own = length - len(beginning)
    letters = LETTERS * own
    usable = [document for document in documents if len(document) > 2 * letters]
    if own < 1 or not usable:
        raise ValueError(
            f"no document has twice {letters} letters, of which sequences of {length} tokens are drawn"
        )
    generator = np.random.default_rng(seed)
    sizes = np.array([len(document) for document in usable], dtype=np.float64)
    rows: list[Tensor] = []
    while len(rows) < count:
        document = usable[int(generator.choice(len(usable), p=sizes / sizes.sum()))]
        start = int(generator.integers(len(document) - 2 * letters))
        ids = encode(document[start : start + 2 * letters].partition(" ")[2]).ids
        if len(ids) >= own:
            rows.append(torch.cat([torch.tensor(list(beginning), dtype=ids.dtype), ids[:own]]))
    return torch.stack(rows)
