"""A folder's files: what each may say, alone and together; each message names the file."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from ao_lab.checkpoint.io.shards import INDEX, check_pickled, look_at, read_header
from ao_lab.checkpoint.io.strict_json import check_scheme_fields
from reference import SCHEMES
from reference.schemes.schemes import scheme_fields

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
    with pytest.raises(ValueError, match="is the plain name of a"):
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
        ({"metadata": {}, "weight_map": {"x": "../outside.bin"}}, r"plain name of a \.bin file"),
        ({"metadata": {}, "weight_map": {"x": 5}}, r"plain name of a \.bin file"),
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
