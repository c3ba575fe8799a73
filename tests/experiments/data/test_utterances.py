"""Recordings with their texts out of a package."""

import io
import wave

import numpy as np
import pytest

from experiments.data import utterances
from experiments.data.utterances import of_set, sound


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
