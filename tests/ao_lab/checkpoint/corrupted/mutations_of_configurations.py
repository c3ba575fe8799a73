"""Ways to break a folder's config.json and index; see `tests.ao_lab.checkpoint.corrupted.mutations_of_checkpoints`."""

from tests.ao_lab.checkpoint.corrupted.mutated_files import CONFIG, SINGLE, at, places
from tests.ao_lab.checkpoint.corrupted.mutations_of_checkpoints import BYTES, HOSTILE, TEXTS, other_metadata


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
