"""Files out of packages that are not run: which archive, whole or not at all, and what is said where there is none.

Sentences with ratings, and halves of paragraphs.

Recordings with their texts out of a package.
"""

import hashlib
import io
import lzma
import subprocess
import tarfile
import wave
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.data import packages, sentences, utterances
from experiments.data.packages import DEBIAN, SOURCE, Part, archive_of, members_of_ar, opened
from experiments.data.sentences import halved, passages, ratings, reviews
from experiments.data.utterances import of_set, sound

WHEEL = Part("tiny-data", "1.0", "data/w.bin")
DEB = Part("tiny-sounds", "1.0", "usr/share/no-such-folder/a.wav", DEBIAN)


def wheel(folder, data=b"content" * 100):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_data/data/w.bin", data)
    return path


def deb(files, *, cut=0):
    """An ar archive with an odd member, then a tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    made = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0"), ("data.tar.xz", lzma.compress(packed.getvalue()))):
        made += (
            f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(data):<10}`\n".encode()
            + data
            + b"\n" * (len(data) % 2)
        )
    return made[: len(made) - cut]


def pip_that(monkeypatch, act):
    """Replace what fetches; returns the commands that it is asked."""
    asked = []

    def run(command, cwd=None, **_):
        asked.append(list(command))
        said = act(Path(command[command.index("--dest") + 1]) if "--dest" in command else cwd)
        return SimpleNamespace(returncode=0, stderr=said or "", stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_an_archive_is_read_where_it_lies(tmp_path, monkeypatch):
    pip_that(monkeypatch, lambda folder: pytest.fail("fetched"))
    wheel(tmp_path / "wheels")
    with opened(WHEEL, tmp_path) as file:
        assert file.read() == b"content" * 100


def test_a_fetch_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    """What pip has written by then is no archive of the cache, nor what a killed run left."""

    def half(folder):
        (folder / "tiny_data-1.0-py3-none-any.whl.part").write_bytes(b"x")
        return "ERROR: [Errno 28] No space left on device"

    (tmp_path / ".tiny-data.old.partial").mkdir()
    pip_that(monkeypatch, half)
    with pytest.raises(ValueError, match=r"No space left on device.*pip download --no-deps tiny-data==1\.0"):
        archive_of(WHEEL, tmp_path)
    assert list(tmp_path.iterdir()) == []
    pip_that(monkeypatch, lambda folder: wheel(folder) and "")
    assert archive_of(WHEEL, tmp_path) == tmp_path / "tiny_data-1.0-py3-none-any.whl"
    assert [one.name for one in tmp_path.iterdir()] == ["tiny_data-1.0-py3-none-any.whl"]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_archive_is_named(tmp_path, damage):
    path = wheel(tmp_path / "wheels")
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-60:]
    else:
        data[60] ^= 255
    path.write_bytes(data)
    with (
        pytest.raises(ValueError, match=r"tiny_data-1.0.*is cut short or damaged.*delete it"),
        opened(WHEEL, tmp_path) as file,
    ):
        file.read()


def test_a_source_archive_is_asked_for_by_its_hash(tmp_path, monkeypatch):
    """pip runs its setup.py, so it must be the known file, wherever it comes from."""
    data = b"sdist"
    part = Part("tiny-data", "1.0", "w.bin", SOURCE, hashlib.sha256(data).hexdigest())

    def fetch(folder):
        assert (folder / "requirements.txt").read_text() == f"tiny-data==1.0 --hash=sha256:{part.sha256}\n"
        (folder / "tiny-data-1.0.zip").write_bytes(data)

    asked = pip_that(monkeypatch, fetch)
    archive_of(part, tmp_path)
    assert {"--require-hashes", "--no-deps", "--no-binary"} <= set(asked[0])
    (tmp_path / "tiny-data-1.0.zip").write_bytes(b"other")
    with pytest.raises(ValueError, match="has SHA-256"):
        archive_of(part, tmp_path)
    (tmp_path / "tiny-data-1.0.zip").unlink()
    pip_that(monkeypatch, lambda folder: (folder / "tiny-data-1.0.zip").write_bytes(b"other") and "")
    with pytest.raises(ValueError, match="has SHA-256"):
        archive_of(part, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_debian_package(tmp_path, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with (
        pytest.raises(ValueError, match=r"there is no apt-get here.*apt-get download tiny-sounds"),
        opened(DEB, tmp_path),
    ):
        pass
    path = tmp_path / "wheels" / "tiny-sounds_1.0-2_all.deb"
    path.write_bytes(deb({DEB.file: b"sound", "usr/share/doc/copyright": b"terms"}))
    with opened(DEB, tmp_path) as file:
        assert file.read() == b"sound"
    assert [name for name, _ in members_of_ar(path.read_bytes())] == ["debian-binary", "data.tar.xz"]
    for broken in (deb({DEB.file: b"sound"}, cut=40), b"no archive"):
        path.write_bytes(broken)
        with (
            pytest.raises(ValueError, match=r"cut short or damaged|is no Debian package"),
            opened(DEB, tmp_path),
        ):
            pass


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
