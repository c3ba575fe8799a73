"""A save that fails leaves the earlier checkpoint as it was."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from ao_lab import SchemeConfig, load_pretrained, quantize_, save_pretrained, write_card
from ao_lab.checkpoint import api
from ao_lab.checkpoint.io import files
from ao_lab.checkpoint.io.files import leads_out, links_out, page, roots, staged, write_text

# Links out of a folder: what they lead to is not the folder's text.


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
    monkeypatch.setattr(files, "LARGEST_PAGE", 3)
    assert page(folder / "card") is None


def test_a_circle_leads_nowhere(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert not leads_out(folder / "a", roots(folder))


def quantized(seed, width=64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64))
    quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    return model


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing_after(calls, monkeypatch, error):
    """The writer of safetensors fails at a later file, with half of that on the disk."""
    import safetensors.torch

    write, count = safetensors.torch.save_file, 0

    def fail(tensors, path, metadata=None):
        nonlocal count
        count += 1
        if count <= calls:
            return write(tensors, path, metadata=metadata)
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", fail)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("error", [SafetensorError("no space"), KeyboardInterrupt()])
@pytest.mark.parametrize("layout", ["ao_lab", "compressed-tensors"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, calls, error, layout):
    first = quantized(0)
    save_pretrained(first, tmp_path, max_shard_bytes=4000, layout="ao_lab")
    before = content(tmp_path)
    failing_after(calls, monkeypatch, error)
    with pytest.raises((OSError, KeyboardInterrupt)):
        save_pretrained(quantized(1, 128), tmp_path, max_shard_bytes=4000, layout=layout)
    assert content(tmp_path) == before
    again = load_pretrained(tmp_path, quantized(2))
    assert torch.equal(again[0].weight.codes, first[0].weight.codes)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("limits", [(4000, 10**9), (10**9, 4000), (4000, 4000)])
def test_a_save_over_another_leaves_one(tmp_path, limits):
    """Layouts and numbers of shards differ: files of the earlier one go, and nobody else's."""
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(quantized(0), tmp_path, max_shard_bytes=limits[0], layout="ao_lab")
    saved = save_pretrained(quantized(1), tmp_path, max_shard_bytes=limits[1], layout="compressed-tensors")
    weights = {path.name for path in tmp_path.glob("*.safetensors*")}
    assert weights - {"model.safetensors.index.json"} == {
        path.name for path in saved.files if ".safetensors" in path.name
    }
    assert (tmp_path / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_files_are_replaced_when_all_are_written(tmp_path):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(FileNotFoundError), staged(tmp_path) as place:
        (place / "a.json").write_text((tmp_path / "missing").read_text())
    assert content(tmp_path) == {"a.json": b"old"}
    with staged(tmp_path) as place:
        (place / "sub").mkdir()
        (place / "sub" / "b").write_text("b")
    write_text(tmp_path / "a.json", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "sub"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_links_are_replaced_and_not_followed(tmp_path):
    """Files of the Hub's cache are links to blobs that other snapshots share."""
    names = ("model.safetensors", "config.json", "README.md")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in names:
        (tmp_path / name).write_text("a blob")
        (folder / name).symlink_to(tmp_path / name)
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, SchemeConfig(scheme="int8_rowwise_cast"))
    save_pretrained(model, folder, layout="compressed-tensors")
    write_card(folder)
    assert [(tmp_path / name).read_text() for name in names] == ["a blob"] * 3
    assert not any((folder / name).is_symlink() for name in names)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "config.json", "README.md", "ao_lab-1-of-2.safetensors"]
)
def test_folders_in_the_place_of_files_are_found_first(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder, and a file is to be written there"):
        save_pretrained(quantized(0), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_card_has_no_results_of_earlier_weights(tmp_path):
    """Nor is what lies there a reason to fail behind the weights."""
    (tmp_path / "eval.json").write_text('{"tasks": {"perplexity": {"token_perplexity": 1.5}}}')
    save_pretrained(quantized(0), tmp_path)
    assert "Accuracy was not measured" in (tmp_path / "README.md").read_text()
    (tmp_path / "eval.json").write_text("[")
    save_pretrained(quantized(0), tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_that_save_into_one_folder_leave_a_whole_checkpoint(tmp_path, monkeypatch):
    """Each removes files of the other's layout; one waits until the other has done so."""
    remove, others = api.remove_others, []

    def slowly(folder, names):
        if not others:
            others.append(
                threading.Thread(target=lambda: save_pretrained(quantized(1), tmp_path, layout="ao_lab"))
            )
            others[0].start()
            others[0].join(0.3)
        remove(folder, names)

    monkeypatch.setattr(api, "remove_others", slowly)
    monkeypatch.setattr(api, "card_beside", lambda *_: None)
    model = quantized(0)
    with contextlib.suppress(FileNotFoundError):  # of the first, whose files the second has replaced
        save_pretrained(model, tmp_path, layout="compressed-tensors")
    others[0].join()
    load_pretrained(tmp_path, quantized(2))
    assert {path.name for path in tmp_path.iterdir()} >= {"ao_lab.safetensors"}
