"""Sentences and passages that sentence encoders are judged on.

*Film reviews*: sentences with the mean rating of twenty people, from -4 to 4 (Hutto and Gilbert 2014, "VADER: A parsimonious
rule-based model for sentiment analysis of social media text", ICWSM; MIT licence), out of the source archive of vaderSentiment
0.5. A sentence counts where its rating is at least LEAST in size; its label is the sign. Which sentences fit the regression and
which test it is drawn by a seed that never changes.

*Passages*: paragraphs of the held-out books of the corpus `prose`, split where the sentence that reaches the middle ends. The
first half is the query, the second its passage; passages of all books are searched together.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data.packages import SOURCE, Part, opened

ARCHIVE = Part(
    "vaderSentiment",
    "0.5",
    "additional_resources/hutto_ICWSM_2014.tar.gz",
    SOURCE,
    "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
)
RATINGS = "movieReviewSnippets_GroundTruth.txt"
#: The least size of a rating whose sign is asked for.
LEAST = 0.5
#: The seed of the draw, which is part of what the data are.
DRAW = 0
#: Words of a paragraph of which halves are taken: longer ones say more of themselves, and any encoder finds them.
WORDS = range(40, 121)
SENTENCE = re.compile(r"(?<=[.!?])[”’\"]?\s+")


@dataclass(frozen=True)
class Reviews:
    """Sentences that fit a regression, sentences that test it, and of each whether the rating is above 0."""

    fit: tuple[str, ...]
    fit_labels: tuple[bool, ...]
    test: tuple[str, ...]
    test_labels: tuple[bool, ...]


@dataclass(frozen=True)
class Passages:
    """Queries with the passage at the same place, and the book of each."""

    queries: tuple[str, ...]
    passages: tuple[str, ...]
    books: tuple[int, ...]


def reviews(cache: Path, fit: int, test: int) -> Reviews:
    """So many sentences of each kind; ValueError where the archive cannot be had, is another, or holds fewer."""
    with opened(ARCHIVE, cache) as file, tarfile.open(fileobj=io.BytesIO(file.read())) as archive:
        names = [name for name in archive.getnames() if name.rpartition("/")[2] == RATINGS]
        content = archive.extractfile(names[0]) if names else None
        text = "" if content is None else content.read().decode("latin-1")
    rated = [one for one in ratings(text) if abs(one[0]) >= LEAST]
    if len(rated) < fit + test:
        raise ValueError(
            f"{ARCHIVE.requirement} holds {len(rated)} rated sentences, {fit + test} are asked for"
        )
    order = np.random.default_rng(DRAW).permutation(len(rated))
    drawn = [rated[place] for place in order[: fit + test]]
    words, labels = [text for _, text in drawn], [rating > 0 for rating, _ in drawn]
    return Reviews(tuple(words[:fit]), tuple(labels[:fit]), tuple(words[fit:]), tuple(labels[fit:]))


def ratings(text: str) -> list[tuple[float, str]]:
    """(rating, sentence) of each line, which is number, rating and sentence with tabs between; each sentence once."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        parts = line.split("\t", 2)
        if len(parts) == 3:
            found.setdefault(parts[2].strip(), float(parts[1]))
    return [(rating, sentence) for sentence, rating in found.items()]


def passages(books: Sequence[str], each: int) -> Passages:
    """Halves of so many paragraphs of each book, evenly over it; of a shorter book all that it has."""
    queries, found, places = list[str](), list[str](), list[int]()
    for number, book in enumerate(books):
        halves = [pair for paragraph in book.split("\n\n") if (pair := halved(paragraph)) is not None]
        for place in np.linspace(0, len(halves) - 1, min(each, len(halves))).astype(int):
            query, passage = halves[place]
            queries.append(query)
            found.append(passage)
            places.append(number)
    return Passages(tuple(queries), tuple(found), tuple(places))


def halved(paragraph: str) -> tuple[str, str] | None:
    """A paragraph up to the end of the sentence that reaches its middle, and the rest; None where it is too short or too long,
    or that sentence ends beyond two thirds."""
    if len(paragraph.split()) not in WORDS:
        return None
    ends = [match.end() for match in SENTENCE.finditer(paragraph)]
    middle = next((end for end in ends if 2 * end >= len(paragraph)), None)
    if middle is None or 3 * middle > 2 * len(paragraph):
        return None
    return paragraph[:middle].strip(), paragraph[middle:].strip()
