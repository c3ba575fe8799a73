"""Utterances with their texts, on which speech models are judged: ten recordings of the Debian package pocketsphinx-testdata.

Five are sentences of an audio book (Jane Austen, "Sense and Sensibility", LibriVox), five are names of playing cards; 16 kHz,
one channel, 16 bits (BSD-2 licence). Texts are as the package has them, which repeats a word in one ("a more a amiable woman").
Recordings are compared with their hash, so that rows are of the same sound whatever version of the package it came from.
"""

from __future__ import annotations

import hashlib
import io
import re
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.data.packages import DEBIAN, Part, opened

PACKAGE, VERSION = "pocketsphinx-testdata", "0.8"
FOLDER = "usr/share/pocketsphinx/test/data"
RATE = 16000
#: Of each file of texts the folder, and the first digits of the SHA-256 of all its recordings in the order of the texts.
SETS = {"librivox/transcription": "d18ab0e4", "cards/cards.transcription": "cd4b3cc7"}
LINE = re.compile(r"<s>\s*(.*?)\s*</s>\s*\((.+)\)")


@dataclass(frozen=True)
class Utterance:
    """A recording, float32 from -1 to 1 at RATE samples a second, and what is said in it."""

    name: str
    text: str
    sound: NDArray[np.float32]


def utterances(cache: Path) -> tuple[Utterance, ...]:
    """All utterances; ValueError where the package cannot be had, or its recordings are others."""
    return tuple(one for texts, wanted in SETS.items() for one in of_set(cache, texts, wanted))


def of_set(cache: Path, texts: str, wanted: str) -> list[Utterance]:
    """The utterances of one file of texts."""
    folder, digest, found = texts.partition("/")[0], hashlib.sha256(), []
    for line in content(cache, texts).decode().splitlines():
        if match := LINE.match(line):
            data = content(cache, f"{folder}/{match[2]}.wav")
            digest.update(data)
            found.append(Utterance(match[2], match[1], sound(data)))
    if digest.hexdigest()[: len(wanted)] != wanted:
        raise ValueError(
            f"recordings of {texts} in {PACKAGE} have SHA-256 {digest.hexdigest()}, those of the record begin with {wanted}; "
            "rows would be of another sound"
        )
    return found


def content(cache: Path, name: str) -> bytes:
    """A file of the package."""
    with opened(Part(PACKAGE, VERSION, f"{FOLDER}/{name}", DEBIAN), cache) as file:
        return file.read()


def sound(data: bytes) -> NDArray[np.float32]:
    """The samples of a WAV file; ValueError for another rate, width or number of channels than the module's."""
    with wave.open(io.BytesIO(data)) as file:
        form = file.getframerate(), file.getsampwidth(), file.getnchannels()
        if form != (RATE, 2, 1):
            raise ValueError(
                f"a recording has (rate, bytes, channels) {form}, speech models here read {(RATE, 2, 1)}"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768
