"""A thousand broken folders: each ends in one clear error, or loads what was saved; the model changes wholly or not at all."""

import random
import resource
import shutil
import signal
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ao_lab import (
    Int8StaticActivationInt8WeightConfig,
    QuantizedTensor,
    SchemeConfig,
    checkpoint_models,
    checkpoint_records,
    checkpoints,
    load_pretrained,
    quantize_,
    save_pretrained,
    strict_json,
)
from tests import mutations_of_checkpoints as mutations
from tests.mutated_files import Case
from tests.mutations_of_checkpoints import FILES
from tests.mutations_of_configurations import BUILT, CONFIGS, SHARDED

COUNT = 1000
SECONDS = 10
#: Address space beyond what the process has when the test begins.
MOST_MEMORY = 2**30
LONGEST_MESSAGE = 1200
SCHEMES = {
    "int8": ("int8_rowwise", "int8_rowwise", "compressed-tensors"),
    "fp8": ("fp8_rowwise", None, "compressed-tensors"),
    "int4": ("int4_g32_asymmetric", None, "compressed-tensors"),
    "mxfp4": ("mxfp4", None, "compressed-tensors"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3", "compressed-tensors"),
    "nvfp4": ("nvfp4", None, "compressed-tensors"),
    "ours int4": ("int4_g32_asymmetric", "int8_rowwise", "ao_lab"),
    "ours nvfp4": ("nvfp4", "nvfp4", "ao_lab"),
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


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Valid folders: their files, whether they are in shards, and the values of the model (None where it is built)."""
    root, made = tmp_path_factory.mktemp("valid"), {}
    for name, (scheme, activation, layout) in SCHEMES.items():
        model = small_model()
        quantize_(model, SchemeConfig(scheme=scheme, activation_scheme=activation))
        made[name] = model, layout, 5 * 10**9, False
        made[name + " in shards"] = model, layout, 2000, False
    static = small_model()
    quantize_(static, Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05)))
    made["static"] = static, "compressed-tensors", 5 * 10**9, False
    built = llama()
    quantize_(built, SchemeConfig(scheme="mxfp4"))
    made["built"] = made["built again"] = built, "auto", 5 * 10**9, True
    folders = {}
    for name, (model, layout, limit, is_built) in made.items():
        saved = save_pretrained(model, root / name, layout=layout, max_shard_bytes=limit)
        files = {path.name: path.read_bytes() for path in (root / name).iterdir()}
        folders[name] = files, len(saved.files) > 2, values(model), is_built
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


def run(bases, folder, seeds, only=()):
    """Outcomes by kind, and the complaints, of mutations with these seeds (of these ways alone, if `only`)."""
    names, counts, wrong = list(bases), Counter(), []
    with limits():
        for seed in seeds:
            rng = random.Random(seed)
            base = bases[names[seed % len(names)]]
            kinds = only or [
                *FILES,
                *CONFIGS,
                *(SHARDED * 3 if base[1] else ()),
                *(BUILT * 4 if base[3] else ()),
            ]
            mutate = kinds[(seed // len(names)) % len(kinds)] if seed < COUNT // 2 else rng.choice(kinds)
            case = Case(base[0], folder / "model")
            mutate(rng, case)
            case.write()
            how, complaint = outcome(case, base)
            shutil.rmtree(case.folder)
            if (folder / "executed").exists():
                complaint = "something was executed"
                (folder / "executed").unlink()
            counts[how] += 1
            if complaint:
                wrong.append(f"seed {seed} {names[seed % len(names)]} {mutate.__name__}: {complaint}")
    return counts, wrong


@pytest.mark.filterwarnings("ignore")
def test_a_thousand_broken_folders(bases, tmp_path):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts, wrong = run(bases, tmp_path, range(COUNT))
    assert not wrong, f"{len(wrong)} of {COUNT}:\n" + "\n".join(wrong[:40])
    assert counts["error"] + counts["loaded"] == COUNT
    assert counts["error"] > 0.7 * COUNT
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(f"{dict(counts)}, peak memory grew by {grown:.0f} MB")
    assert grown < 300


def test_what_was_not_broken_loads(bases, tmp_path):
    for name, base in bases.items():
        case = Case(base[0], tmp_path / name)
        case.write()
        assert outcome(case, base) == ("loaded", ""), name


NOTHING = {
    "check_specs": (
        checkpoint_records,
        mutations.same_size_dtype,
        mutations.other_shape,
        mutations.resize_tensor,
    ),
    "_check_description": (checkpoint_records, mutations.record_block, mutations.record_other),
    "check_recipe": (checkpoint_records, mutations.record_block),
    "_check_names": (checkpoint_records, mutations.shared_names),
    "_check_dense": (checkpoint_records, mutations.same_size_dtype),
    "_check_said": (checkpoint_records, mutations.said_twice),
    "check_scheme_fields": (checkpoint_records, mutations.record_value, mutations.record_block),
    "check_value": (checkpoint_records, mutations.record_value),
    "check_state": (checkpoints, mutations.drop_tensor, mutations.other_shape, mutations.rename_tensor),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOTHING)
def test_without_a_check_it_is_noticed(bases, tmp_path, monkeypatch, name):
    module, *kinds = NOTHING[name]
    monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    assert run(bases, tmp_path, range(300), kinds)[1] != []


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
    with pytest.raises(ValueError, match=r"plain name of a \.safetensors file in the same folder"):
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
    records["weights"]["0.weight"]["kernel"] = "int8"
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

    monkeypatch.setattr(checkpoint_models.nn, "Parameter", failing)
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


def test_wrong_values_are_shown_short_and_plain():
    assert strict_json.shown("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
    assert len(strict_json.shown("x" * 10**6)) < 70
