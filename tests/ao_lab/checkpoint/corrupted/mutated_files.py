"""A saved folder as bytes that can be broken on purpose: headers and JSON taken apart, changed and written back."""

import json
import os
import resource
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ao_lab import (
    Int8StaticActivationInt8WeightConfig,
    QuantizedTensor,
    SchemeConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)

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


# Valid folders to be broken, and what becomes of loading one: with bounds on time and memory.


SECONDS = 10
#: Address space beyond what the process has when the test begins.
MOST_MEMORY = 2**30
LONGEST_MESSAGE = 1200
SCHEMES = {
    "int8": ("int8_rowwise", "compressed_tensors.int8_token", "compressed-tensors"),
    "fp8": ("fp8_rowwise", None, "compressed-tensors"),
    "int4": ("int4_g32_asymmetric", None, "compressed-tensors"),
    "mxfp4": ("mxfp4", None, "compressed-tensors"),
    "mxfp8": ("mxfp8_e4m3", "compressed_tensors.mxfp8_e4m3", "compressed-tensors"),
    "nvfp4": ("nvfp4", None, "compressed-tensors"),
    "ours int4": ("int4_g32_asymmetric", "int8_rowwise", "ao_lab"),
    "ours nvfp4": ("nvfp4", "nvfp4", "ao_lab"),
    "ours int8": ("int8_rowwise", None, "ao_lab"),
    "ours nf4": ("nf4", None, "ao_lab"),
}


class TooLong(BaseException):
    """A load that does not end."""


def small_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64, bias=False), nn.Embedding(32, 64)
    )
    return model.to(torch.bfloat16).eval()


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def made_bases(root):
    """Valid folders: their files, whether they are in shards, and the values of the model (None where it is built)."""
    made = {}
    for name, (scheme, activation, layout) in SCHEMES.items():
        model = small_model()
        quantize_(model, SchemeConfig(scheme=scheme, activation_scheme=activation))
        made[name] = model, layout, 5 * 10**9, False
        made[name + " in shards"] = model, layout, 2000, False
    static = small_model()
    inputs = Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05))
    quantize_(static, inputs.for_layout("compressed-tensors"))
    made["static"] = static, "compressed-tensors", 5 * 10**9, False
    built = llama()
    quantize_(built, SchemeConfig(scheme="mxfp4"))
    made["built"] = made["built again"] = built, "auto", 5 * 10**9, True
    folders = {}
    for name, (model, layout, limit, is_built) in made.items():
        saved = save_pretrained(model, root / name, layout=layout, max_shard_bytes=limit)
        files = {path.name: path.read_bytes() for path in (root / name).iterdir()}
        folders[name] = files, "-of-" in saved.files[0].name, values(model), is_built
    return folders


def values(model):
    """What every name of a model's state stands for, whatever the dtype that a record asks for."""
    state = model.state_dict(keep_vars=True)
    return {
        name: x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x.detach().clone()
        for name, x in state.items()
    }


def identities(model):
    return {name: (id(x), x._version) for name, x in model.state_dict(keep_vars=True).items()}


@contextmanager
def limits():
    """No load may take long, or a gigabyte more than there is."""

    def stop(number, frame):
        raise TooLong

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, old)


def outcome(case, base):
    """ "error" or "loaded", and what is wrong with how it ended ("" where nothing is)."""
    _, _, wanted, is_built = base
    target = None if is_built else small_model(1)
    before = None if is_built else identities(target)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        loaded = load_pretrained(case.folder, target)
    except (ValueError, TypeError, FileNotFoundError) as error:
        text = str(error)
        clear = str(case.folder) in text and "\n" not in text and len(text) < LONGEST_MESSAGE and ";" in text
        kept = is_built or identities(target) == before
        return (
            "error",
            "" if clear and kept else f"unclear or half changed: {type(error).__name__}: {text[:300]}",
        )
    except (Exception, TooLong) as error:  # noqa: BLE001  (whatever it is, it is reported)
        return "error", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loaded", unlike(loaded, wanted)


def unlike(loaded, wanted):
    """What is wrong with a model that was loaded; "" where its numbers are those that were saved."""
    try:
        got = values(loaded)
        same = got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
        return f"loaded, but cannot be used: {type(error).__name__}: {str(error)[:300]}"
    return "" if same else "loaded other numbers"
