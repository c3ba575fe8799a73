"""What `load_pretrained` looks at before it touches a model, one rule at a time."""

import json
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ao_lab
from ao_lab import SCHEMES, Int8WeightOnlyConfig, load_pretrained, quantize_pretrained
from ao_lab.checkpoint import model_builder
from ao_lab.checkpoint.formats import completed
from ao_lab.checkpoint.io import strict_json
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.records import Records, check_recipe, dense_names, read_records
from ao_lab.config.recipe import Recipe
from ao_lab.measure.folders import by_transformers
from ao_lab.tensor.metadata import Meta
from tests.ao_lab.checkpoint.corrupted.mutated_files import Case, identities, made_bases, outcome, small_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Valid folders by name."""
    return made_bases(tmp_path_factory.mktemp("valid"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            {"num_hidden_layers": 10**5},
            "describes a model of more than [0-9]+ parameters; the files hold fewer",
        ),
        ({"num_labels": 4 * 10**6}, "num_labels is a count, got 4000000"),
        ({"vocab_size": 2**40}, r"lm_head\.weight .*has shape"),
    ],
)
def test_configurations_do_not_decide_how_much_is_built(bases, tmp_path, field, message):
    """Layers, labels, rows of tables: refused before there are as many objects, or that much memory."""
    case = Case(bases["built"][0], tmp_path / "model")
    case.put_json("config.json", case.json("config.json") | field)
    case.write()
    with pytest.raises(ValueError, match=message):
        load_pretrained(case.folder)


NEO = {"model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"]}
BOMBS = {
    "a repeat": (NEO | {"attention_types": [[["global", "local"], 10**9]]}, "'?attention_types'? has 1000000000 in a list"),
    "repeats": (NEO | {"attention_types": [[["global", "local"], 2**20]] * 4000}, "cannot be built in 0 s"),
    "depths": ({"model_type": "swin", "architectures": ["SwinModel"], "depths": [10**7]}, "in a list"),
    "all depths": ({"model_type": "swin", "architectures": ["SwinModel"], "depths": [2**20] * 99}, "cannot be built in 0 s"),
    "blocks": ({"model_type": "funnel", "architectures": ["FunnelModel"], "block_sizes": [10**8]}, "in a list"),
    "blocks, a few": ({"model_type": "funnel", "architectures": ["FunnelModel"], "block_sizes": [10**4]}, "the files hold"),
    "pairs of positions": ({"model_type": "levit", "architectures": ["LevitModel"], "image_size": 10**9}, "is a length"),
    "large, not too large": ({"model_type": "levit", "architectures": ["LevitModel"], "image_size": 2**14},
                           "cannot be built in 0 s"),
    "a width": ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"], "hidden_size": 10**9}, "is a length"),
    "negative": ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers'? is a count of layers, got -1"),
    "old names": ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer'? is a count"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("config", "message"), BOMBS.values(), ids=BOMBS)
def test_numbers_that_make_lists_are_refused_in_time(bases, tmp_path, monkeypatch, config, message):
    """Whatever a number is called, and where several multiply: before memory is filled."""
    monkeypatch.setattr(model_builder, "SECONDS", 0.2)
    case = Case(bases["built"][0], tmp_path / "model")
    case.put_json("config.json", config)
    case.write()
    model_builder._import_model(config)
    started = time.thread_time()
    with pytest.raises(ValueError, match=message):
        load_pretrained(case.folder)
    assert time.thread_time() - started < 3


@pytest.mark.filterwarnings("ignore")
def test_dense_folders_have_the_same_bounds(tmp_path, monkeypatch):
    """Those that transformers builds by itself: `quantize_pretrained`, and the command line's `eval`."""
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    marian = {
        "model_type": "marian",
        "architectures": ["MarianModel"],
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    for config, message in (
        (BOMBS["a repeat"][0], "has 1000000000 in a list"),
        (marian | {"max_position_embeddings": 10**9}, "its files have [0-9]+ bytes"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            quantize_pretrained(tmp_path, Int8WeightOnlyConfig())
        with pytest.raises(ValueError, match=message):
            by_transformers(tmp_path, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "code",
    [
        {"attn_implementation": "nobody/kernel"},
        {"_attn_implementation": "paged|nobody/kernel:run"},
        {"attn_implementation": {"text_config": "nobody/kernel"}},
        {"text_config": {"experts_implementation": "nobody/kernel"}},
    ],
)
def test_kernels_of_a_folders_choice_are_not_fetched(tmp_path, code):
    """transformers would, from the Hub, for `ao-lab quantize` and `eval` of a dense folder."""
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **code}))
    for read in (
        lambda: quantize_pretrained(tmp_path, Int8WeightOnlyConfig()),
        lambda: by_transformers(tmp_path, None),
    ):
        with pytest.raises(ValueError, match="code on the Hub that transformers would fetch and run"):
            read()


def test_large_numbers_of_real_configurations_pass(bases, tmp_path):
    """Vocabularies, positions, bases of rotations and tokens are no counts of parts."""
    given = {
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": 10**6,
        "rope_theta": 1e7,
        "eos_token_id": [200020, 199999],
        "block_size": 2**20,
        "num_experts": 16384,
        "suppress_tokens": list(range(50000, 50200)),
    }
    case = Case(bases["built"][0], tmp_path / "model")
    case.put_json("config.json", given)
    case.write()
    assert model_builder.configuration(case.folder) == given


def test_at_most_as_many_parameters_as_files_can_fill(bases, tmp_path):
    """Counted: building stops there."""
    case = Case(bases["built"][0], tmp_path / "model")
    case.put_json("config.json", case.json("config.json") | {"num_hidden_layers": 10**5})
    case.write()
    made = []
    hook = nn.modules.module.register_module_parameter_registration_hook(lambda *given: made.append(given[1]))
    try:
        with pytest.raises(ValueError, match="the files hold fewer"):
            load_pretrained(case.folder)
    finally:
        hook.remove()
    assert len(made) < 200


def test_what_chooses_code_is_dropped(bases, tmp_path):
    """Also inside of parts; transformers would fetch kernels of the names in attn_implementation from the Hub."""
    case = Case(bases["built"][0], tmp_path / "model")
    code = {
        "attn_implementation": "nobody/kernel",
        "auto_map": {"AutoConfig": "evil.C"},
        "trust_remote_code": True,
    }
    case.put_json("config.json", case.json("config.json") | code | {"text_config": dict(code)})
    case.write()
    left = model_builder.configuration(case.folder)
    assert left["text_config"] == {}
    assert not set(left) & set(code)


def test_integers_in_the_place_of_floats(bases, tmp_path):
    """Of a folder whose records do not say what its dense tensors are: the model does."""
    case = Case(bases["int8"][0], tmp_path / "model")
    records = case.records()
    del records["dense"]
    case.put_records(records)
    header, data = case.header("model.safetensors")
    header["0.bias"]["dtype"] = "I16"
    case.put_header("model.safetensors", header, data)
    case.write()
    with pytest.raises(
        ValueError, match=r"0\.bias of .* is int16 of shape \(32,\), the model's is torch.bfloat16"
    ):
        load_pretrained(case.folder, small_model())


def test_pipes_are_not_waited_for(bases, tmp_path, monkeypatch):
    case = Case(bases["int8"][0], tmp_path / "model")
    case.special["model.safetensors"] = ("pipe", None)
    del case.files["model.safetensors"]
    case.write()
    assert outcome(case, bases["int8"]) == ("error", "")


def test_an_index_names_files_of_its_folder_alone(bases, tmp_path):
    """A valid file elsewhere is not opened."""
    files, _, _, _ = bases["int8 in shards"]
    case = Case(files, tmp_path / "model")
    first = case.shards[0]
    (tmp_path / first).write_bytes(case.files.pop(first))
    index = case.json("model.safetensors.index.json")
    moved = {key: f"../{name}" if name == first else name for key, name in index["weight_map"].items()}
    case.put_json("model.safetensors.index.json", {"weight_map": moved})
    case.write()
    with pytest.raises(ValueError, match=r"name of a \.safetensors file in the same folder"):
        load_pretrained(case.folder, small_model())


def test_an_index_and_its_files_say_the_same(bases, tmp_path):
    files = bases["int8 in shards"][0]
    first, last = (sorted(name for name in files if name.endswith("safetensors"))[i] for i in (0, -1))
    index = Case(files, "").json("model.safetensors.index.json")["weight_map"]
    many = max(set(index.values()), key=list(index.values()).count)
    one = next(name for name, file in index.items() if file == many)
    for number, (changed, message) in enumerate(
        [
            (index | {one: last if many != last else first}, f"is in {many}, but .* puts it into"),
            (index | {"extra": first}, "extra is in no file"),
            ({name: file for name, file in index.items() if name != one}, "does not name it"),
        ]
    ):
        case = Case(files, tmp_path / str(number))
        case.put_json("model.safetensors.index.json", {"weight_map": changed})
        case.write()
        with pytest.raises(ValueError, match=message):
            load_pretrained(case.folder, small_model())


def test_a_kernel_that_does_not_take_a_weight(bases, tmp_path):
    """Found when it is loaded, not when it is first used."""
    case = Case(bases["mxfp4"][0], tmp_path / "model")
    records = case.records()
    records["recipes"][0]["kernel"] = "int8"
    case.put_records(records)
    case.write()
    with pytest.raises(ValueError, match=r"0\.weight of .*kernel 'int8' does not take mxfp4"):
        load_pretrained(case.folder, small_model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 10**9}, "num_bits is 1000000000"),
        ({"group_size": -5}, "group_size is -5"),
        ({"group_size": 10**18}, "group_size"),
        ({"strategy": ["x"]}, "strategy"),
    ],
)
def test_configuration_and_records_say_the_same(bases, tmp_path, change, message):
    case = Case(bases["int4"][0], tmp_path / "model")
    config = case.json("config.json")
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    case.put_json("config.json", config)
    case.write()
    with pytest.raises(ValueError, match=message):
        load_pretrained(case.folder, small_model())


@pytest.mark.parametrize(
    ("place", "field", "value", "message"),
    [
        ("recipes", "transposed", 0, "transposed is bool, got 0"),
        ("recipes", "axis", -1.0, "axis is int"),
        ("recipes", "version", 2, "version 2; this ao_lab reads up to 1"),
        ("recipes", "dtype", "int8", "dtype is one of"),
        ("recipes", "kernel", "os.system", "kernel is one of"),
        ("recipes", "activation", {}, "activation lacks name"),
        ("weights", "recipe", 1, "recipe is one of 1, got 1"),
        ("weights", "shape", [2**40, 2**40], "is int32 of shape"),
        ("weights", "parts", ["codes"], "parts are weight_packed"),
        ("weights", "format", "dense", "format dense does not hold"),
    ],
)
def test_fields_of_records(bases, tmp_path, place, field, value, message):
    case = Case(bases["int4"][0], tmp_path / "model")
    records = case.records()
    records[place][0 if place == "recipes" else "0.weight"][field] = value
    case.put_records(records)
    case.write()
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(case.folder, small_model())
    assert str(case.folder) in str(caught.value)


def test_records_without_weights(bases, tmp_path):
    case = Case(bases["int4"][0], tmp_path / "model")
    case.put_records(case.records() | {"weights": {}})
    case.write()
    with pytest.raises(ValueError, match="the records name no weights"):
        load_pretrained(case.folder, small_model())


def test_patterns_of_a_configuration_are_not_matched(bases, tmp_path):
    """They are for other readers; here one that takes for ever takes no time."""
    case = Case(bases["int4"][0], tmp_path / "model")
    config = case.json("config.json")
    config["quantization_config"] |= {"ignore": ["re:(a+)+$", "re:("]}
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:(.*)*(.*)*(.*)*x"]
    case.put_json("config.json", config)
    case.write()
    assert outcome(case, bases["int4"]) == ("loaded", "")


def test_a_model_is_filled_at_the_very_end(bases, tmp_path, monkeypatch):
    """An error in the middle of the last step leaves the model as it was."""
    case = Case(bases["int8"][0], tmp_path / "model")
    case.write()
    model = small_model(1)
    before, calls = identities(model), iter(range(3))

    def failing(value, requires_grad):
        next(calls)
        return nn.parameter.Parameter(value, requires_grad)

    monkeypatch.setattr(model_builder.nn, "Parameter", failing)
    with pytest.raises(StopIteration):
        load_pretrained(case.folder, model)
    assert identities(model) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key a is there twice"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": 99999999999999999999}', "beyond 64 bits"),
        ("[" * 10**5, "nested too deeply"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        (b"\xff{}", "no UTF-8 text"),
        ("[]", "holds a JSON object, got list"),
        ("", "no JSON that can be read"),
    ],
)
def test_json_of_others(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        strict_json.parsed_object(text, "here")
    assert str(caught.value).startswith("here ")
    assert strict_json.parsed_object('{"a": Infinity}', "here", nonfinite=True) == {"a": float("inf")}
    # As transformers writes the longest input of a tokenizer that has none.
    text = f'{{"a": {10**30}, "b": {2**63 - 1}}}'
    assert strict_json.parsed_object(text, "here", huge=True) == {"a": 1e30, "b": 2**63 - 1}


def test_wrong_values_are_shown_short_and_plain():
    assert strict_json.shown("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
    assert len(strict_json.shown("x" * 10**6)) < 70


def test_blocks_far_longer_than_the_tensor_are_refused():
    """A block of 2**40 elements over a row of 64 would be padded to that length."""
    scheme = replace(
        SCHEMES["int8_rowwise"], name="long", scale=replace(SCHEMES["int8_rowwise"].scale, block=2**40)
    )
    with pytest.raises(ValueError, match="too long for a tensor of shape"):
        check_recipe(Meta(Recipe(weight=scheme), -1, torch.float32), (8, 64))


# Records of weights: each tensor of a folder belongs to one of them.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two quantized layers, saved."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    path = tmp_path_factory.mktemp("records") / "model"
    ao_lab.save_pretrained(model, path)
    return path


def test_two_weights_of_one_tensor(folder):
    """Refused of this library's folders, and of others'."""
    opened = look_at(folder)
    records = read_records(opened)
    assert set(dense_names(records.weights, opened)) == {"0.bias", "1.bias"}
    first, second = records.weights["0.weight"], records.weights["1.weight"]
    part, full = next(iter(first.names.items()))
    both = {"0.weight": first, "1.weight": replace(second, names={**second.names, part: full})}
    said = f"1.weight and 0.weight are both made from {full}; fetch it again"
    with pytest.raises(ValueError, match=said):
        dense_names(both, opened)
    with pytest.raises(ValueError, match=said):
        completed(Records(both, (), {}), opened)
    left = replace(records, left_out={full: "not needed"})
    with pytest.raises(ValueError, match=f"0.weight and what is left out are both made from {full}"):
        completed(left, opened)
