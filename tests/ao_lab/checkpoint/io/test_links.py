"""Links out of a folder: what they lead to is not the folder's text."""

import os

import pytest

from ao_lab.checkpoint.io import links
from ao_lab.checkpoint.io.links import leads_out, links_out, page, roots


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_text("key")
    path = tmp_path / "model"
    path.mkdir()
    return path


def test_a_page_is_a_file_of_its_folder(folder, monkeypatch):
    (folder / "card").write_bytes(b"text \xff")
    (folder / "same").symlink_to("card")
    (folder / "out").symlink_to("../secret")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    read = {name: page(folder / name) for name in ("card", "same", "out", "circle", "pipe", "none")}
    text = "text \ufffd"
    assert read == {"card": text, "same": text, "out": None, "circle": None, "pipe": None, "none": None}
    assert links_out(folder, read) == ["out"]
    monkeypatch.setattr(links, "LARGEST_PAGE", 3)
    assert page(folder / "card") is None


def test_a_circle_leads_nowhere(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert not leads_out(folder / "a", roots(folder))
