"""Sentences with ratings, and halves of paragraphs.

Recordings with their texts out of a package.
"""

import io
import tarfile
import wave
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from experiments.data import packages, sentences, utterances
from experiments.data.sentences import halved, passages, ratings, reviews
from experiments.data.utterances import of_set, sound

TEXT = "\n".join(
    f"{n}\t{rating}\tsentence {n}" for n, rating in enumerate([2.0, -1.5, 0.4, 0.5, -0.5, 3.0, 1.0, -2.0])
)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A source archive of vaderSentiment's form."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as inner:
        info = tarfile.TarInfo(f"hutto/{sentences.RATINGS}")
        info.size = len(TEXT)
        inner.addfile(info, io.BytesIO(TEXT.encode()))
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "vaderSentiment-0.5.zip", "w") as outer:
        outer.writestr(f"v/{sentences.ARCHIVE.file}", packed.getvalue())
    monkeypatch.setattr(sentences, "ARCHIVE", replace(sentences.ARCHIVE, sha256=""))
    monkeypatch.setattr(packages, "installed_file", lambda part: None)
    return tmp_path


def test_reviews_are_drawn_once_and_for_all(archive):
    """Seven have ratings of at least 0.5 in size; the draw is the same in every run, and no sentence is in both parts."""
    found = reviews(archive, 4, 3)
    assert found == reviews(archive, 4, 3)
    assert set(found.fit) | set(found.test) == {f"sentence {n}" for n in (0, 1, 3, 4, 5, 6, 7)}
    signs = dict(zip([*found.fit, *found.test], [*found.fit_labels, *found.test_labels], strict=True))
    assert {name for name, positive in signs.items() if positive} == {f"sentence {n}" for n in (0, 3, 5, 6)}
    with pytest.raises(ValueError, match="holds 7 rated sentences, 8 are asked for"):
        reviews(archive, 4, 4)


def test_a_sentence_counts_once():
    assert ratings("1\t2.5\ta b\r\n2\t-1\ta b\r\nno line\r\n3\t0\tc\td\r\n") == [(2.5, "a b"), (0.0, "c\td")]


def words(count, end="."):
    return " ".join(["word"] * count) + end


def test_a_paragraph_is_split_where_the_sentence_of_its_middle_ends():
    whole = f"{words(10)} {words(20)} {words(20)}"
    assert halved(whole) == (f"{words(10)} {words(20)}", words(20))
    assert halved(f"{words(39)}") is None, "too short"
    assert halved(f"{words(60)} {words(61)}") is None, "too long"
    assert halved(f"{words(50)}") is None, "one sentence"
    assert halved(f"{words(10)} {words(50)} {words(5)}") is None, "the middle sentence ends beyond two thirds"


def test_paragraphs_are_taken_evenly_over_each_book():
    books = ["\n\n".join(f"{number} {words(24)} {words(24)}" for number in range(count)) for count in (5, 2)]
    found = passages(books, 3)
    assert found.books == (0, 0, 0, 1, 1)
    assert [query.split()[0] for query in found.queries] == ["0", "2", "4", "0", "1"]
    assert found.passages == (words(24),) * 5


def wav(samples, rate=16000, channels=1):
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, "<i2").tobytes())
    return made.getvalue()


def test_texts_and_sounds_belong_together(monkeypatch, tmp_path):
    files = {
        "s/t": b"<s> one two  </s> (001)\nnothing\n<s> three </s> (002)\n",
        "s/001.wav": wav([0, 16384, -32768]),
        "s/002.wav": wav([1]),
    }
    monkeypatch.setattr(utterances, "content", lambda cache, name: files[name])
    first, second = of_set(tmp_path, "s/t", "")
    assert (first.name, first.text, second.text) == ("001", "one two", "three")
    assert first.sound.dtype == np.float32
    assert first.sound.tolist() == [0.0, 0.5, -1.0]
    with pytest.raises(ValueError, match="rows would be of another sound"):
        of_set(tmp_path, "s/t", "0" * 8)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2)])
def test_another_form_of_sound_is_refused(rate, channels):
    with pytest.raises(ValueError, match="speech models here read"):
        sound(wav([0, 0], rate, channels))
