"""Ways to break a saved folder: each takes a random generator and a `Case`, and changes its files."""

import json
import pickle

from tests.ao_lab.checkpoint.corrupted.mutated_files import CONFIG, SINGLE, at, places

DEEP = 100_000
#: Values that no field of a record means; text where JSON itself is hostile.
HOSTILE = [
    None, True, False, -1, 0, -5, 7, 2**31, 2**60, 10**18, 10**9, 1e308, 0.5, -0.0, "", "x", "x" * 100_000, [], {}, [[]],
    [-1, 2], [2**60, 2**60], {"a": 1}, "re:(a+)+$", "../../etc/passwd", "/etc/passwd", "\ud800", "\0", "\x1b[2J",
    "__import__('os')",
]  # fmt: skip
TEXTS = [
    "[" * DEEP, '{"a":' * DEEP, '{"weights": ' + "9" * 5000 + "}", '{"weights": NaN}', '{"weights": 1e999}', "", "null", "[]",
    "3", '"x"', '{"weights": {}', '{"weights": {}, "weights": {}}', '{"weights": 18446744073709551617}', "\ufeff{}",
    "{'weights': {}}",
]  # fmt: skip
BYTES = [b"\xff\xfe{}", b'{"a": "\xff"}', b"", b"\0\0\0\0", b"{", b"\x80\x04K\x01."]
SAME_SIZE = {
    "F32": ["I32", "U32"], "BF16": ["F16", "I16", "U16"], "U8": ["I8", "BOOL", "F8_E4M3", "F8_E5M2"], "I8": ["U8", "F8_E4M3"],
    "I64": ["F64", "U64"], "I32": ["F32", "U32"], "F8_E4M3": ["U8", "I8", "F8_E5M2"],
}  # fmt: skip


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def truncate(rng, case):
    name = rng.choice(case.shards)
    data = case.files[name]
    case.files[name] = data[
        : rng.choice([0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1, rng.randrange(len(data))])
    ]


def append(rng, case):
    name = rng.choice(case.shards)
    case.files[name] += bytes(rng.choice([1, 8, 4096]))


def header_length(rng, case):
    name = rng.choice(case.shards)
    data = case.files[name]
    length = rng.choice(
        [0, 1, 2**63, 2**64 - 1, len(data), len(data) - 8, 10**8 + 1, 10**9, rng.randrange(2**20)]
    )
    case.files[name] = length.to_bytes(8, "little") + data[8:]


def header_text(rng, case):
    """JSON that is hostile as text, where the header should be."""
    name = rng.choice(case.shards)
    case.put_header(
        name, rng.choice([text.encode("utf-8", "replace") for text in TEXTS] + BYTES), case.header(name)[1]
    )


def duplicate_tensor(rng, case):
    name = rng.choice(case.shards)
    header, data = case.header(name)
    key = rng.choice(list(header))
    text = json.dumps(header)
    case.put_header(
        name, (text[:-1] + f", {json.dumps(key)}: {json.dumps(header[key])}" + "}").encode(), data
    )


def header_entry(rng, case):
    """One description of a tensor with a hostile value."""
    name = rng.choice(case.shards)
    header, data = case.header(name)
    key = rng.choice([key for key in header if key != "__metadata__"])
    field = rng.choice(["dtype", "shape", "data_offsets", None])
    if field is None:
        header[key] = rng.choice(HOSTILE)
    else:
        header[key][field] = rng.choice(
            [*HOSTILE, [2**60], [1] * 100, [2**62] * 60, [1.0], ["1"], "F128", "F4"]
        )
    case.put_header(name, header, data)


def same_size_dtype(rng, case):
    """Another dtype of the same size: the file stays well formed."""
    name = rng.choice(case.shards)
    header, data = case.header(name)
    key = rng.choice([key for key in header if key != "__metadata__" and header[key]["dtype"] in SAME_SIZE])
    header[key]["dtype"] = rng.choice(SAME_SIZE[header[key]["dtype"]])
    case.put_header(name, header, data)


def other_shape(rng, case):
    """Another shape of as many elements."""
    name = rng.choice(case.shards)
    header, data = case.header(name)
    key = rng.choice([key for key in header if key != "__metadata__"])
    shape = header[key]["shape"]
    header[key]["shape"] = (
        rng.choice([[*shape, 1], [1, *shape], [1, 1, *shape]]) if len(set(shape)) < 2 else shape[::-1]
    )
    case.put_header(name, header, data)


def offsets(rng, case):
    """Tensors that overlap, leave gaps, or lie outside."""
    name = rng.choice(case.shards)
    header, data = case.header(name)
    key = rng.choice([key for key in header if key != "__metadata__"])
    shift = rng.choice([-8, -1, 1, 8, 2**40, -(2**40), len(data)])
    header[key]["data_offsets"] = [n + shift for n in header[key]["data_offsets"]]
    case.put_header(name, header, data)


def drop_tensor(rng, case):
    """A well-formed file without one tensor."""
    name = rng.choice(case.shards)
    tensors, metadata = case.tensors(name)
    tensors.pop(rng.choice(list(tensors)))
    case.put_tensors(name, tensors, metadata)


def add_tensor(rng, case):
    name = rng.choice(case.shards)
    tensors, metadata = case.tensors(name)
    added = rng.choice(["extra", "a.weight.codes", "a.weight", "../x", "\0", "", "a." * 500])
    tensors.setdefault(added + ("" if added not in tensors else "2"), ["F32", [2], bytes(8)])
    case.put_tensors(name, tensors, metadata)


def rename_tensor(rng, case):
    name = rng.choice(case.shards)
    tensors, metadata = case.tensors(name)
    key = rng.choice(list(tensors))
    tensors[rng.choice([key + "x", key.upper(), "x." + key, key[:-1]])] = tensors.pop(key)
    case.put_tensors(name, tensors, metadata)


def resize_tensor(rng, case):
    """A well-formed file, one tensor of which is shorter, longer, empty, or of wider numbers."""
    name = rng.choice(case.shards)
    tensors, metadata = case.tensors(name)
    key = rng.choice(list(tensors))
    dtype, shape, raw = tensors[key]
    rows = shape[0] if shape else 1
    changed = {
        "empty": [dtype, [0, *shape[1:]], b""],
        "twice": [dtype, [2 * rows, *shape[1:]], raw * 2],
        "scalar": ["F64", [], bytes(8)],
        "bytes": ["U8", [len(raw)], raw],
    }
    tensors[key] = rng.choice(list(changed.values()))
    case.put_tensors(name, tensors, metadata)


def record_value(rng, case):
    """Any value of the records by a hostile one."""
    records = case.records()
    path = rng.choice(places(records))
    at(records, path[:-1])[path[-1]] = rng.choice(HOSTILE)
    case.put_records(records)


def record_block(rng, case):
    """Block sizes, shapes and axes: the numbers that allocate."""
    records = case.records()
    name = rng.choice(list(records["weights"]))
    record = records["weights"][name]
    recipe = records["recipes"][record["recipe"]]
    number = rng.choice(
        [
            0,
            -5,
            10**18,
            2**40,
            2**60,
            3,
            1.5,
            "flat:1000000000000",
            "flat:0",
            [2**30, 2**30],
            [1, 0],
            "tensor",
        ]
    )
    where = rng.choice(["block", "shape", "flat", "axis", "partial", "activation"])
    if where == "block":
        recipe["weight"]["scale"]["block"] = number
    elif where == "partial":
        recipe["weight"]["scale"] |= {"block": rng.choice([10**12, 2**30]), "partial": True}
    elif where == "activation":
        recipe["activation"] = json.loads(json.dumps(recipe["weight"]))
        recipe["activation"]["scale"] |= {"block": 10**12, "partial": True}
    elif where == "axis":
        recipe["axis"] = rng.choice([0, 1, 5, -3, -2, -(10**9)])
    else:
        (record if where == "shape" else recipe)[where] = rng.choice(
            [[2**60, 2**60], [0, 0], [-1, 64], [64], [2**31], []]
        )
    case.put_records(records)


def record_key(rng, case):
    """A key less, a key more, or under another name."""
    records = case.records()
    path = rng.choice([path for path in places(records) if isinstance(path[-1], str)])
    holder = at(records, path[:-1])
    how = rng.choice(["drop", "add", "rename"])
    if how != "add":
        value = holder.pop(path[-1])
    if how != "drop":
        holder[rng.choice(["x", "__class__", "__reduce__", "../x", path[-1] + "2"])] = (
            1 if how == "add" else value
        )
    case.put_records(records)


def said_twice(rng, case):
    """A number that is in the tensors and in the records is another in one of them."""
    records = case.records()
    for record in records["weights"].values():
        if record.get("outer") is not None:
            record["outer"] *= 2
    case.put_records(records)
    for name in case.shards:
        tensors, metadata = case.tensors(name)
        for key, (dtype, shape, raw) in tensors.items():
            if key.endswith("weight_shape"):
                tensors[key] = [dtype, shape, raw[8:] + raw[:8]]
        case.put_tensors(name, tensors, metadata)


def record_text(rng, case):
    case.put_records(rng.choice(TEXTS))


def record_other(rng, case):
    """The record of one weight under the name of another, a format or kernel that is not its own."""
    records = case.records()
    names = list(records["weights"])
    name = rng.choice(names)
    field, values = rng.choice([
        ("format", ["ao_lab", "int-quantized", "nvfp4-pack-quantized", "pack-quantized", "dense", "os.system"]),
        ("recipe", [1, -1, 10**9, 2**62, True]),
        ("kernel", ["int8", "scaled_mm", "reference", "os.system"]),
        ("version", [2, 10**9, 0]),
        ("dtype", ["float64", "int8", "load", "nn", "float8_e4m3fn"]),
        ("layout", ["tiled", "plain", "x"]),
        ("transposed", [True]),
    ])  # fmt: skip
    record = records["weights"][name]
    holder = record if field in record else records["recipes"][record["recipe"]]
    holder[field] = rng.choice(values)
    case.put_records(records)


def shared_names(rng, case):
    records = case.records()
    names = [*records["weights"], *records["dense"]]
    records["shared"] = rng.choice(
        [
            {"x": "x"},
            {"x": "y", "y": "x"},
            {names[0]: names[1]},
            {"x": 3},
            {"x": names[0]},
            [],
            "x",
            {names[1]: "nowhere"},
        ]
    )
    case.put_records(records)


def no_metadata(rng, case):
    for name in case.shards:
        header, data = case.header(name)
        header["__metadata__"] = rng.choice(
            [{}, None, [], {"ao_lab": 3}, {"format": "pt"}, "x", {"ao_lab": {"weights": {}}}]
        )
        case.put_header(name, header, data)


def other_metadata(rng, case):
    """Files that say different things."""
    name = case.shards[-1]
    header, data = case.header(name)
    header["__metadata__"]["ao_lab"] += rng.choice([" ", "x"])
    case.put_header(name, header, data)


def special_file(rng, case):
    """Links, pipes and folders in the place of files."""
    name = rng.choice([*case.shards, CONFIG, *([case.index] if case.index in case.files else [])])
    case.files.pop(name)
    targets = ["/etc/passwd", "/dev/zero", "/dev/null", "nowhere", ".", name]
    case.special[name] = rng.choice(
        [*(("link", target) for target in targets), ("pipe", None), ("folder", None)]
    )


def file_gone(rng, case):
    case.files.pop(rng.choice([*case.shards, *([case.index] if case.index in case.files else [])]))


def pickles(rng, case):
    """Pickles beside the files, in their place, or alone."""
    payload = pickle.dumps(Payload(case.folder.parent / "executed"))
    how = rng.choice(["beside", "instead", "alone"])
    if how == "alone":
        for name in [*case.shards, *([case.index] if case.index in case.files else [])]:
            del case.files[name]
    if how == "instead":
        case.files[case.shards[0]] = payload
    for name in ("pytorch_model.bin", "model.pt", "data.pkl"):
        case.files[name] = payload


#: Of every folder: of the safetensors files and their records.
FILES = (
    truncate, append, header_length, header_text, duplicate_tensor, header_entry, same_size_dtype, other_shape, offsets,
    drop_tensor, add_tensor, rename_tensor, resize_tensor, record_value, record_value, record_value, record_block, record_block,
    record_key, record_text, said_twice, record_other, shared_names, no_metadata, special_file, file_gone, pickles,
)  # fmt: skip


# Ways to break a folder's config.json and index; see `tests.ao_lab.checkpoint.corrupted.mutations`.


def config_text(rng, case):
    case.put_json(CONFIG, rng.choice([text.encode("utf-8", "replace") for text in TEXTS] + BYTES))


def config_value(rng, case):
    """A value of quantization_config by a hostile one."""
    config = case.json(CONFIG)
    path = rng.choice(places(config["quantization_config"]))
    at(config["quantization_config"], path[:-1])[path[-1]] = rng.choice(HOSTILE)
    case.put_json(CONFIG, config)


def config_group(rng, case):
    """What configurations have been attacked with."""
    config = case.json(CONFIG)
    given = config["quantization_config"]
    groups = list(given.get("config_groups", {}).values())
    if not groups:
        given["version"] = rng.choice([0, 2, "1", None, 10**9])
    elif rng.random() < 0.5:
        key, values = rng.choice([("group_size", [0, -5, 10**18, 1e18, "128"]), ("num_bits", [10**9, 0, -1, "4"]),
                                  ("strategy", ["x", None]), ("type", ["str", 3]), ("symmetric", ["no"])])  # fmt: skip
        groups[0]["weights"][key] = rng.choice(values)
    else:
        rng.choice([given, groups[0]])[rng.choice(["targets", "ignore"])] = rng.choice(
            [["re:(a+)+$"], ["re:("], "x", [3], None]
        )
    case.put_json(CONFIG, config)


def config_gone(rng, case):
    del case.files[CONFIG]


def index_place(rng, case):
    """Where the index says that a tensor is."""
    index = case.json(case.index)
    key = rng.choice(list(index["weight_map"]))
    index["weight_map"][key] = rng.choice([
        "../../etc/passwd", "/etc/passwd", "../" + SINGLE, "sub/" + SINGLE, "..", ".", "", "a\\b.safetensors",
        "x\0.safetensors", "/dev/zero", "nowhere.safetensors", 3, None, ["x"], case.shards[-1], case.shards[0],
        "x" * 10**5 + ".safetensors", "\u202e.safetensors", "pytorch_model.bin",
    ])  # fmt: skip
    case.put_json(case.index, index)


def index_key(rng, case):
    index = case.json(case.index)
    how = rng.choice(["drop", "add", "none", "list", "empty", "size"])
    if how == "drop":
        index["weight_map"].pop(rng.choice(list(index["weight_map"])))
    elif how == "add":
        index["weight_map"]["extra"] = case.shards[0]
    elif how == "size":
        index["metadata"]["total_size"] = rng.choice(HOSTILE)
    else:
        index["weight_map"] = {"none": None, "list": ["x"], "empty": {}}[how]
    case.put_json(case.index, index)


def index_text(rng, case):
    case.put_json(case.index, rng.choice([text.encode("utf-8", "replace") for text in TEXTS] + BYTES))


def shards_mixed(rng, case):
    """One shard in the place of another, or one tensor in two."""
    first, last = case.shards[0], case.shards[-1]
    if rng.random() < 0.5:
        case.files[first], case.files[last] = case.files[last], case.files[first]
    else:
        tensors, metadata = case.tensors(last)
        tensors |= dict([next(iter(case.tensors(first)[0].items()))])
        case.put_tensors(last, tensors, metadata)


def model_value(rng, case):
    """A value of the model's own configuration by a hostile one."""
    config = case.json(CONFIG)
    key = rng.choice([key for key in config if key != "quantization_config"])
    config[key] = rng.choice(HOSTILE)
    case.put_json(CONFIG, config)


def model_size(rng, case):
    """Numbers that would allocate or loop."""
    config = case.json(CONFIG)
    keys = ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "num_labels", "max_position_embeddings"]  # fmt: skip
    config[rng.choice(keys)] = rng.choice([0, -1, 1, 3, 10**6, 10**9, 2**40, 2**60, 1e18, "64", None])
    case.put_json(CONFIG, config)


def model_code(rng, case):
    """Fields by which a configuration asks for code."""
    config = case.json(CONFIG)
    case.files["evil.py"] = f"open({str(case.folder.parent / 'executed')!r}, 'w')".encode()
    config |= rng.choice([
        {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
        {"attn_implementation": "kernels-community/flash-attn"}, {"_attn_implementation": "nobody/kernel"},
        {"model_type": "../../evil"}, {"model_type": "evil"}, {"model_type": ["llama"]}, {"dtype": "system"},
        {"torch_dtype": "float7"}, {"trust_remote_code": True, "auto_map": {"AutoModelForCausalLM": "nobody/repo--evil.M"}},
        {"rope_parameters": {"rope_type": "evil"}}, {"hidden_act": "evil"},
    ])  # fmt: skip
    case.put_json(CONFIG, config)


#: Of every folder.
CONFIGS = (config_text, config_value, config_value, config_group, config_gone)
#: Of folders with several files.
SHARDED = (index_place, index_place, index_key, index_text, shards_mixed, other_metadata)
#: Of folders from which transformers builds the model.
BUILT = (model_value, model_value, model_size, model_size, model_code)
