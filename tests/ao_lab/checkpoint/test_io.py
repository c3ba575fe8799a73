"""Files of a folder: headers and indices that are broken, links, saves that fail, JSON and expressions of others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ao_lab import SchemeConfig, load_pretrained, quantize_, save_pretrained, write_card
from ao_lab.checkpoint import api
from ao_lab.checkpoint.io import files
from ao_lab.checkpoint.io.files import leads_out, links_out, page, roots, staged, write_text
from ao_lab.checkpoint.io.patterns import LARGEST_COUNT, LONGEST, Pattern
from ao_lab.checkpoint.io.shards import INDEX, check_pickled, look_at, read_header
from ao_lab.checkpoint.io.strict_json import check_scheme_fields
from reference import SCHEMES
from reference.schemes.schemes import scheme_fields

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
    monkeypatch.setattr(api, "card_beside", lambda *_, **__: None)
    model = quantized(0)
    with contextlib.suppress(FileNotFoundError):  # of the first, whose files the second has replaced
        save_pretrained(model, tmp_path, layout="compressed-tensors")
    others[0].join()
    load_pretrained(tmp_path, quantized(2))
    assert {path.name for path in tmp_path.iterdir()} >= {"ao_lab.safetensors"}


# A folder's files: what each may say, alone and together; each message names the file.


X = torch.arange(4, dtype=torch.float32)


def file_of(path, header, payload):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def entry(start, stop, shape=(1,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


def folder_of(folder, shards, metadata=None):
    """Shards by name, with an index; metadata of each."""
    for at, (name, tensors) in enumerate(shards.items()):
        save_file(tensors, folder / name, metadata=None if metadata is None else metadata[at])
    where = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_a_sound_folder(tmp_path):
    found = look_at(
        folder_of(tmp_path, {"a.safetensors": {"x": X}, "b.safetensors": {"y": X}}, [{"v": "1"}] * 2)
    )
    assert set(found.specs) == {"x", "y"}
    assert found.metadata == {"v": "1"}
    assert torch.equal(found.read(["y"])["y"], X)


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        ({"x": entry(0, 4)}, b"\0" * 8, "was added to"),
        ({"x": entry(0, 4)}, b"\0" * 3, "cut off"),
        ({"x": entry(0, 4), "y": entry(8, 12)}, b"\0" * 12, "leaves bytes that no tensor has"),
        ({"x": entry(0, 4), "y": entry(0, 4)}, b"\0" * 4, "overlaps the tensor before it"),
        ({"x": entry(0, 4, (-1, -1))}, b"\0" * 4, "both are lists of counts"),
        ({"x": entry(-4, 0)}, b"", "both are lists of counts"),
        ({"x": entry(0, 4), "__metadata__": {"v": 1}}, b"\0" * 4, "metadata of .* is text by name"),
    ],
)
def test_headers(tmp_path, header, payload, message):
    with pytest.raises(ValueError, match=message):
        read_header(file_of(tmp_path / "x.safetensors", header, payload))


@pytest.mark.parametrize(
    "name", ["sub/b.safetensors", "../b.safetensors", "/b.safetensors", "b.bin", ".b.safetensors"]
)
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    """Also where the file that it names is there and holds the tensor."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (folder / "sub" / "b.safetensors", tmp_path / "b.safetensors", folder / ".b.safetensors"):
        save_file({"x": X}, place)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="is the name of a"):
        look_at(folder)


def test_a_tensor_in_two_files(tmp_path):
    folder_of(tmp_path, {"a.safetensors": {"x": X}, "b.safetensors": {"x": X, "y": X + 1}})
    (tmp_path / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    with pytest.raises(
        ValueError, match=r"tensor x is in a\.safetensors and in .*b\.safetensors; one of them is stale"
    ):
        look_at(tmp_path)


def test_metadata_of_shards_that_differ(tmp_path):
    folder = folder_of(
        tmp_path, {"a.safetensors": {"x": X}, "b.safetensors": {"y": X}}, [{"v": "1"}, {"v": "2"}]
    )
    with pytest.raises(ValueError, match="metadata v is another than in the other files"):
        look_at(folder)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    """transformers reads the single file, and others the shards: one of them is stale."""
    folder = folder_of(tmp_path, {"a.safetensors": {"x": X}})
    save_file({"x": X + 1}, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"has model\.safetensors, and model\.safetensors\.index\.json for other"
    ):
        look_at(folder)
    (folder / "a.safetensors").unlink()
    assert set(look_at(folder_of(folder, {"model.safetensors": {"x": X}})).specs) == {"x"}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("x", (2**62, 2**62, 0), "beyond 64 bits"), ("\ud800", (0,), r"\\ud800, which is no Unicode text")],
)
def test_what_safetensors_itself_cannot_read(tmp_path, name, shape, message):
    file = file_of(tmp_path / "x.safetensors", {name: entry(0, 0, shape)}, b"")
    with pytest.raises(ValueError, match=message):
        read_header(file)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"metadata": {}, "weight_map": {"x": "../outside.bin"}}, r"name of a \.bin file"),
        ({"metadata": {}, "weight_map": {"x": 5}}, r"name of a \.bin file"),
        ({"metadata": {}, "weight_map": {"x": "pipe.bin"}}, r"pipe\.bin is no regular file"),
        ({"weight_map": {"x": "a.bin"}}, "has no metadata"),
        ([], "holds a JSON object"),
    ],
)
def test_an_index_of_pickles_names_files_of_its_folder_alone(tmp_path, index, message):
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_pickled(tmp_path)


# Records of schemes as others may have written them.


@pytest.mark.parametrize("name", ["\x1b[31mmxfp4", "mxfp4\nint8", "\ud800", "mx\u202efp4"])
def test_names_of_schemes_are_shown_as_they_are(name):
    """Reports and tables show them; names of formats are checked where formats are made."""
    fields = scheme_fields(SCHEMES["mxfp4"])
    check_scheme_fields(fields, "weight")
    with pytest.raises(ValueError, match=r"weight: name is printable text on one line, got .*\\"):
        check_scheme_fields(fields | {"name": name}, "weight")


# Expressions from elsewhere: the answers of `re.match`, in bounded time.


NAMES = (
    "", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.experts.3.down_proj",
    "model.layers.1.mlp.gate", "visual.blocks.2.attn.qkv", "a\n", "ß_1", "model.layers.0.mlp.gate_proj",
)  # fmt: skip
#: Expressions as published configurations have them, and one for each part of the language.
EXPRESSIONS = (
    ".*lm_head", "lm_head$", r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj$", ".*mlp.gate$", r"visual.*", ".*experts.*",
    r"^(?!.*experts).*proj", r".*mlp\.(gate|up|down)_proj$", r"^model.layers.[0-9]+\.", r".*\.(?=q_proj)", "(?:lm|LM)_head",
    r"[^.]+$", r".*(?<=down)_proj", r".*(?<!gate)_proj$", r"\w+\b.", r".*\Bead", r".{3,5}d", "a??", "[a-f0-9_]*x?", r"\Z", "$",
    "a$", r"(model|visual)\W(\D+\d)*", "", "a|", r"[\d\s]*", r"[^\w.]", r"\S+",
)  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_re(text, name):
    assert Pattern(text).matches(name) is bool(re.match(text, name))


PARTS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "[ab]",
        "[^a]",
        "a*",
        "b+?",
        ".*",
        "a?",
        "(a|b)",
        "(?:ab|b)",
        "^",
        "$",
        r"\b",
        "(?!b)",
        "(?=a)",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PARTS, max_size=6).map("".join),
    st.text("ab\n_", max_size=8),
    st.sampled_from(["{}", "(?:{})*", "(?:{}){{1,3}}"]),
)
@example("a*", "", "(?:{})*")
def test_answers_of_any_expression_are_those_of_re(parts, name, whole):
    text = whole.format(parts)
    assert Pattern(text).matches(name) is bool(re.match(text, name))


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*$", "(.*a)*b", "(a*)*b", ".*" * 200 + "b"])
def test_no_expression_takes_long(text):
    start = time.perf_counter()
    assert not Pattern(text).matches("a" * 120 + "!")
    assert time.perf_counter() - start < 20  # re needs longer than anybody waits for the first four


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "no regular expression"),
        (r"(a)\1", "groupref is not supported"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?>a*)", "not supported"),
        ("a*+", "not supported"),
        ("((a*)*)*", "nest"),
        ("(?=(?=(?=a)))", "nest"),
        (f"a{{{LARGEST_COUNT + 1}}}", "count"),
        ("a" * (LONGEST + 1), "characters"),
        ("(" * 500, "no regular expression"),
    ],
)  # fmt: skip
def test_other_expressions_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Pattern(text)


def test_names_have_a_length():
    with pytest.raises(ValueError, match="longer than any"):
        Pattern("a*").matches("a" * 2000)


def test_file_systems_of_one_mode_are_not_asked_to_change_it(tmp_path, monkeypatch):
    """As exFAT or a mounted bucket: whoever changes the mode of a file is refused."""
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("refused"))
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, path, metadata: path.write_bytes(b"x"))
    files.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == b"x"
