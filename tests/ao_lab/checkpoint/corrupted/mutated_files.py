"""A saved folder as bytes that can be broken on purpose: headers and JSON taken apart, changed and written back."""

import json
import os
import struct
from pathlib import Path

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
RECORDS = "ao_lab"


class Case:
    """The files of one folder, by name."""

    def __init__(self, files, folder):
        self.files = dict(files)
        self.folder = Path(folder)
        #: What cannot be bytes: links, pipes and folders, made after the files.
        self.special = {}

    @property
    def shards(self):
        return sorted(name for name in self.files if name.endswith(".safetensors"))

    @property
    def index(self):
        """The name of the index, whichever layout the folder has."""
        return next((name for name in self.files if name.endswith(".index.json")), INDEX)

    def header(self, name):
        """Header and data of a safetensors file."""
        data = self.files[name]
        (length,) = struct.unpack("<Q", data[:8])
        return json.loads(data[8 : 8 + length]), data[8 + length :]

    def put_header(self, name, header, data):
        """A file of this header (an object, or text) and these bytes."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.files[name] = struct.pack("<Q", len(text)) + text + data

    def tensors(self, name):
        """dtype, shape and bytes of each tensor of a file, and its metadata."""
        header, data = self.header(name)
        metadata = header.pop("__metadata__")
        return {
            key: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]]
            for key, entry in header.items()
        }, metadata

    def put_tensors(self, name, tensors, metadata):
        """A well-formed file of these tensors."""
        header, data = {"__metadata__": metadata}, b""
        for key, (dtype, shape, raw) in tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        self.put_header(name, header, data)

    def records(self):
        return json.loads(self.header(self.shards[0])[0]["__metadata__"][RECORDS])

    def put_records(self, records):
        """The same records (an object, or text) into every file."""
        text = records if isinstance(records, str) else json.dumps(records)
        for name in self.shards:
            header, data = self.header(name)
            header["__metadata__"][RECORDS] = text
            self.put_header(name, header, data)

    def json(self, name):
        return json.loads(self.files[name])

    def put_json(self, name, value):
        self.files[name] = value if isinstance(value, bytes) else json.dumps(value).encode()

    def write(self):
        """The folder on disk."""
        self.folder.mkdir()
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)
        for name, (kind, target) in self.special.items():
            if kind == "link":
                (self.folder / name).symlink_to(target)
            elif kind == "pipe":
                os.mkfifo(self.folder / name)
            else:
                (self.folder / name).mkdir()


def places(value, path=()):
    """The path of every value inside a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


def at(value, path):
    for key in path:
        value = value[key]
    return value
